"""Fixtures that any test may use."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.support import skips
from tests.support.redis import RedisServer

pytest_plugins = [
    "tests.support.kafka.fixtures",
    "tests.support.dynamodb.fixtures",
    "tests.support.kubernetes.fixtures",
    "tests.support.databases",
    "tests.support.doctor",
    "tests.support.browser",
]


def pytest_configure() -> None:
    # A shell without job control lets what it starts with `&` ignore Ctrl-C, which children inherit: some are sent one.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _what_is_here_stays(_nothing_stays_frozen: None) -> None:
    """Hides from the collections below what was there before: they take milliseconds instead of half a second.

    By module, since tests leave more and more that lives on, and some let all of it be seen again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_nothing_to_the_collector(_what_is_here_stays: None) -> Iterator[None]:
    """A socket that a test forgot is an error of that test (of the next one, if a log still held it).

    Left alone it would be one of whichever test runs when the collector comes by.  If that is within `ast.parse` and
    logs a traceback, which parses as well, Python 3.11 ends the parsing with a SystemError (python/cpython#106905).
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests, on a Unix socket.  Never stop, pause or configure it: start one of your own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty database."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if skips.is_strict() and report.skipped and not hasattr(report, "wasxfail"):
        reason = skips.reason_of(report.longrepr)
        if not skips.is_expected(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped where nothing may be: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped and the command that enables it; list the tests in the file `SKIPPED_TESTS`, if named."""
    skipped = terminalreporter.stats.get("skipped", [])
    lines = list(skips.table(skips.reason_of(report.longrepr) for report in skipped))
    if lines:
        terminalreporter.section("skipped tests")
        terminalreporter.write_line("\n".join(lines))
    if file := os.environ.get("SKIPPED_TESTS"):
        Path(file).write_text("".join(f"{report.nodeid}\n" for report in skipped), encoding="utf-8")
