"""A pytest plugin that enters the harnesses of a test, with fixtures for crash points and faults.

    # conftest.py
    pytest_plugins = ["integr8s_idem.testing.plugin"]

Tests are async functions, run by pytest-asyncio or by anyio on asyncio; the plugin depends on neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

from integr8s_idem.testing.crash_points import CrashPoint
from integr8s_idem.testing.embedded_harness import EmbeddedHarness
from integr8s_idem.testing.faults import CRASHES, FAULTS, Fault
from integr8s_idem.testing.harness import NotReachedError, WorkerHarness

if TYPE_CHECKING:
    from integr8s_idem.embedded import EmbeddedServers

__all__ = ["crash_point", "embedded_servers", "fault"]

_PARAMETRIZED: Final = frozenset({"crash_point", "fault"})
"""Fixtures with all points and faults, including those that a service does not reach."""


_GENERATED: Final = (
    "a test with @given cannot have a harness as a fixture, which is made once for all examples: write `async with "
    "WorkerHarness(...) as harness:` in the test, so that each example has its own"
)


@pytest.fixture(params=CRASHES, ids=lambda point: point.value)
def crash_point(request: pytest.FixtureRequest) -> CrashPoint:
    """Each point at which a worker can crash, for `harness.crash_at(crash_point)`.

    The test is skipped for points that its service does not reach, for example without outgoing events.
    """
    point: CrashPoint = request.param
    return point


@pytest.fixture(params=FAULTS, ids=str)
def fault(request: pytest.FixtureRequest) -> Fault:
    """Each fault, for `harness.suffer(fault)`: crashes, stalls, lost answers, outages, redelivery.

    The test is skipped for points that its service does not reach.
    """
    found: Fault = request.param
    return found


@pytest.fixture(scope="session")
def embedded_servers() -> Iterator[EmbeddedServers]:
    """A Kafka emulator and a Redis server for all tests of the session, for `EmbeddedHarness`."""
    from integr8s_idem.embedded import EmbeddedKafka, EmbeddedRedis, EmbeddedServers

    kafka, redis = EmbeddedKafka(), EmbeddedRedis(durable=True)
    redis.start()
    try:
        kafka.start()
        yield EmbeddedServers(bootstrap_servers=kafka.bootstrap_servers, redis_url=redis.url)
    finally:
        kafka.stop()
        redis.stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run the test inside its harnesses."""
    harnesses = _harnesses(item)
    if not harnesses:
        return (yield)
    assert isinstance(item, pytest.Function), "only functions have fixtures"
    test = item.obj
    item.obj = _inside(harnesses, test)
    try:
        return (yield)
    except NotReachedError as error:
        if not _PARAMETRIZED & set(item.fixturenames):
            raise
        pytest.skip(str(error))
    finally:
        item.obj = test


def _harnesses(item: pytest.Item) -> list[WorkerHarness | EmbeddedHarness]:
    values = getattr(item, "funcargs", {}).values()
    found = [value for value in values if isinstance(value, WorkerHarness | EmbeddedHarness)]
    return list({id(harness): harness for harness in found if not harness.entered}.values())


def _inside(
    harnesses: list[WorkerHarness | EmbeddedHarness], test: Callable[..., Awaitable[None]]
) -> Callable[..., Awaitable[None]]:
    if hasattr(test, "hypothesis"):
        pytest.fail(_GENERATED, pytrace=False)
    if not inspect.iscoroutinefunction(test):
        pytest.fail(
            "a test that uses a harness must be an async function, run by pytest-asyncio or anyio", pytrace=False
        )

    @functools.wraps(test)
    async def inside(*args: Any, **kwargs: Any) -> None:
        async with AsyncExitStack() as stack:
            for harness in harnesses:
                await stack.enter_async_context(harness)
            await test(*args, **kwargs)

    return inside
