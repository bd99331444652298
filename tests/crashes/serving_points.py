"""FastAPI applications that die at named points, behind a client that asks again: on a real Redis and a real database.

A trial of the campaign has a shape of `tests.crashes.serving`, a kind of database and three lives that each end at a
point, and a last one.  Its client sends every request until it has an answer, each with a key of its own.
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
from tests.crashes.forks import Forked, Nursery
from tests.crashes.judging import last_words
from tests.crashes.serving import SHAPES, TRANSACTIONAL, reserved_port
from tests.crashes.stores import open_database
from tests.crashes.subscribing_points import COMMIT, COMPLETE, EFFECT, KINDS, LEASE, LIVES, RESERVE
from tests.crashes.tills import TillOrder, allowed, attempts_of, judge_rows, trials_side_by_side
from tests.crashes.transacting import tables
from tests.support.homes import Home, open_home
from tests.support.redis import RedisServer

MODULE: Final = "tests.crashes.serving"
REQUESTS: Final = 3
"""New ones of each life, at once."""
PATIENCE: Final = 60.0
"""Seconds for a request with all its tries."""

RESPONSE: Final = (CrashPoint.BEFORE_RESPONSE, CrashPoint.IN_RESPONSE, CrashPoint.AFTER_RESPONSE)
WAY: Final = (*RESERVE, *EFFECT, *COMMIT, *COMPLETE, *RESPONSE)
"""All points, in the order in which a request passes by them."""


@dataclass(frozen=True)
class Ground:
    """The servers that all trials share."""

    redis: RedisServer
    homes: Mapping[str, Home]
    folder: Path


@asynccontextmanager
async def open_ground(kinds: Iterable[str] = KINDS) -> AsyncIterator[Ground]:
    """Servers of our own, started now and gone afterwards."""
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory(prefix="idem-http-")))
        redis = servers.enter_context(RedisServer())
        yield Ground(redis, {kind: servers.enter_context(open_home(kind)) for kind in kinds}, folder)


class Trial:
    """One application and its successors at one port, and the client."""

    def __init__(self, ground: Ground, nursery: Nursery, name: str, shape: str, kind: str) -> None:
        self.figures = Figures(kills=0, lost=0, repeats=0)
        self._ground = ground
        self._nursery = nursery
        self._kind = kind
        self._shape = shape
        self._folder = ground.folder / name
        self._repeatable = 0
        self._works: list[str] = []
        self._asked: list[asyncio.Task[httpx.Response]] = []
        self._order = TillOrder(
            bootstrap="",
            store={"kind": "redis", "url": ground.redis.url, "timeout_seconds": 0.5},
            prefix=f"{name}.",
            folder=str(self._folder),
            lease=LEASE,
            shape=shape,
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """With what it needs."""
        self._folder.mkdir()
        name = self._order.key_prefix.replace("-", "_")
        async with AsyncExitStack() as stack:
            placeholder = stack.enter_context(reserved_port())
            database = await stack.enter_async_context(
                open_database(self._ground.homes[self._kind], name, self._folder)
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
            stack.callback(self._give_up)
            yield

    def _give_up(self) -> None:
        for request in self._asked:
            request.cancel()

    def ask(self, work: str) -> None:
        """Have `work` done, by a request that is sent until it is answered."""
        self._works.append(work)
        self._asked.append(asyncio.create_task(self._post(work)))

    async def _post(self, work: str) -> httpx.Response:
        key = {"Idempotency-Key": idempotency_key(work)}
        return await self._client.post("/orders", json={"work": work}, headers=key)

    async def die(self, point: CrashPoint, occurrence: int = 1) -> bool:
        """A life that ends at `point`, or when all is answered; whether it died.

        Raises:
            ViolationError: It ended otherwise.
        """
        server = await self._nursery.start(replace(self._order, point=point.value, occurrence=occurrence))
        either: set[asyncio.Future[Any]] = {server.ended, asyncio.gather(*self._asked, return_exceptions=True)}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if point is CrashPoint.AFTER_RESPONSE and server.running:
            # The answer is here a moment before the death is.
            await asyncio.wait({server.ended}, timeout=0.5)
        if await self._end(server) == -signal.SIGKILL:
            self.figures.update({"kills": 1, f"kills:{point.value}": 1})
            # Each of the requests under way may have been anywhere.
            under_way = sum(not request.done() for request in self._asked)
            self._repeatable += 0 if self._shape == TRANSACTIONAL else under_way
            return True
        self.figures.update({"not_reached": 1})
        return False

    async def settle(self) -> None:
        """The last life: all is answered, and answered again to whoever asks again.

        Raises:
            ViolationError: It is not, or by something else than what was asked for.
        """
        server = await self._nursery.start(self._order)
        answers = await asyncio.gather(*self._asked, return_exceptions=True)
        for work, answer in zip(self._works, answers, strict=True):
            self._judge(work, answer)
        for work in self._works:
            again = await self._post(work)
            self._judge(work, again)
            if "idempotency-replayed" not in again.headers:
                raise ViolationError(f"{work} was answered, and then done again")
        await self._end(server)

    def _judge(self, work: str, answer: httpx.Response | BaseException) -> None:
        if isinstance(answer, BaseException):
            raise ViolationError(f"{work} got {answer!r}:\n{last_words(self._folder)}") from answer
        if answer.status_code != 201 or answer.json() != {"done": work}:
            raise ViolationError(f"{work} got {answer.status_code} {answer.text}:\n{last_words(self._folder)}")
        self.figures["answers"] += 1

    async def _end(self, server: Forked) -> int:
        try:
            status = await server.end(signal.SIGTERM) if server.running else await server.ended
        except TimeoutError:
            raise ViolationError(f"does not stop:\n{last_words(self._folder)}") from None
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"ended with {status}:\n{last_words(self._folder)}")
        return status

    async def verdict(self) -> dict[str, list[int]]:
        """By work, the attempts whose row is there, if all is as it must be.

        Raises:
            ViolationError: Something was lost, or repeated for no reason or in silence.
        """
        rows = await attempts_of(self._order.database)
        self.figures.update(judge_rows(rows, self._works, repeatable=self._repeatable))
        return rows


async def lone_death(ground: Ground, nursery: Nursery, shape: str, point: CrashPoint) -> list[int]:
    """One request, one death, and a successor; the attempts whose row is there.

    Raises:
        ViolationError: A promise was broken, or nobody died.
    """
    trial = Trial(ground, nursery, f"{shape}-{point.value}".replace("_", "-"), shape, "sqlite")
    async with trial.opened():
        trial.ask("one")
        if not await trial.die(point):
            raise ViolationError(f"nobody died at {point.value} of {shape}")
        await trial.settle()
        attempts = (await trial.verdict())["one"]
    # In a transaction the run that counts is within it, and is rolled back with it.
    if attempts not in ([[1]] if shape == TRANSACTIONAL else allowed(WAY, point)):
        raise ViolationError(f"after a death at {point.value} of {shape}: rows by the attempts {attempts}")
    return attempts


def points_of(number: int) -> Sequence[CrashPoint]:
    """Where the lives of a trial end."""
    return random.Random(number).sample(WAY, LIVES)


async def one_trial(ground: Ground, nursery: Nursery, number: int) -> Figures:
    """Lives and deaths, then the verdict.

    Raises:
        ViolationError: A promise was broken.
    """
    dice = random.Random(number)
    shape = list(SHAPES)[number % len(SHAPES)]
    kind = KINDS[(number + number // len(SHAPES)) % len(KINDS)]
    trial = Trial(ground, nursery, f"http{number}", shape, kind)
    async with trial.opened():
        for life, point in enumerate(points_of(number)):
            for place in range(REQUESTS):
                trial.ask(f"{life}.{place}")
            await trial.die(point, dice.randint(1, REQUESTS))
        await trial.settle()
        await trial.verdict()
    figures = trial.figures
    figures.update({"trials": 1, f"kills:{shape}": figures["kills"], f"repeats:{shape}": figures["repeats"]})
    return figures


async def run_on(ground: Ground, nursery: Nursery, numbers: range) -> Figures:
    """What came of all trials, on servers that are there.

    Raises:
        ViolationError: A promise was broken; it names the trial.
    """
    return await trials_side_by_side(numbers, lambda number: one_trial(ground, nursery, number))


def run(first: int, count: int) -> Figures:
    """The trials numbered `first` to `first + count - 1`."""

    async def trials() -> Figures:
        async with open_ground() as ground, Nursery(MODULE) as nursery:
            return await run_on(ground, nursery, range(first, first + count))

    return asyncio.run(trials())


CAMPAIGN = Campaign(
    name="http-crash-points",
    counts="kills",
    says="a FastAPI application behind the guard that killed itself by SIGKILL at a named point, and a client that "
    "asks again; on a real Redis and a real PostgreSQL or SQLite",
    scenarios=(119, 120),
    in_test=4,
    at_least=8,
    target=300,
    batch=8 * len(SHAPES),
    run=run,
)
