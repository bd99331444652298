"""Fixtures: `kafka`, a real broker for the session, and `topic_prefix`, which separates the tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import pytest

from tests.support import skips
from tests.support.kafka.broker import Kafka, KafkaBroker, ToolsMissingError

ADDRESS = "INTEGR8S_IDEM_TEST_KAFKA"


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """Return the broker named by `INTEGR8S_IDEM_TEST_KAFKA`, or start one for the session."""
    address = os.environ.get(ADDRESS)
    if address:
        yield Kafka(address)
        return
    with _own_broker() as broker:
        yield broker


@pytest.fixture
def own_kafka() -> Iterator[KafkaBroker]:
    """Start a broker for a test that kills it; takes three seconds, so most tests use `kafka`."""
    with _own_broker() as broker:
        yield broker


@pytest.fixture
def topic_prefix() -> str:
    """Return a unique prefix for the topics and groups of the test."""
    return f"t{uuid4().hex[:12]}."


@contextmanager
def _own_broker() -> Iterator[KafkaBroker]:
    with tempfile.TemporaryDirectory(prefix="idem-kafka-") as folder:
        try:
            broker = KafkaBroker(Path(folder))
        except ToolsMissingError as missing:
            skip_or_fail(f"{missing}; or set {ADDRESS}=host:port to a running broker")
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail with CI=true, where all tools must be installed."""
    if skips.is_strict():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
