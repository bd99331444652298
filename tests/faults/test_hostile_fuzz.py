"""A small part of the `fuzz` campaign, and bugs that it must find."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from integr8s_idem import events as wire
from integr8s_idem import keys
from integr8s_idem.config import loading, message_text, urls
from integr8s_idem.engine import results
from integr8s_idem.stores.redis import codec
from tests.campaigns.figures import Figures
from tests.fuzz import events, settings, stored
from tests.fuzz import keys as key_fuzz
from tests.fuzz.campaign import CAMPAIGN


@pytest.mark.scenario(81, 82, 83, 85, 86, 88, 91, 92, 94, 95, 96)
def test_no_fuzzed_input_breaks_a_promise() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["inputs"] == CAMPAIGN.in_test
    for kind in ("accepted", "refused_malformed", "refused_missing_id", "refused_invalid", "keys", "canonical"):
        assert figures[kind] > 100, kind
    for kind in ("records", "results", "undecodable_results", "no_result", "settings", "settings_refused", "headers"):
        assert figures[kind] > 20, kind


def test_a_fuzzed_input_is_determined_by_its_number() -> None:
    assert CAMPAIGN.run(300, 60) == CAMPAIGN.run(300, 60)


def too_deep(message: object, file: object) -> tuple[str, str]:
    raise RecursionError


@pytest.mark.parametrize(
    ("target", "module", "name", "broken", "error"),
    [
        (events.decoded, wire, "_STRICT_JSON", json.JSONDecoder(), AssertionError),
        (key_fuzz.keyed, keys, "escaped", lambda component, **_: component, AssertionError),
        (key_fuzz.keyed, keys, "MAX_KEY_LENGTH", 10**9, AssertionError),
        (key_fuzz.canonical, key_fuzz, "canonical_json", lambda value: json.dumps(value).encode(), AssertionError),
        (stored.recorded, codec, "_check", lambda *_: None, AssertionError),
        (stored.resulted, results, "ResultDecodeError", TypeError, TypeError),
        (settings.configured, message_text, "shown", lambda text, longest: text, AssertionError),
        (settings.configured, loading, "_syntax", too_deep, RecursionError),
        (settings.configured, urls, "without_secret", lambda url: url, AssertionError),
    ],
    ids=[
        "duplicate names",
        "unescaped",
        "unbounded",
        "not canonical",
        "no checksums",
        "wrong error",
        "raw text",
        "traceback",
        "secret",
    ],
)
def test_an_injected_bug_is_found_within_300_inputs(
    monkeypatch: pytest.MonkeyPatch,
    target: Callable[[Random], Figures],
    module: Any,
    name: str,
    broken: object,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(module, name, broken)

    with pytest.raises(error):
        run_all(target, 300)


def run_all(target: Callable[[Random], Figures], count: int) -> None:
    for number in range(count):
        target(Random(number))
