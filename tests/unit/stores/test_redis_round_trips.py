"""Attempts of one round trip, and the encoding of its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis import exceptions as driver
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from integr8s_idem.stores.redis.round_trips import send
from integr8s_idem.stores.redis.servers import Lazily


class Connection:
    """Fails with each of `errors`, then answers; it is its own client and pool."""

    def __init__(self, retries: int, *errors: Exception) -> None:
        self.connection_pool = self
        self.retry = Retry(NoBackoff(), retries)
        self.errors = list(errors)
        self.attempts = self.disconnects = self.released = 0

    async def get_connection(self) -> Connection:
        return self

    async def release(self, _: object) -> None:
        self.released += 1

    async def disconnect(self, **_: object) -> None:
        self.disconnects += 1

    async def send_packed_command(self, _: bytes) -> None:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)

    async def read_response(self) -> bytes:
        return b"one"


async def send_over(connection: Any) -> list[Any]:
    return await send(connection, [("ECHO", "one")])


@pytest.mark.parametrize("failures", [0, 1, 2])
async def test_a_lost_connection_is_retried_as_often_as_the_driver_would(failures: int) -> None:
    connection = Connection(2, *[driver.ConnectionError("gone")] * failures)

    assert await send_over(connection) == [b"one"]
    assert (connection.attempts, connection.disconnects, connection.released) == (failures + 1, failures, 1)


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_the_last_retry_raises_the_error_of_the_connection(retries: int) -> None:
    connection = Connection(retries, *[driver.ConnectionError(f"gone {number}") for number in range(5)])

    with pytest.raises(driver.ConnectionError, match=f"gone {retries}"):
        await send_over(connection)

    assert (connection.attempts, connection.released) == (retries + 1, 1)


class ClosedConnection(Connection):
    """Its server has closed it, which the driver has not noticed."""

    def __init__(self) -> None:
        super().__init__(1, AttributeError("'NoneType' object has no attribute '_add_writer'"))
        self._writer: SimpleNamespace | None = SimpleNamespace(transport=SimpleNamespace(is_closing=lambda: True))

    async def disconnect(self, **_: object) -> None:
        await super().disconnect()
        self.errors.clear()
        self._writer = None


async def test_a_command_over_a_closed_connection_is_sent_again_over_a_new_one() -> None:
    """From Python 3.12 on, a closed transport of asyncio raises an error like that of a bug."""
    connection = ClosedConnection()

    assert await send_over(connection) == [b"one"]
    assert (connection.attempts, connection.disconnects) == (1, 1)


async def test_other_errors_are_not_retried() -> None:
    connection = Connection(2, ValueError("of the library"))

    with pytest.raises(ValueError, match="of the library"):
        await send_over(connection)

    assert (connection.attempts, connection.disconnects, connection.released) == (1, 1, 1)


def test_arguments_of_a_batch_are_encoded_in_one_call() -> None:
    batches: list[list[int]] = []

    def encode(items: Any) -> list[bytes]:
        batches.append(list(items))
        return [b"%d" % item for item in items]

    arguments = Lazily(encode, [1, 2, 3])

    assert [b"head", *arguments] == [b"head", b"1", b"2", b"3"]
    assert batches == [[1, 2, 3]]
