"""`WorkerHarness`: the services of an application in a test, with everything that Kafka and crashes do to them.

    @pytest.fixture
    def harness(payments: FakePayments) -> WorkerHarness:
        return WorkerHarness(platform, "billing", fakes={Payments: payments})

    async def test_a_redelivery_charges_once(harness: WorkerHarness, payments: FakePayments) -> None:
        await harness.publish(OrderPlaced(order_id="1", amount=30))
        await harness.redeliver_all()

        assert payments.charges == ["1"]

What runs is the real code: the service's own container, with its dispatcher, manager and worker.  In memory are only
the broker, the store and time.  With `sqlite_file` the store is a SQLite file, for handlers whose outcomes commit with
what they write.  Background tasks of services run, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dishka.provider import BaseProvider

from integr8s_idem.config import MemoryStoreSettings, Settings, SqliteStoreSettings, load_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.records import IdempotencyRecord
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.testing.crash_points import CrashPoint
from integr8s_idem.testing.faults import Fate, Fault
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.harness_run import Running
from integr8s_idem.testing.memory_broker import StoredMessage
from integr8s_idem.testing.observations import DeadLetterSeen, HandlerRun
from integr8s_idem.testing.provider_overrides import Overrides

if TYPE_CHECKING:
    from integr8s_idem.testing.sqlite_store import SqliteStore


class NotReachedError(AssertionError):
    """A crash or a stall was ordered at a point that nobody got to: the test shows nothing about it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}. Read more: integr8s-idem errors NotReachedError"


