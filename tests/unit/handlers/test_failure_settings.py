"""Rules for errors of handlers in the settings."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from integr8s_idem.config import Settings, load_settings
from integr8s_idem.config.error_names import error_class
from integr8s_idem.errors import SettingsError
from integr8s_idem.failures import dead_letter, discard, retry, retry_later, stop
from integr8s_idem.handlers.failure_settings import check_failures, rules_of


class Shop:
    class OutOfStockError(Exception):
        """An error whose class is in another class."""


def settings_with(*failures: dict[str, Any], service: str = "billing") -> Settings:
    return Settings.model_validate({"services": {service: {"failures": failures}}})


def test_rules_in_the_settings_are_those_of_the_functions() -> None:
    settings = settings_with(
        {"error": "httpx.TransportError", "action": "retry", "attempts": 20, "first_pause_seconds": 2},
        {"error": "OSError", "action": "retry", "jitter": False, "longest_pause_seconds": 60, "through_causes": True},
        {"error": ["KeyError", "builtins.IndexError"], "action": "discard"},
        {"error": "httpx.TimeoutException", "action": "retry_later", "delay_seconds": 300},
        {"error": "ValueError", "action": "dead_letter"},
        {"error": "MemoryError", "action": "stop"},
    )

    assert rules_of(settings.service("billing").failures) == (
        retry(httpx.TransportError, attempts=20, first_pause=2),
        retry(OSError, jitter=False, longest_pause=60, through_causes=True),
        discard(KeyError, IndexError),
        retry_later(httpx.TimeoutException, delay=timedelta(minutes=5)),
        dead_letter(ValueError),
        stop(MemoryError),
    )


@pytest.mark.parametrize(
    ("rule", "path", "message"),
    [
        ({"error": "OSError", "action": "discrad"}, "0.action", '"discard"'),
        ({"errors": "OSError", "action": "discard"}, "0.errors", "did you mean error?"),
        ({"error": "OSError", "action": "discard", "attempts": 3}, "0", "attempts does not apply"),
        ({"error": "OSError", "action": "retry", "delay_seconds": 3}, "0", "delay_seconds does not apply"),
        ({"error": "OSError", "action": "retry_later"}, "0", "needs delay_seconds"),
        ({"error": "OSError", "action": "retry", "first_pause_seconds": 9, "longest_pause_seconds": 1}, "0", "exceeds"),
        ({"error": [], "action": "stop"}, "0.error", "at least one item"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_invalid_rule_is_a_mistake_in_the_settings(rule: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides={"services": {"billing": {"failures": [rule]}}})

    found = {each.path: each.message for each in caught.value.mistakes}
    assert message in found[f"services.billing.failures.{path}"]


def test_rules_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__BILLING__FAILURES", '[{"error": "OSError", "action": "stop"}]')

    assert rules_of(load_settings().service("billing").failures) == (stop(OSError),)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("KeyError", KeyError),
        ("builtins.KeyError", KeyError),
        ("httpx.TransportError", httpx.TransportError),
        (f"{__name__}.Shop.OutOfStockError", Shop.OutOfStockError),
    ],
)
def test_an_error_is_found_by_its_name(name: str, found: type[Exception]) -> None:
    assert error_class(name) is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("httpx.TranportError", "did you mean httpx.TransportError?"),
        ("ConectionError", "did you mean ConnectionError?"),
        ("htpx.TransportError", "did you mean httpx.TransportError?"),
        ("qqqqqqq.NoError", 'module "qqqqqqq" not found'),
        ("os.path", "is not a class of exceptions"),
        ("KeyboardInterrupt", "name a subclass of Exception"),
        ("not a name", "does not exist"),
        ("", "does not exist"),
        ("a..b", "does not exist"),
        ("print", "is not a class of exceptions"),
    ],
)
def test_an_unknown_name_of_an_error_is_refused_with_a_suggestion(name: str, message: str) -> None:
    [mistake] = check_failures(settings_with({"error": name, "action": "stop"}))

    assert mistake.path == "services.billing.failures.0.error"
    assert message in mistake.message


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_shop.py").write_text("raise OSError('no licence')")
    (tmp_path / "lacking_shop.py").write_text("import a_module_that_does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ValueError, match="cannot be imported: OSError: no licence"):
        error_class("broken_shop.OrderError")
    with pytest.raises(ValueError, match="No module named 'a_module_that_does_not_exist'"):
        error_class("lacking_shop.OrderError")


def test_only_the_services_of_an_application_are_checked() -> None:
    settings = settings_with({"error": "qqqqqqq.NoError", "action": "stop"}, service="of-another-application")

    assert check_failures(settings, ["billing"]) == []
    assert len(check_failures(settings, ["of_another_application"])) == 1
