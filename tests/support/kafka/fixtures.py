"""Fixtures: `kafka`, one real broker for the whole session, and `topic_prefix`, so that tests do not meet on it."""

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
    """The session's broker: the one that `INTEGR8S_IDEM_TEST_KAFKA` names, or one of our own."""
    address = os.environ.get(ADDRESS)
    if address:
        yield Kafka(address)
        return
    with _own_broker() as broker:
        yield broker


@pytest.fixture
def own_kafka() -> Iterator[KafkaBroker]:
    """A broker for one test, which may kill it.  Three seconds; most tests want `kafka`."""
    with _own_broker() as broker:
        yield broker


@pytest.fixture
def topic_prefix() -> str:
    """What this test's topics and groups start with; nobody else's do."""
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
    """Skip the test with what to do; where CI=true promises the tools, fail."""
    if skips.is_strict():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
