"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.effects import Effects
from tests.support.redis import DURABLE, RedisServer


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path)


@pytest.fixture(scope="module")
def lasting_server() -> Iterator[RedisServer]:
    with RedisServer(config=DURABLE) as server:
        yield server


@pytest.fixture
def server(lasting_server: RedisServer) -> RedisServer:
    """A Redis that forgets nothing when it is killed; it was emptied before the test."""
    if not lasting_server.running:  # a test before this one has failed in between
        lasting_server.kill()
        lasting_server.start()
    lasting_server.flush()
    return lasting_server
