"""The order of events: set up, publish, kill, wait, stop, count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.demo.display import Display, Figures
from examples.demo.duplicator import Duplicator
from examples.demo.errors import DemoError
from examples.demo.metrics import Metrics
from examples.demo.requests import DemoRequest, as_events
from examples.demo.scenery import EVENT_TYPES, Scenery, scenery
from examples.demo.services import ServiceProcess, Services
from examples.demo.settings import LEASE_SECONDS
from examples.demo.verdict import Seen, Verdict
from examples.demo.waiting import LOOK_SECONDS, until
from integr8s_idem.errors import PublishError
from integr8s_idem.worker import EventPublisher
from providers import platform

VICTIM: Final = "k8s-worker"

_TWICE_AT_ONCE: Final = 10
"""Number of requests that are published twice from the start, one immediately after the other."""
_SEVERAL: Final = 3
_TICK_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 2.5
"""Seconds without a new delivery after which all work counts as done. Services measure their lag once a second."""
_QUIET_LOOKS: Final = 2
"""Number of rounds in which all services answered; on a busy machine, answers may take seconds."""
_END_SECONDS: Final = 20.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line."""

    requests: list[DemoRequest]
    settings: Path | None = None
    store: str = "redis"
    """Kind of the embedded store."""
    seconds: float = 110.0
    """Seconds after the start when the demo stops waiting."""
    keep: bool = False


@dataclass(frozen=True)
class Outcome:
    """The verdict and the servers that were used."""

    verdict: Verdict
    broker: str
    store: str
    seconds: float
    complaints: Sequence[str]
    """Errors that the services logged."""


async def play(options: DemoOptions, display: Display) -> Outcome:
    """Run the demo.

    Raises:
        DemoError, SettingsError, ApplicationError: The demo could not be run; everything is cleaned up.
    """
    async with scenery(options.settings, options.store, keep=options.keep) as scene:
        services = Services(list(platform.services), scene.settings_file, scene.folder)
        try:
            stage = _Stage(options, scene, services, display)
            await stage.act()
            display.say("stopping the services")
            late = await services.end(_END_SECONDS)
        finally:
            services.kill()
        verdict = Verdict(await stage.count(late))
        complaints = [f"{service.name}: {line}" for service in services for line in service.complaints()]
        return Outcome(verdict, scene.broker, scene.store, display.seconds, complaints)


