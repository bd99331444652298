"""Requests that bypass the driver's stream: they are used, and lose or mix up no answer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as NoResponseError

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.stores.redis import pools, redis_client, round_trips
from integr8s_idem.stores.redis.direct_exchange import DirectExchange, TimedExchange, direct_exchange
from integr8s_idem.stores.redis.round_trips import send
from tests.support.fault_proxy import Cut, Drip, FaultProxy, Stall
from tests.support.redis import RedisServer, url_of

LARGE = b"x" * 200_000


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """Return a client like that of the store."""
    client = redis_client(RedisStoreSettings(url=redis_url))
    yield client
    await client.aclose()


class Counted:
    """Counts the requests that are sent directly, and those that the driver sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct = self.by_driver = 0
        request, send_all = DirectExchange.request, round_trips._send_by_driver

        def counted_request(*arguments: Any) -> Any:
            self.direct += 1
            return request(*arguments)

        async def counted_send(*arguments: Any) -> Any:
            self.by_driver += 1
            return await send_all(*arguments)

        monkeypatch.setattr(DirectExchange, "request", counted_request)
        monkeypatch.setattr(round_trips, "_send_by_driver", counted_send)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


async def test_requests_bypass_the_drivers_stream_and_leave_it_usable(client: Redis, counted: Counted) -> None:
    for number in range(5):
        assert await send(client, [("SET", "k", number), ("GET", "k")]) == [b"OK", str(number).encode()]
        assert await client.get("k") == str(number).encode()

    assert (counted.direct, counted.by_driver) == (5, 0)


