"""Make the rules for errors of handlers that are in the settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from integr8s_idem.config import Settings
from integr8s_idem.config.environment import same_name
from integr8s_idem.config.error_names import error_class
from integr8s_idem.config.message_text import printable_mistake
from integr8s_idem.config.sections import FailureRuleSettings
from integr8s_idem.errors import SettingsMistake
from integr8s_idem.failures import FailureAction, FailureRule


def rules_of(settings: Sequence[FailureRuleSettings]) -> tuple[FailureRule, ...]:
    """Return the rules of a service's settings.  This imports the modules of their errors.

    Raises:
        ValueError: The name of an error is not that of an exception.
    """
    return tuple(map(_rule_of, settings))


def check_failures(settings: Settings, services: Iterable[str] | None = None) -> list[SettingsMistake]:
    """Return a mistake for each rule in the settings whose error cannot be found.  This imports their modules.

    Args:
        settings: The settings of a process.
        services: Names of the services whose sections are examined; by default, all.
    """
    wanted = None if services is None else set(map(same_name, services))
    return [
        mistake
        for name, section in settings.services.items()
        if wanted is None or same_name(name) in wanted
        for number, each in enumerate(section.failures)
        for mistake in _mistakes(each, f"services.{name}.failures.{number}.error")
    ]


def _mistakes(settings: FailureRuleSettings, path: str) -> Iterator[SettingsMistake]:
    for name in settings.error:
        try:
            error_class(name)
        except ValueError as error:
            yield printable_mistake(path, str(error))


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
