"""`WorkerHarness`: run the services of an application in a test, with redeliveries, crashes and other faults.

    @pytest.fixture
    def harness(payments: FakePayments) -> WorkerHarness:
        return WorkerHarness(platform, "billing", fakes={Payments: payments})

    async def test_a_redelivery_charges_once(harness: WorkerHarness, payments: FakePayments) -> None:
        await harness.publish(OrderPlaced(order_id="1", amount=30))
        await harness.redeliver_all()

        assert payments.charges == ["1"]

The harness runs the real code: the container of the service with its dispatcher, manager and worker.  Only the broker,
the store and time are simulated in memory.  With `sqlite_file` the store is a SQLite file, for transactional handlers.
Background tasks of services run as well.
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
from integr8s_idem.testing.faults import Fault, PlannedFault
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.harness_arguments import check_events, platform_of
from integr8s_idem.testing.harness_run import Running
from integr8s_idem.testing.memory_broker import StoredMessage
from integr8s_idem.testing.observations import DeadLetterSeen, HandlerRun
from integr8s_idem.testing.provider_overrides import Overrides
from integr8s_idem.testing.span_recorder import RecordedSpans

if TYPE_CHECKING:
    from integr8s_idem.testing.sqlite_store import SqliteStore


class NotReachedError(AssertionError):
    """A crash or stall was requested at a point that was never reached, so the test did not exercise it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}. Read more: integr8s-idem errors NotReachedError"


class WorkerHarness:
    """Runs services of an application, each with one worker, under the control of a test.

    Use it in `async with`, or with the pytest plugin, which enters every harness that is a fixture of a test.  Its time
    jumps forward: leases lapse and pauses end immediately.  While a handler runs, time passes normally.
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
            application: The platform that `integr8s-idem run` would run, or one service.
            services: The services of the platform to run; all if none is named.
            fakes: Objects that replace those of the containers, by type.
            providers: Dishka providers with `override=True`, for fakes with their own scope or dependencies.
            settings: Settings, or a settings file; by default ./settings.toml, if it exists, as for `run`.  Server
                addresses are ignored.
            overrides: Nested values that take precedence: `{"idempotency": {"max_attempts": 2}}`.  Not with a
                `Settings` object.
            sqlite_file: Keep the records in this file instead of in memory, as transactional handlers need it.  The
                settings in the containers name this store.

        Raises:
            ApplicationError: The platform has no such service, or `application` is neither a platform nor a service.
            SettingsError: The settings are invalid; see `load_settings`.
        """
        platform = platform_of(application, "WorkerHarness")
        self._services = platform.choose(services)
        self._settings = _without_servers(_read(platform, settings, overrides), sqlite_file)
        self._has_sqlite_store = sqlite_file is not None
        self._overrides = Overrides(fakes or {}, providers)
        self._entered: Running | None = None
        self._has_ended = False

    # Deliveries.

    async def publish(self, *events: BaseEvent) -> None:
        """Deliver `events`, and wait until they and the events that they cause are settled.

        Raises:
            ApplicationError: No service of this harness reads the topic of an event, or one is not an event.
            NotSettledError: See `settled`.
        """
        check_events(*events)
        for event in events:
            self.send(event)
        await self.settled()

    def send(self, event: BaseEvent, *, partition: int | None = None) -> None:
        """Deliver `event` without waiting.

        Args:
            partition: 0 or 1; events of different partitions are processed concurrently.

        Raises:
            ApplicationError: No service of this harness reads its topic, or it is not an event.
        """
        check_events(event)
        message = self._open.publisher.message(event)
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
        """Deliver a raw message without waiting, for example with another envelope or an invalid body.

        Raises:
            ApplicationError: No service of this harness reads `topic`.
        """
        here = self._open
        topics = here.topics()
        if topic not in topics:
            raise ApplicationError(
                f"no service of this harness reads {topic}; they read: {', '.join(sorted(topics))}. "
                "Name the service that does, or fix [kafka] topic_prefix"
            )
        here.world.broker.append(topic, key, value, headers, partition=partition)

    async def redeliver(self, event: BaseEvent) -> None:
        """Deliver the same event once more, like a producer that did not get the broker's answer."""
        await self.publish(event)

    async def redeliver_all(self) -> None:
        """Deliver all messages so far once more, in order, and wait until they are settled."""
        self._open.repeat_all()
        await self.settled()

    async def settled(self) -> None:
        """Wait until all delivered messages are settled and committed.

        By then crashed workers have been replaced, and stalled ones have resumed.

        Raises:
            NotSettledError: The messages do not become settled.
        """
        await self._open.settle()

    # Time and faults.

    async def advance(self, seconds: float) -> None:
        """Advance the time by `seconds`; timers that are due fire in order."""
        await self._open.advance(seconds)

    def crash_at(self, point: CrashPoint | str, occurrence: int = 1) -> None:
        """Crash the worker that reaches `point`, as by SIGKILL.  A new one takes over when the lease lapses.

        Args:
            point: A `CrashPoint`, or your own name that a fake reports with `await harness.reached(name)`.
            occurrence: 1 for the first arrival.
        """
        self._here.world.points.planned.append(PlannedFault("crash", _name(point), occurrence))

    def stall_at(self, point: CrashPoint | str, occurrence: int = 1) -> None:
        """Stall the worker that reaches `point` until another one has done its work; then it resumes as a zombie."""
        self._here.world.points.planned.append(PlannedFault("stall", _name(point), occurrence))

    async def reached(self, name: str) -> None:
        """Report a custom point from a fake, at which a test may crash the worker."""
        await self._here.world.points.reached(name)

    def suffer(self, fault: Fault) -> None:
        """Let `fault` happen to the next delivery."""
        if fault.kind in ("crash", "stall"):
            self._here.world.points.planned.append(
                PlannedFault("crash" if fault.kind == "crash" else "stall", fault.where)
            )
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

    # Results.

    @property
    def runs(self) -> list[HandlerRun]:
        """All runs of handlers, in the order in which they started."""
        return list(self._here.world.runs)

    @property
    def attempts(self) -> list[int]:
        """The attempt numbers of all runs of handlers, in the order in which they started."""
        return [run.attempt for run in self.runs]

    @property
    def reconciliations(self) -> list[HandlerRun]:
        """All calls of reconcile functions, in the order in which they started."""
        return list(self._here.world.reconciliations)

    @property
    def published(self) -> list[BaseEvent]:
        """The events that handlers and outboxes have published, without repetitions, which consumers would drop.

        An event that an `Outbox` has written is listed if the class with its type has been imported.
        """
        return list(self._here.world.events.published.values())

    @property
    def dead_letters(self) -> list[DeadLetterSeen]:
        """Messages that were given up."""
        suffix = self._settings.kafka.dead_letter_suffix
        return [DeadLetterSeen.of(each) for each in self.messages() if each.topic.endswith(suffix)]

    @property
    def duplicates(self) -> int:
        """Number of deliveries answered by the record of an earlier run."""
        return sum(
            worker_run.worker.report().tally.duplicates
            for worker_run in self._here.worker_runs
            if worker_run.worker is not None
        )

    def messages(self, topic: str | None = None) -> list[StoredMessage]:
        """All messages in the broker, or those of one topic, in order for each partition."""
        return self._here.world.broker.messages(topic)

    @property
    def spans(self) -> RecordedSpans:
        """The spans that have ended; see `recorded_spans`."""
        return self._here.world.spans.spans()

    async def records(self) -> list[IdempotencyRecord]:
        """Return all records of the store, in no particular order."""
        return [record async for record in self.store.inner.scan("")]

    @property
    def unreached(self) -> list[str]:
        """Requested crashes and stalls that have not happened."""
        return self._here.world.points.missed()

    # Lifecycle.

    @property
    def entered(self) -> bool:
        """Whether the harness has been entered, and has not ended."""
        return self._entered is not None and not self._has_ended

    async def __aenter__(self) -> WorkerHarness:
        here = Running(
            self._settings, self._services, self._overrides, _sqlite_store() if self._has_sqlite_store else None
        )
        await here.begin()
        self._entered, self._has_ended = here, False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here, missed = self._here, self.unreached
        self._has_ended = True
        await here.end()
        if kind is None and missed:
            raise NotReachedError(
                f"not reached: {', '.join(missed)}; reached points: {', '.join(here.world.points.seen)}"
            )

    @property
    def _here(self) -> Running:
        if self._entered is None:
            raise RuntimeError(
                "this harness has not been entered: write `async with harness:`, or return it from a fixture and "
                "enable the plugin integr8s_idem.testing.plugin, which enters it for the test, after all fixtures"
            )
        return self._entered

    @property
    def _open(self) -> Running:
        """The run, whose workers are still there.  After its end, only its results can be read."""
        if self._has_ended:
            raise RuntimeError("this harness has ended: enter it again, which begins with an empty broker and store")
        return self._here


