"""Check the rules for errors of handlers: show them, and find those that cannot have been meant.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.failures import FailureAction, FailureRule
from integr8s_idem.handlers.dispatcher import EventDispatcher

_UNREACHABLE_COST: Final = "it never decides"
_UNREACHABLE_REMEDY: Final = "put the rule for the more specific error first, or remove one of the two"
_DISCARDS_ALL: Final = "{rule} discards every error of {handler}"
_DISCARDS_ALL_COST: Final = "events that fail because of a bug or an outage are lost"
_DISCARDS_ALL_REMEDY: Final = "discard only errors that say that there is nothing to do"


def rule_findings(service: str, dispatcher: EventDispatcher) -> list[Finding]:
    """Return the rules of each handler that has some, and warnings about them."""
    rules: dict[tuple[str, tuple[FailureRule, ...]], list[str]] = {}
    for handler in dispatcher.handlers:
        if handler.failures.rules:
            rules.setdefault((handler.name, handler.failures.rules), []).append(handler.event_type)
    where = f"service {service}"
    return [
        finding
        for (name, of_handler), events in rules.items()
        for finding in _findings(where, f"handler {name} of {', '.join(events)}", of_handler)
    ]


def _findings(where: str, handler: str, rules: Sequence[FailureRule]) -> Iterator[Finding]:
    shown = f"{handler}: {'; '.join(map(str, rules))}"
    yield Finding(Code.FAILURE_RULES, Severity.INFO, where, shown, "", "")
    for rule, earlier in unreachable(rules):
        what = f"{handler}: {rule} comes after {earlier}, which matches the same errors"
        yield Finding(Code.RULE_UNREACHABLE, Severity.WARNING, where, what, _UNREACHABLE_COST, _UNREACHABLE_REMEDY)
    for rule in rules:
        if rule.action is FailureAction.DISCARD and Exception in rule.errors:
            what = _DISCARDS_ALL.format(rule=rule, handler=handler)
            yield Finding(
                Code.RULE_DISCARDS_ALL, Severity.WARNING, where, what, _DISCARDS_ALL_COST, _DISCARDS_ALL_REMEDY
            )


def unreachable(rules: Sequence[FailureRule]) -> Iterator[tuple[FailureRule, FailureRule]]:
    """Yield each rule that never decides, with an earlier one that decides instead."""
    for number, rule in enumerate(rules):
        earlier = [_decides_first(rules[:number], rule, error) for error in rule.errors]
        if None not in earlier:
            yield rule, next(each for each in earlier if each is not None)


def _decides_first(earlier: Sequence[FailureRule], rule: FailureRule, error: type[Exception]) -> FailureRule | None:
    return next((each for each in earlier if each.covers(error, through_causes=rule.through_causes)), None)
