"""The mode of a service in the settings, with its container and worker."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from dishka import Provider, Scope, provide
from sqlalchemy.ext.asyncio import AsyncSession

from integr8s_idem import BaseEvent, EventRouter, Outgoing, Platform, Service, Settings, Steps
from integr8s_idem._util import loop_fairness
from integr8s_idem.config import settings_warnings
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.runtime.containers import get_dispatcher, make_container
from integr8s_idem.runtime.observe_mode import log_mode, mode_warnings, why_not_observing
from integr8s_idem.testing import CrashPoint, WorkerHarness

OBSERVE = {"services": {"billing": {"mode": "observe"}}}


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"
    order: str = "1"


class Paid(BaseEvent):
    event_type: Literal["paid"] = "paid"


class Charges:
    """Handlers that note the orders that they charge."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.router = EventRouter()

    async def charge(self, order: str) -> str:
        self.charged.append(order)
        return f"receipt-{order}"


def service_of(router: EventRouter, **options: Any) -> Service:
    providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router, **options)]
    return Service("billing", providers=providers)


def harness_of(router: EventRouter, *more: Provider, overrides: Mapping[str, Any] = OBSERVE, **options: Any) -> Any:
    file: Path | None = options.pop("sqlite_file", None)
    service = service_of(router, **options)
    assert isinstance(service.providers, list)
    own = Service("billing", providers=[*service.providers, *more])
    return WorkerHarness(own, settings=Settings.model_validate(overrides), sqlite_file=file)


@pytest.fixture
def charges() -> Charges:
    made = Charges()

    @made.router.on(Placed)
    async def charge(event: Placed, outgoing: FromDishka[Outgoing]) -> str:
        outgoing.publish(Paid())
        return await made.charge(event.order)

    return made