def recorded_spans(harness: WorkerHarness) -> RecordedSpans:
    """Return the spans that the services of `harness` have recorded, also those of workers that have crashed.

    All spans are recorded: `sample_ratio` is ignored.  A span that was open in a crash is missing.
    """
    return harness.spans


def _name(point: CrashPoint | str) -> str:
    return point.value if isinstance(point, CrashPoint) else point


def _read(platform: Platform, settings: Settings | Path | None, overrides: Mapping[str, Any] | None) -> Settings:
    if not isinstance(settings, Settings):
        return load_settings(settings, platform.settings_type, overrides=overrides, services=platform.services)
    if overrides:
        raise ApplicationError("overrides cannot be combined with a Settings object: set the values in the object")
    return settings


def _without_servers(settings: Settings, sqlite_file: Path | None) -> Settings:
    """Return the settings without telemetry, with the store in memory or in a file."""
    store: MemoryStoreSettings | SqliteStoreSettings = MemoryStoreSettings(kind="memory")
    if sqlite_file is not None:
        store = SqliteStoreSettings(kind="sqlite", path=str(sqlite_file))
    telemetry = settings.telemetry.model_copy(update={"metrics_enabled": False, "spans": "off", "otlp_endpoint": None})
    return settings.model_copy(update={"store": store, "telemetry": telemetry})


def _sqlite_store() -> SqliteStore:
    from integr8s_idem.testing.sqlite_store import SqliteStore  # database drivers are extras

    return SqliteStore()
