"""How doctor shows the rules for errors of handlers, and which it warns of."""

from __future__ import annotations

from pathlib import Path

import pytest

from integr8s_idem import EventRouter, PermanentError, RetryAfter
from integr8s_idem.diagnostics import Code, Severity
from integr8s_idem.doctor.failure_rules import unreachable
from integr8s_idem.failures import FailureRule, dead_letter, discard, retry, stop
from integr8s_idem.integrations.dishka import DispatcherProvider, KafkaProvider
from integr8s_idem.runtime import Platform, Service
from tests.support.doctor import found_in
from tests.support.versions import OrderPlaced

AWAY = '[kafka]\nbootstrap_servers = "127.0.0.1:1"\n[store]\nurl = "redis://127.0.0.1:1/0"\n'
IN_SETTINGS = '[[services.billing.failures]]\nerror = "OSError"\naction = "stop"\n'
RULES = {Code.FAILURE_RULES, Code.RULE_UNREACHABLE, Code.RULE_DISCARDS_ALL}


def platform_of(router: EventRouter) -> Platform:
    return Platform(Service("billing", providers=[KafkaProvider(), DispatcherProvider(router)]))


async def test_the_rules_of_handler_router_and_settings_are_shown_in_their_order(tmp_path: Path) -> None:
    router = EventRouter(failures=[retry(KeyError, attempts=20)])

    @router.on(OrderPlaced, failures=[discard(LookupError)])
    async def charge(event: OrderPlaced) -> None: ...

    found = await found_in(AWAY + IN_SETTINGS, tmp_path, platform_of(router))

    # The worst first.
    warned, shown = (one for one in found if one.code in RULES)
    assert (shown.code, shown.severity, shown.where) == (Code.FAILURE_RULES, Severity.INFO, "service billing")
    assert shown.what == (
        "handler charge of order_placed: discard(LookupError); retry(KeyError, attempts=20); stop(OSError)"
    )
    assert (warned.code, warned.severity) == (Code.RULE_UNREACHABLE, Severity.WARNING)
    assert "retry(KeyError, attempts=20) comes after discard(LookupError)" in warned.what


async def test_a_rule_that_discards_every_error_is_found(tmp_path: Path) -> None:
    router = EventRouter(failures=[discard(Exception)])

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    found = await found_in(AWAY, tmp_path, platform_of(router))

    [warned] = [one for one in found if one.code is Code.RULE_DISCARDS_ALL]
    assert "discard(Exception) discards every error of handler charge" in warned.what


async def test_handlers_without_rules_are_not_mentioned(tmp_path: Path) -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    assert not RULES & {one.code for one in await found_in(AWAY, tmp_path, platform_of(router))}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([retry(OSError), stop(ConnectionError)], [1]),
        ([retry(OSError), stop(ConnectionError, KeyError)], []),
        ([retry(OSError), retry(KeyError), stop(ConnectionError, KeyError)], [2]),
        ([stop(ConnectionError), retry(OSError)], []),
        ([retry(OSError), stop(ConnectionError, through_causes=True)], []),
        ([retry(OSError, through_causes=True), stop(ConnectionError, through_causes=True)], [1]),
        ([retry(Exception), dead_letter(PermanentError), stop(RetryAfter), stop(ExceptionGroup)], []),
        ([retry(PermanentError), dead_letter(PermanentError)], [1]),
        ([retry(ExceptionGroup), dead_letter(ExceptionGroup)], [1]),
    ],
    ids=str,
)
def test_a_rule_is_unreachable_if_earlier_ones_match_all_of_its_errors(
    rules: list[FailureRule], expected: list[int]
) -> None:
    assert [rules.index(rule) for rule, _ in unreachable(rules)] == expected