class WorkerHarness:
    """Services of an application, each by one worker, under a test's control.

    Inside of `async with`, or by the pytest plugin, which enters every harness that is a fixture of a test.  Its time
    leaps: leases lapse and pauses end at once.  While a handler runs, time passes as ever.
    """

    def __init__(
        self,
        application: Platform | Service,
        *services: str,
        fakes: Mapping[Any, object] | None = None,
        providers: Sequence[BaseProvider] = (),
        settings: Settings | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        sqlite_file: Path | None = None,
    ) -> None:
        """
        Args:
            application: What `integr8s-idem run` would run, or one service.
            services: Those of the platform that are to run; all of them if none is named.
            fakes: Objects that take the place of what the containers provide, by its type.
            providers: Dishka providers with `override=True`, for fakes with a scope or dependencies of their own.
            settings: Settings, or a file of them; ./settings.toml if it is there, as for `run`, if not given.
                Addresses of servers mean nothing here.
            overrides: Nested values that win: `{"idempotency": {"max_attempts": 2}}`.  With a file, or none.
            sqlite_file: Records are in this file instead of memory, as transactions of handlers need it: the store of
                the settings that containers get is this one.

        Raises:
            ApplicationError: The platform has no such service.
            SettingsError: As `load_settings`.
        """
        platform = application if isinstance(application, Platform) else Platform(application)
        self._services = platform.choose(services)
        self._settings = _without_servers(_read(platform, settings, overrides), sqlite_file)
        self._has_sqlite_store = sqlite_file is not None
        self._overrides = Overrides(fakes or {}, providers)
        self._entered: Running | None = None

    # Deliveries.

    async def publish(self, *events: BaseEvent) -> None:
        """Deliver `events`, and return once they are settled, with all that comes of them.

        Raises:
            ApplicationError: No service of this harness reads the topic of one of them.
            NotSettledError: As `settled`.
        """
        for event in events:
            self.send(event)
        await self.settled()

    def send(self, event: BaseEvent, *, partition: int | None = None) -> None:
        """Deliver `event` without waiting.

        Args:
            partition: 0 or 1: another one than the event's own is worked on at the same time.

        Raises:
            ApplicationError: No service of this harness reads its topic.
        """
        here = self._here
        message = here.publisher.message(event)
        self.put(message.topic, message.value, message.headers, key=message.key, partition=partition)

    def put(
        self,
        topic: str,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]] = (),
        *,
        key: bytes | None = None,
        partition: int | None = None,
    ) -> None:
        """Deliver a message as it is, without waiting: another envelope, or what cannot be decoded.

        Raises:
            ApplicationError: No service of this harness reads `topic`.
        """
        topics = self._here.topics()
        if topic not in topics:
            raise ApplicationError(
                f"no service of this harness reads {topic}; they read: {', '.join(sorted(topics))}. "
                "Name the service that does, or fix [kafka] topic_prefix"
            )
        self._here.world.broker.append(topic, key, value, headers, partition=partition)

    async def redeliver(self, event: BaseEvent) -> None:
        """Deliver the same event once more, as a producer does that has not heard the broker's answer."""
        await self.publish(event)

    async def redeliver_all(self) -> None:
        """Deliver everything once more that was delivered so far, in its order, and return once that is settled."""
        self._here.repeat_all()
        await self.settled()

    async def settled(self) -> None:
        """Return once all that was delivered is settled and committed; whoever has crashed has a successor by then, and
        whoever stood still has come back.

        Raises:
            NotSettledError: That does not happen.
        """
        await self._here.settle()

    # Time, and what goes wrong.

    async def advance(self, seconds: float) -> None:
        """Let time pass: what is due within `seconds` happens, in its order."""
        await self._here.advance(seconds)

    def crash_at(self, point: CrashPoint | str, occurrence: int = 1) -> None:
        """The worker that gets there dies, as by SIGKILL; another one begins, and takes over when the lease lapses.

        Args:
            point: A `CrashPoint`, or a name of your own that a fake tells by `await harness.reached(name)`.
            occurrence: 1 for the first arrival.
        """
        self._here.world.points.fates.append(Fate("crash", _name(point), occurrence))

    def stall_at(self, point: CrashPoint | str, occurrence: int = 1) -> None:
        """The worker that gets there stands still until another has done its work; then it comes back, a zombie."""
        self._here.world.points.fates.append(Fate("stall", _name(point), occurrence))

    async def reached(self, name: str) -> None:
        """For fakes: the handler is at a point of its own, at which a test may let it crash."""
        await self._here.world.points.reached(name)

    def suffer(self, fault: Fault) -> None:
        """Let one of `MISHAPS` happen to what is delivered next."""
        if fault.kind in ("crash", "stall"):
            self._here.world.points.fates.append(Fate("crash" if fault.kind == "crash" else "stall", fault.where))
        elif fault.kind == "lost answer":
            self.store.lose_answer(fault.where)
        elif fault.kind == "outage":
            self.store.fail_next(fault.where, times=3)
        else:
            self._here.repeats_all = True

    @property
    def store(self) -> FlakyStore:
        """The store, which can fail: `harness.store.fail_next("complete")`."""
        return self._here.world.store

    # What came of it.

    @property
    def runs(self) -> list[HandlerRun]:
        """Every run of a handler, in the order in which they began."""
        return list(self._here.world.runs)

    @property
    def attempts(self) -> list[int]:
        """The attempt number of every run of a handler, in the order in which they began."""
        return [run.attempt for run in self.runs]

    @property
    def published(self) -> list[BaseEvent]:
        """What handlers have published, each event once, however often it was sent: the next guard drops the rest."""
        return list(self._here.world.events.published.values())

    @property
    def dead_letters(self) -> list[DeadLetterSeen]:
        """Messages that were given up."""
        suffix = self._settings.kafka.dead_letter_suffix
        return [DeadLetterSeen.of(each) for each in self.messages() if each.topic.endswith(suffix)]

    @property
    def duplicates(self) -> int:
        """Deliveries that were answered by an earlier run's record."""
        return sum(life.worker.report().tally.duplicates for life in self._here.lives if life.worker is not None)

    def messages(self, topic: str | None = None) -> list[StoredMessage]:
        """Everything that lies in the broker, or in one topic of it, in the order of sending for each partition."""
        return self._here.world.broker.messages(topic)

    async def records(self) -> list[IdempotencyRecord]:
        """What the store remembers, in no order."""
        return [record async for record in self.store.inner.scan("")]

    @property
    def unreached(self) -> list[str]:
        """Crashes and stalls that were ordered and have not happened."""
        return self._here.world.points.missed()

    # Its life.

    @property
    def entered(self) -> bool:
        """Whether it has begun."""
        return self._entered is not None

    async def __aenter__(self) -> WorkerHarness:
        here = Running(
            self._settings, self._services, self._overrides, _sqlite_store() if self._has_sqlite_store else None
        )
        await here.begin()
        self._entered = here
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here, missed = self._here, self.unreached
        await here.end()
        if kind is None and missed:
            raise NotReachedError(
                f"nobody got to: {', '.join(missed)}; points that were passed: {', '.join(here.world.points.seen)}"
            )

    @property
    def _here(self) -> Running:
        if self._entered is None:
            raise RuntimeError(
                "this harness has not begun: write `async with harness:`, or let a fixture return it, where the "
                "plugin integr8s_idem.testing.plugin is active"
            )
        return self._entered


def _name(point: CrashPoint | str) -> str:
    return point.value if isinstance(point, CrashPoint) else point


def _read(platform: Platform, settings: Settings | Path | None, overrides: Mapping[str, Any] | None) -> Settings:
    if not isinstance(settings, Settings):
        return load_settings(settings, platform.settings_type, overrides=overrides, services=platform.services)
    if overrides:
        raise ApplicationError("overrides go with a file of settings; these are made already: put them in there")
    return settings


def _without_servers(settings: Settings, sqlite_file: Path | None) -> Settings:
    """The same with neither a collector nor a port, and with records in memory or in a file."""
    store: MemoryStoreSettings | SqliteStoreSettings = MemoryStoreSettings(kind="memory")
    if sqlite_file is not None:
        store = SqliteStoreSettings(kind="sqlite", path=str(sqlite_file))
    telemetry = settings.telemetry.model_copy(update={"metrics_enabled": False, "spans": "off", "otlp_endpoint": None})
    return settings.model_copy(update={"store": store, "telemetry": telemetry})


def _sqlite_store() -> SqliteStore:
    from integr8s_idem.testing.sqlite_store import SqliteStore  # the drivers of databases are extras

    return SqliteStore()