class _Stage:
    """The running services, and the faults that happen to them."""

    def __init__(self, options: DemoOptions, scene: Scenery, services: Services, display: Display) -> None:
        self._options = options
        self._scene = scene
        self._services = services
        self._display = display
        self._events = as_events(options.requests, scene.run, scene.journal)
        self._duplicator = Duplicator(scene.kafka, f"{scene.run}.duplicator", EVENT_TYPES)
        self._metrics = Metrics()
        self._published = 0
        self._in_flight: frozenset[str] | None = None
        self._troubles: list[str] = []
        self._over = True
        self._looks = 0

    async def act(self) -> None:
        """Run everything up to the moment when the services may stop.

        Raises:
            DemoError: The demo cannot continue.
        """
        try:
            async with asyncio.timeout(self._options.seconds - self._display.seconds):
                await self._act()
        except TimeoutError:
            self._over = False
            self._troubles.append(f"not finished after {self._options.seconds:g} s")
        await self._look()

    async def count(self, late: Sequence[str]) -> Seen:
        """Collect the observations after the services have ended.  `late` names those that had to be killed."""
        scene, metrics = self._scene, self._metrics
        return Seen(
            requested=[event.execution_id for event in self._events],
            runs=scene.journal.runs(),
            results=await scene.ledger.results(),
            in_flight=self._in_flight or (),
            attempts=await scene.ledger.attempts(),
            over=self._over,
            killed=self._in_flight is not None,
            events=self._duplicator.events,
            copies=self._duplicator.copies,
            deliveries=metrics["deliveries"],
            duplicates_blocked=metrics["duplicates_blocked"],
            takeovers=metrics["takeovers"],
            dead_letters=metrics["dead_letters"],
            troubles=[*self._troubles, *(f"{name} had to be killed at the end" for name in late)],
        )

    async def _act(self) -> None:
        await self._set_up()
        try:
            async with asyncio.TaskGroup() as beside:
                tasks = [beside.create_task(self._duplicator.run()), beside.create_task(self._keep_looking())]
                await self._publish()
                await self._kill_in_the_middle()
                await self._wait_for_results()
                await self._wait_for_quiet()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            # Not `except*`, which would raise a group again.
            demo_errors, others = errors.split(DemoError)
            if others is not None or demo_errors is None:
                raise
            raise DemoError("; ".join(map(str, demo_errors.exceptions))) from errors

    async def _set_up(self) -> None:
        self._display.say(f"{self._scene.broker}, {self._scene.store}; starting {len(platform.services)} services")
        self._services.start()
        await self._services.ready()
        self._display.say("all services are ready")

    async def _publish(self) -> None:
        publisher = EventPublisher(self._scene.kafka)
        try:
            for number, event in enumerate(self._events):
                await publisher.publish(*([event] * (2 if number < _TWICE_AT_ONCE else 1)))
                self._published += 1
        except PublishError as error:
            raise DemoError(f"a request could not be published: {error}") from error
        finally:
            await publisher.close()
        self._display.say(f"{len(self._events)} requests are published")

    async def _kill_in_the_middle(self) -> None:
        """Kill the k8s worker while one of its scripts runs, and restart it immediately."""
        worker = self._services.by_name[VICTIM]
        await self._freeze_at_work(worker)
        self._in_flight = await self._scene.ledger.in_flight()
        # Without an await in between, so that the monitoring does not find it dead.
        worker.kill()
        self._metrics.died(VICTIM)
        worker.start()
        self._display.say(
            f"killed the {VICTIM} with {len(self._in_flight)} executions in flight, and restarted it; "
            f"the executions are taken over when their leases of {LEASE_SECONDS:g} s end"
        )
        await worker.ready()

    async def _freeze_at_work(self, worker: ServiceProcess) -> None:
        """Stop `worker` (SIGSTOP) in the middle of its work.

        A stopped worker cannot finish the work that was observed, so a kill hits it in the middle of that work.
        """
        while True:
            await until(self._is_in_the_middle)
            await self._metrics.scrape(worker.name, worker.port)
            worker.freeze()
            if await self._is_in_the_middle():
                return
            worker.thaw()

    async def _is_in_the_middle(self) -> bool:
        """Return whether a third of the work is done and several scripts run; later, one running script is enough."""
        done, all_of_them = (await self._scene.ledger.progress()).done, len(self._events)
        if done < all_of_them // 3:
            return False
        begun = await self._scene.ledger.in_flight() & self._scene.journal.runs().keys()
        return len(begun) >= (_SEVERAL if done < all_of_them // 2 else 1)

    async def _wait_for_results(self) -> None:
        await until(self._all_are_done)
        self._display.say("every request has its result")

    async def _all_are_done(self) -> bool:
        return (await self._scene.ledger.progress()).done >= len(self._events)

    async def _wait_for_quiet(self) -> None:
        """Wait for duplicates that arrive after the last result, since they could still do harm."""
        last, since, looks = (-1, -1, -1), self._display.seconds, self._looks
        while self._display.seconds - since < _QUIET_SECONDS or self._looks - looks < _QUIET_LOOKS:
            now = (self._duplicator.events, self._duplicator.copies, self._metrics["deliveries"])
            busy = self._metrics["in_flight"] or self._metrics["consumer_lag"] or not self._duplicator.idle
            if busy or now != last:
                last, since, looks = now, self._display.seconds, self._looks
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_looking(self) -> None:
        while True:
            self._services.check()
            await self._look()
            await asyncio.sleep(_TICK_SECONDS)

    async def _look(self) -> None:
        """Scrape all services, and update the display."""
        ports = {service.name: service.port for service in self._services if service.port}
        answered = await asyncio.gather(*(self._metrics.scrape(name, port) for name, port in ports.items()))
        self._looks += all(answered)
        metrics, progress = self._metrics, await self._scene.ledger.progress()
        self._display.show(
            Figures(
                requested=self._published,
                scheduled=progress.scheduled,
                running=progress.running,
                done=progress.done,
                delivered_twice=self._duplicator.copies,
                duplicates_blocked=metrics["duplicates_blocked"],
                takeovers=metrics["takeovers"],
                dead_letters=metrics["dead_letters"],
            )
        )
