"""FastAPI applications that die at named points, with a client that retries: on a real Redis and a real database.

A trial uses a shape from `tests.crashes.serving` and a kind of database.  It starts three applications that each die at
a crash point, and a last one that does not.  The client sends each request with its own key until it is answered.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx

from integr8s_idem.integrations.httpx import RetryingTransport, idempotency_key
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.judging import log_tail
from tests.crashes.serving import SHAPES, TRANSACTIONAL, reserved_port
from tests.crashes.stores import open_database
from tests.crashes.subscribing_points import COMMIT, COMPLETE, CRASHES, EFFECT, KINDS, LEASE, RESERVE
from tests.crashes.tills import TillOrder, allowed, attempts_of, concurrent_trials, judge_rows
from tests.crashes.transacting import tables
from tests.support.homes import Home, open_home
from tests.support.redis import RedisServer

MODULE: Final = "tests.crashes.serving"
REQUESTS: Final = 3
"""Concurrent new requests to each application."""
PATIENCE: Final = 60.0
"""Timeout in seconds of a request, including retries."""

RESPONSE: Final = (CrashPoint.BEFORE_RESPONSE, CrashPoint.IN_RESPONSE, CrashPoint.AFTER_RESPONSE)
ORDERED_POINTS: Final = (*RESERVE, *EFFECT, *COMMIT, *COMPLETE, *RESPONSE)
"""All points, in the order in which a request reaches them."""


@dataclass(frozen=True)
class Servers:
    """Servers that all trials share."""

    redis: RedisServer
    homes: Mapping[str, Home]
    folder: Path


@asynccontextmanager
async def open_servers(kinds: Iterable[str] = KINDS) -> AsyncIterator[Servers]:
    """Start the servers, and stop them at the end of the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idem-http-")))
        redis = stack.enter_context(RedisServer())
        yield Servers(redis, {kind: stack.enter_context(open_home(kind)) for kind in kinds}, folder)


class Trial:
    """An application, its successors on the same port, and their client."""

    def __init__(self, servers: Servers, fork_server: ForkServer, name: str, shape: str, kind: str) -> None:
        self.figures = Figures(kills=0, lost=0, repeats=0)
        self._servers = servers
        self._fork_server = fork_server
        self._kind = kind
        self._shape = shape
        self._folder = servers.folder / name
        self._repeatable = 0
        self._works: list[str] = []
        self._requests: list[asyncio.Task[httpx.Response]] = []
        self._order = TillOrder(
            bootstrap="",
            store={"kind": "redis", "url": servers.redis.url, "timeout_seconds": 0.5},
            prefix=f"{name}.",
            folder=str(self._folder),
            lease=LEASE,
            shape=shape,
        )

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """Provide folder, database, port and client."""
        self._folder.mkdir()
        name = self._order.key_prefix.replace("-", "_")
        async with AsyncExitStack() as stack:
            placeholder = stack.enter_context(reserved_port())
            database = await stack.enter_async_context(
                open_database(self._servers.homes[self._kind], name, self._folder)
            )
            async with database.store.engine.begin() as connection:
                await connection.run_sync(tables.create_all)
            self._order = replace(self._order, database=database.url, port=placeholder.getsockname()[1])
            transport = RetryingTransport(
                httpx.AsyncHTTPTransport(), retries=10_000, longest=timedelta(seconds=PATIENCE)
            )
            self._client = await stack.enter_async_context(
                httpx.AsyncClient(
                    transport=transport, base_url=f"http://127.0.0.1:{self._order.port}", timeout=PATIENCE
                )
            )
            stack.callback(self._cancel_requests)
            yield

    def _cancel_requests(self) -> None:
        for request in self._requests:
            request.cancel()

    def request(self, work: str) -> None:
        """Request `work`, with retries until it is answered."""
        self._works.append(work)
        self._requests.append(asyncio.create_task(self._post(work)))

    async def _post(self, work: str) -> httpx.Response:
        key = {"Idempotency-Key": idempotency_key(work)}
        return await self._client.post("/orders", json={"work": work}, headers=key)

    async def crash(self, point: CrashPoint, occurrence: int = 1) -> bool:
        """Run the application until it dies at `point` or all requests are answered, and return whether it died.

        Raises:
            ViolationError: It exited with an unexpected status.
        """
        server = await self._fork_server.start(replace(self._order, point=point.value, occurrence=occurrence))
        either: set[asyncio.Future[Any]] = {server.ended, asyncio.gather(*self._requests, return_exceptions=True)}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if point is CrashPoint.AFTER_RESPONSE and server.running:
            # The response arrives a moment before the process dies.
            await asyncio.wait({server.ended}, timeout=0.5)
        if await self._end(server) == -signal.SIGKILL:
            self.figures.update({"kills": 1, f"kills:{point.value}": 1})
            # Each of the open requests may have been at any point.
            open_requests = sum(not request.done() for request in self._requests)
            self._repeatable += 0 if self._shape == TRANSACTIONAL else open_requests
            return True
        self.figures.update({"not_reached": 1})
        return False

    async def settle(self) -> None:
        """Run the last application until all requests are answered, and repeat each of them.

        Raises:
            ViolationError: A request was not answered, got a wrong response, or ran again.
        """
        server = await self._fork_server.start(self._order)
        answers = await asyncio.gather(*self._requests, return_exceptions=True)
        for work, answer in zip(self._works, answers, strict=True):
            self._judge(work, answer)
        for work in self._works:
            replay = await self._post(work)
            self._judge(work, replay)
            if "idempotency-replayed" not in replay.headers:
                raise ViolationError(f"{work} ran again after it had been answered")
        await self._end(server)

    def _judge(self, work: str, answer: httpx.Response | BaseException) -> None:
        if isinstance(answer, BaseException):
            raise ViolationError(f"{work} got {answer!r}:\n{log_tail(self._folder)}") from answer
        if answer.status_code != 201 or answer.json() != {"done": work}:
            raise ViolationError(f"{work} got {answer.status_code} {answer.text}:\n{log_tail(self._folder)}")
        self.figures["answers"] += 1

    async def _end(self, server: ForkedWorker) -> int:
        try:
            status = await server.end(signal.SIGTERM) if server.running else await server.ended
        except TimeoutError:
            raise ViolationError(f"the application does not exit:\n{log_tail(self._folder)}") from None
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"exited with status {status}:\n{log_tail(self._folder)}")
        return status

    async def verdict(self) -> dict[str, list[int]]:
        """Check the rows, and return the attempts that wrote one, by work.

        Raises:
            ViolationError: Work was lost, or repeated without a reason or without the handler being able to tell.
        """
        rows = await attempts_of(self._order.database)
        self.figures.update(judge_rows(rows, self._works, repeatable=self._repeatable))
        return rows


