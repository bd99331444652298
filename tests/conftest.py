"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
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

SLOW_COLLECTION = 0.05
"""Seconds."""


def pytest_configure() -> None:
    # A shell without job control starts background jobs with SIGINT ignored, and children inherit that. Some tests
    # send SIGINT to their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A loaded machine must not fail a test: no example has a deadline.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _unfreeze_at_exit() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze_existing_objects(_unfreeze_at_exit: None) -> None:
    """Exclude existing objects from the collections below, which then take milliseconds instead of half a second.

    Repeated for each module, since more and more objects stay alive, and some tests unfreeze all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _collect_garbage(_freeze_existing_objects: None) -> Iterator[None]:
    """Report an unclosed socket in the test that left it (or in the next one, if a log record still refers to it).

    Otherwise it would be reported in the test that runs during the next collection. If that happens within `ast.parse`
    and logs a traceback, which parses too, Python 3.11 raises a SystemError (python/cpython#106905).
    """
    yield
    began_at = time.perf_counter()
    gc.collect()
    if time.perf_counter() - began_at > SLOW_COLLECTION:
        # Many objects have been created since the module began, or a test has unfrozen those before it.
        gc.freeze()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Share a server on a Unix socket; never stop, pause or configure it, start your own instead."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Return the URL of an empty database."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """Return a client of an empty database."""
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
            report.longrepr = f"unexpected skip: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print skipped tests with the commands that enable them; write their names to the file `SKIPPED_TESTS`, if set."""
    skipped = terminalreporter.stats.get("skipped", [])
    lines = list(skips.table(skips.reason_of(report.longrepr) for report in skipped))
    if lines:
        terminalreporter.section("skipped tests")
        terminalreporter.write_line("\n".join(lines))
    if file := os.environ.get("SKIPPED_TESTS"):
        Path(file).write_text("".join(f"{report.nodeid}\n" for report in skipped), encoding="utf-8")
