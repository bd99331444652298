"""A short run of the campaign `security-fuzz`, and injected bugs that it must find."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from integr8s_idem import keys
from integr8s_idem.cli import log_format as cli_logging
from integr8s_idem.cli import output as cli_output
from integr8s_idem.integrations import asgi, http_responses
from integr8s_idem.worker import replay_policy
from tests.campaigns.figures import Figures
from tests.security_fuzz import headers, output, requests, responses
from tests.security_fuzz import keys as key_fuzz
from tests.security_fuzz.campaign import CAMPAIGN


@pytest.mark.timeout(300)
@pytest.mark.scenario(123, 124, 125, 128, 130, 133, 136)
def test_no_input_of_the_campaign_breaks_a_promise() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["inputs"] == CAMPAIGN.in_test
    for kind in ("forged_headers", "signed_replays", "entry_keys", "records", "refused_responses", "requests"):
        assert figures[kind] > 1_000, kind
    for kind in (
        "sent_responses",
        "replayed_responses",
        "dead_letters_shown",
        "records_shown",
        "lines_shown",
        "lines_logged",
    ):
        assert figures[kind] > 100, kind
    assert figures["commands_typed"] > 20


@pytest.mark.parametrize(
    ("target", "module", "name", "broken"),
    [
        (headers.forged, replay_policy, "is_signed", lambda *_: True),
        (headers.signed, replay_policy, "is_signed", lambda *_: True),
        (headers.signed, replay_policy, "own_headers", lambda _: []),
        (key_fuzz.distinct, keys, "_RESERVED", ("nothing",)),
        (key_fuzz.distinct, keys, "escaped", lambda component, **_: component),
        (responses.replayed, http_responses, "_VALUE", re.compile(r"(?s).*")),
        (responses.replayed, http_responses, "PER_CONNECTION", frozenset()),
        (requests.asked, asgi, "host_of", lambda _: ""),
        (requests.asked, asgi, "fingerprint", lambda _: b"the same for all"),
        (output.shown, cli_output, "printable_lines", str),
        (output.shown, cli_logging, "printable", str),
    ],
    ids=[
        *("unsigned", "changed", "headers unsigned", "no reserved names", "unescaped", "any value", "any header"),
        *("one host", "one body", "raw lines", "raw log"),
    ],
)
def test_an_injected_vulnerability_is_found_within_1000_inputs(
    monkeypatch: pytest.MonkeyPatch, target: Callable[[Random], Figures], module: Any, name: str, broken: object
) -> None:
    monkeypatch.setattr(module, name, broken)

    with pytest.raises(Exception, match=r"."):  # any error of the target
        all_of(target, 1_000)


def all_of(target: Callable[[Random], Figures], count: int) -> None:
    for number in range(count):
        target(Random(number))