@pytest.mark.parametrize(("mode", "charged"), [("enforce", ["1"]), ("observe", ["1", "1"])], ids=["enforce", "observe"])
async def test_a_redelivery_runs_only_if_the_service_observes(charges: Charges, mode: str, charged: list[str]) -> None:
    async with harness_of(charges.router, overrides={"services": {"billing": {"mode": mode}}}) as harness:
        await harness.publish(Placed())
        await harness.redeliver_all()

        assert charges.charged == charged
        assert len(harness.published) == 1, "the ids of outgoing events are the same"


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.BEFORE_RESERVE,
        CrashPoint.AFTER_RESERVE,
        CrashPoint.BEFORE_HANDLER,
        CrashPoint.AFTER_HANDLER,
        CrashPoint.BEFORE_PUBLISH,
        CrashPoint.AFTER_PUBLISH,
        CrashPoint.BEFORE_COMPLETE,
        CrashPoint.AFTER_COMPLETE,
        CrashPoint.BEFORE_COMMIT,
        CrashPoint.AFTER_COMMIT,
    ],
)
async def test_a_worker_that_crashes_while_it_observes_loses_no_event(
    charges: Charges, point: CrashPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulated processes share the turns of one event loop: a dead one that waits for its turn would block the others.
    monkeypatch.setattr(loop_fairness, "LONGEST_TURN", 3_600.0)
    async with harness_of(charges.router) as harness:
        harness.crash_at(point)
        await harness.publish(*[Placed(order=str(number)) for number in range(3)])
        await harness.redeliver_all()

        assert set(charges.charged) == {"0", "1", "2"}
        assert harness.dead_letters == []
        assert len(harness.published) == 3


async def test_a_rollout_from_observe_to_enforce_loses_no_event(charges: Charges) -> None:
    settings = Settings.model_validate(OBSERVE)
    async with WorkerHarness(service_of(charges.router), settings=settings) as harness:
        harness.crash_at(CrashPoint.AFTER_HANDLER)
        harness._here.world.settings = harness._here.world.settings.model_copy(update={"services": {}})
        harness.send(Placed())
        await harness.settled()
        first = list(charges.charged)
        await harness.redeliver_all()

        assert first
        assert charges.charged == first, "the last worker enforces"


async def test_an_outage_of_the_store_delays_no_event(charges: Charges) -> None:
    async with harness_of(charges.router) as harness:
        with harness.store.outage():
            await harness.publish(*[Placed(order=str(number)) for number in range(20)])

        assert charges.charged == [str(number) for number in range(20)]


async def test_steps_run_in_every_attempt_while_the_service_observes(charges: Charges) -> None:
    router = EventRouter()

    @router.on(Placed)
    async def charge(event: Placed, steps: FromDishka[Steps]) -> str:
        return await steps.run("charge", charges.charge, event.order)

    async with harness_of(router) as harness:
        await harness.publish(Placed())
        await harness.redeliver_all()

        assert charges.charged == ["1", "1"]


class Sessions(Provider):
    """Provides sessions that note their commits."""

    scope = Scope.REQUEST

    def __init__(self) -> None:
        super().__init__()
        self.commits = 0

    @provide
    async def session(self) -> AsyncIterator[AsyncSession]:
        yield AsyncSession()
        self.commits += 1


async def test_transactional_handlers_commit_without_a_record_while_the_service_observes(tmp_path: Path) -> None:
    router, sessions = EventRouter(), Sessions()

    @router.on(Placed)
    async def charge(event: Placed, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> None:
        outgoing.publish(Paid())

    async with harness_of(router, sessions, transaction=AsyncSession, sqlite_file=tmp_path / "records.db") as harness:
        await harness.publish(Placed())
        await harness.redeliver_all()

        assert sessions.commits == 2
        assert [type(event) for event in harness.published] == [Paid]


async def test_the_settings_choose_the_dispatcher(charges: Charges) -> None:
    kinds = []
    for overrides in ({}, OBSERVE):
        settings = Settings.model_validate({"store": {"kind": "memory"}, **overrides})
        container = make_container(service_of(charges.router), settings)
        kinds.append(type(await get_dispatcher(container, "billing")))
        await container.close()

    assert kinds == [IdempotentEventDispatcher, ObservingEventDispatcher]


async def test_the_log_and_the_health_say_that_the_service_observes(
    charges: Charges, caplog: pytest.LogCaptureFixture
) -> None:
    async with harness_of(charges.router) as harness:
        worker = harness._here.worker_runs[0].worker
        assert worker is not None
        assert worker.health().reason == "only observes: duplicates are handled, and counted"
        settings = Settings.model_validate(OBSERVE)
        with caplog.at_level(logging.WARNING):
            log_mode(settings, "billing", worker._processor.dispatcher)
            log_mode(settings, "billing", EventDispatcher(charges.router))

    said = [record.getMessage() for record in caplog.records if record.name == "integr8s_idem.runtime.observe_mode"]
    observes, has_no_effect = said
    assert "service billing only observes" in observes
    assert has_no_effect == (
        'services.billing.mode = "observe" has no effect: the dispatcher in its container is of type EventDispatcher'
    )


def test_the_mode_enforce_has_no_warnings(charges: Charges) -> None:
    settings, platform = Settings(), Platform(service_of(charges.router))

    assert mode_warnings(platform, settings) == []
    assert why_not_observing(settings, "billing", EventDispatcher(charges.router)) == ""
    assert [each for each in settings_warnings(settings) if "mode" in each.path] == []


def test_settings_that_do_not_apply_to_a_service_that_observes_are_reported() -> None:
    settings = Settings.model_validate({"services": {"billing": {"mode": "observe", "on_failure": "block"}}})

    found = {each.path: each.message for each in settings_warnings(settings)}

    assert "guards nothing" in found["services.billing.mode"]
    assert "does not apply" in found["services.billing.on_failure"]


def test_services_to_which_the_mode_does_not_apply_are_reported(charges: Charges) -> None:
    settings = Settings.model_validate(OBSERVE)
    plain = Service("billing", providers=[KafkaProvider(), DispatcherProvider(charges.router)])
    own = Service("billing", container=lambda _: None)  # type: ignore[arg-type,return-value]
    transactional = service_of(charges.router, transaction=AsyncSession)

    assert mode_warnings(Platform(service_of(charges.router)), settings) == []
    for service, expected in (
        (plain, "its handlers are not guarded"),
        (own, "its container must use IdempotentDispatcherProvider"),
        (transactional, "ignores transaction="),
    ):
        [warning] = mode_warnings(Platform(service), settings)
        assert warning.path == "services.billing.mode"
        assert expected in warning.message