async def test_an_exchange_stays_attached_until_the_driver_takes_its_connection(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[Any] = []

    def attach(*arguments: Any) -> Any:
        attached.append(direct_exchange(*arguments))
        return attached[-1]

    monkeypatch.setattr(pools, "direct_exchange", attach)
    for _ in range(5):
        await send(client, [("ECHO", "one")])
    [first] = attached
    assert first.is_usable

    await client.ping()

    assert not first.is_usable
    assert await send(client, [("ECHO", "two")]) == [b"two"]
    assert len(attached) == 2


class Inserting:
    """A proxy for Redis that inserts bytes which nobody requested into what the client receives."""

    def __init__(self, address: Path) -> None:
        self.clients: list[asyncio.StreamWriter] = []
        self.after: dict[bytes, bytes] = {}
        """Bytes to insert, once, after an answer that contains other bytes."""
        self._address = address
        self._serving = set[asyncio.Task[Any]]()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[str]:
        """Accept connections; yield the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for each in self.clients:
                each.close()
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.clients.append(client)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        answers, requests = await asyncio.open_unix_connection(self._address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(reader, requests, {}))
            tasks.create_task(self._pass_on(answers, client, self.after))

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, after: dict[bytes, bytes]
    ) -> None:
        while data := await source.read(1 << 16):
            found = next((text for text in after if text in data), None)
            target.write(data if found is None else data + after.pop(found))
        target.close()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    "inserted", [b"$5\r\nwrong\r\n", b"+OK", b">1\r\n$4\r\nnews\r\n"], ids=["answer", "part", "push"]
)
@pytest.mark.parametrize("when", ["with an answer", "between requests", "end"])
async def test_what_nobody_requested_is_no_answer(
    redis_server: RedisServer, when: str, inserted: bytes, protocol: int
) -> None:
    assert isinstance(redis_server.address, Path)
    proxy = Inserting(redis_server.address)
    async with proxy.started() as address:
        client = redis_client(RedisStoreSettings(url=f"redis://{address}?protocol={protocol}"))
        pool: Any = client.connection_pool
        if when == "with an answer":
            proxy.after[b"first"] = inserted
        assert await send(client, [("ECHO", "first")]) == [b"first"]
        [ready] = pool._ready
        if when == "between requests":
            proxy.clients[0].write(inserted)
        elif when == "end":
            proxy.clients[0].close()
        async with asyncio.timeout(10):
            while ready.exchange.is_usable:  # noqa: ASYNC110  # the transport sends no notification
                await asyncio.sleep(0)

        for number in range(3):
            assert await send(client, [("ECHO", str(number))]) == [str(number).encode()]
        assert await client.echo("driver") == b"driver"
        await client.aclose()

    assert len(proxy.clients) == 2


async def test_large_requests_and_answers_are_complete(client: Redis, counted: Counted) -> None:
    answers = await send(client, [("SET", "k", LARGE * 20), ("GET", "k"), ("ECHO", "end")])

    assert answers == [b"OK", LARGE * 20, b"end"]
    assert counted.direct == 1


async def test_an_answer_that_arrives_in_pieces_is_complete(redis_server: RedisServer, counted: Counted) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = redis_client(RedisStoreSettings(url=url_of(proxy.address), timeout_seconds=30))
        await send(client, [("SET", "k", "0123456789" * 20)])
        with proxy.fault(Drip(1_000)):
            answers = await send(client, [("GET", "k"), ("ECHO", "end")])
        await client.aclose()

    assert answers == [b"0123456789" * 20, b"end"]
    assert (counted.direct, counted.by_driver) == (2, 0)


@pytest.mark.parametrize("after", [0, 1, 30])
async def test_a_request_whose_answer_is_cut_is_sent_again(
    redis_server: RedisServer, counted: Counted, after: int
) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = redis_client(RedisStoreSettings(url=url_of(proxy.address)))
        await send(client, [("SET", "k", "0123456789" * 20), ("DEL", "n")])
        cut = proxy.put(Cut(matching=b"INCR", after=after))
        answers = await send(client, [("INCR", "n"), ("GET", "k")])
        again = await send(client, [("ECHO", "next")])
        await client.aclose()

    assert cut.struck == 1
    assert answers == [2, b"0123456789" * 20]  # the first was executed, too
    assert again == [b"next"]
    assert (counted.direct, counted.by_driver) == (3, 1)


async def test_requests_of_a_client_with_the_drivers_own_settings_are_sent_directly(
    redis_url: str, counted: Counted
) -> None:
    client = Redis.from_url(redis_url)  # newer drivers have a socket_timeout by default
    assert await send(client, [("SET", "k", "one"), ("GET", "k")]) == [b"OK", b"one"]
    await client.aclose()

    assert (counted.direct, counted.by_driver) == (1, 0)


async def test_a_request_without_data_fails_after_the_socket_timeout_of_the_client(
    redis_server: RedisServer, counted: Counted
) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = Redis.from_url(url_of(proxy.address), socket_timeout=0.2, retry=None)
        await send(client, [("ECHO", "warm")])
        with proxy.fault(Stall()), pytest.raises(NoResponseError, match=r"no data from the server for 0\.2 s"):
            await send(client, [("ECHO", "lost")])
        answer = await send(client, [("ECHO", "next")])
        await client.aclose()

    assert answer == [b"next"]
    assert (counted.direct, counted.by_driver) == (3, 0)


async def test_an_answer_in_pieces_may_take_longer_than_the_socket_timeout(
    redis_server: RedisServer, counted: Counted
) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = Redis.from_url(url_of(proxy.address), socket_timeout=0.5, retry=None)
        await send(client, [("SET", "k", "0123456789" * 20)])
        with proxy.fault(Drip(200)):
            answers = await send(client, [("GET", "k")])
        await client.aclose()

    assert answers == [b"0123456789" * 20]
    assert (counted.direct, counted.by_driver) == (2, 0)


async def test_no_timer_outlives_its_request(redis_url: str) -> None:
    client = Redis.from_url(redis_url, socket_timeout=60, retry=None)
    for number in range(10):
        assert await send(client, [("ECHO", str(number))]) == [str(number).encode()]
    waiting = asyncio.create_task(send(client, [("BLPOP", "nothing", 60)]))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting})
    await client.aclose()

    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is TimedExchange and each._loop.is_running()]


async def test_a_cancelled_request_leaves_no_answer_to_the_next_one(client: Redis) -> None:
    await send(client, [("ECHO", "warm")])
    for turns in range(8):
        asking = asyncio.create_task(send(client, [("ECHO", f"cancelled {turns}")]))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

        assert await send(client, [("ECHO", f"next {turns}")]) == [f"next {turns}".encode()]


async def test_a_refusal_is_an_answer(client: Redis, counted: Counted) -> None:
    refused, echoed = await send(client, [("NOSUCH",), ("ECHO", "one")])

    assert isinstance(refused, ResponseError)
    assert echoed == b"one"
    assert (counted.direct, counted.by_driver) == (1, 0)


async def test_a_server_that_asks_to_connect_again_is_asked_again(redis_server: RedisServer) -> None:
    """An answer that the driver treats as a lost connection, such as LOADING."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while data := await reader.read(1 << 16):
            if b"ECHO" not in data:
                writer.write(b"+OK\r\n" * data.count(b"\r\n*") + b"+OK\r\n")
            else:
                writer.write(answers.pop(0))
        writer.close()

    connections: list[asyncio.StreamWriter] = []
    answers = [b"$4\r\nwarm\r\n", b"-LOADING Redis is loading the dataset in memory\r\n", b"$3\r\none\r\n"]
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?protocol=2"
    client = redis_client(RedisStoreSettings(url=url))
    try:
        assert await send(client, [("ECHO", "warm")]) == [b"warm"]
        assert await send(client, [("ECHO", "one")]) == [b"one"]
    finally:
        await client.aclose()
        server.close()
        await asyncio.gather(*(each.wait_closed() for each in connections))

    assert answers == []
    assert len(connections) == 2


async def test_connections_that_are_not_as_expected_are_left_to_the_driver(client: Redis) -> None:
    await client.ping()
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    assert direct_exchange(connection, asyncio.get_running_loop()) is not None

    for name in ("_parser", "_reader", "_writer"):
        kept = getattr(connection, name)
        setattr(connection, name, None)
        assert direct_exchange(connection, asyncio.get_running_loop()) is None
        setattr(connection, name, kept)
    connection._reader.feed_data(b"+unexpected\r\n")
    assert direct_exchange(connection, asyncio.get_running_loop()) is None
    await connection.disconnect()
    assert direct_exchange(connection, asyncio.get_running_loop()) is None
    await pool.release(connection)


async def test_the_driver_gets_the_same_answers(
    client: Redis, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "direct_exchange", lambda *_: None)

    assert await send(client, [("SET", "k", "one"), ("GET", "k")]) == [b"OK", b"one"]
    assert (counted.direct, counted.by_driver) == (0, 1)