async def crash_once(servers: Servers, fork_server: ForkServer, shape: str, point: CrashPoint) -> list[int]:
    """Crash an application at `point` during one request, start a successor, and return the attempts that wrote a row.

    Raises:
        ViolationError: A promise was broken, or the application did not reach `point`.
    """
    trial = Trial(servers, fork_server, f"{shape}-{point.value}".replace("_", "-"), shape, "sqlite")
    async with trial.resources():
        trial.request("one")
        if not await trial.crash(point):
            raise ViolationError(f"{point.value} of {shape} was not reached")
        await trial.settle()
        attempts = (await trial.verdict())["one"]
    # With a transaction, the count of the run is rolled back with it.
    if attempts not in ([[1]] if shape == TRANSACTIONAL else allowed(ORDERED_POINTS, point)):
        raise ViolationError(f"after a crash at {point.value} of {shape}: rows were written by the attempts {attempts}")
    return attempts


def points_of(number: int) -> Sequence[CrashPoint]:
    """Return the crash points of a trial."""
    return random.Random(number).sample(ORDERED_POINTS, CRASHES)


async def one_trial(servers: Servers, fork_server: ForkServer, number: int) -> Figures:
    """Run all applications of a trial and check the results.

    Raises:
        ViolationError: A promise was broken.
    """
    rng = random.Random(number)
    shape = list(SHAPES)[number % len(SHAPES)]
    kind = KINDS[(number + number // len(SHAPES)) % len(KINDS)]
    trial = Trial(servers, fork_server, f"http{number}", shape, kind)
    async with trial.resources():
        for turn, point in enumerate(points_of(number)):
            for index in range(REQUESTS):
                trial.request(f"{turn}.{index}")
            await trial.crash(point, rng.randint(1, REQUESTS))
        await trial.settle()
        await trial.verdict()
    figures = trial.figures
    figures.update({"trials": 1, f"kills:{shape}": figures["kills"], f"repeats:{shape}": figures["repeats"]})
    return figures


async def run_on(servers: Servers, fork_server: ForkServer, numbers: range) -> Figures:
    """Run the trials on existing servers, and return the sum of their figures.

    Raises:
        ViolationError: A promise was broken; the message names the trial.
    """
    return await concurrent_trials(numbers, lambda number: one_trial(servers, fork_server, number))


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""

    async def trials() -> Figures:
        async with open_servers() as servers, ForkServer(MODULE) as fork_server:
            return await run_on(servers, fork_server, range(first, first + count))

    return asyncio.run(trials())


CAMPAIGN = Campaign(
    name="http-crash-points",
    counts="kills",
    says="a FastAPI application with the middleware kills itself with SIGKILL at a named point, and its client "
    "retries; on a real Redis and a real PostgreSQL or SQLite",
    scenarios=(119, 120),
    in_test=4,
    at_least=8,
    target=300,
    batch=8 * len(SHAPES),
    run=run,
)
