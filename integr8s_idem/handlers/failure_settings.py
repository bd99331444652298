"""Make the rules for errors of handlers that are in the settings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from integr8s_idem.config.error_names import error_class
from integr8s_idem.config.sections import FailureRuleSettings
from integr8s_idem.errors import SettingsMistake
from integr8s_idem.failures import FailureAction, FailureRule


def rules_of(settings: Sequence[FailureRuleSettings]) -> tuple[FailureRule, ...]:
    """Return the rules of a service's settings.  This imports the modules of their errors.

    Raises:
        ValueError: The name of an error is not that of an exception.
    """
    return tuple(map(_rule_of, settings))


def mistakes_in(settings: Sequence[FailureRuleSettings], path: str) -> list[SettingsMistake]:
    """Return a mistake for each rule whose errors cannot be found.  `path`: that of the setting."""
    found = list[SettingsMistake]()
    for number, each in enumerate(settings):
        try:
            _rule_of(each)
        except ValueError as error:
            found.append(SettingsMistake(f"{path}.{number}.error", str(error)))
    return found


def _rule_of(settings: FailureRuleSettings) -> FailureRule:
    delay, first, longest = map(
        _length, (settings.delay_seconds, settings.first_pause_seconds, settings.longest_pause_seconds)
    )
    return FailureRule(
        FailureAction(settings.action),
        tuple(map(error_class, settings.error)),
        settings.attempts,
        delay,
        first,
        longest,
        jitter=settings.jitter is not False,
        through_causes=settings.through_causes,
    )


def _length(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
