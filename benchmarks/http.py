"""What does the guard of HTTP requests cost, compared with the same FastAPI application without it?

Both applications are called directly, without a server and a client, whose time would hide that of the guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI, Request
from redis.asyncio import Redis
from starlette.types import Message

from benchmarks.contestants import ensure
from benchmarks.guards import BareRequests, RawRedis
from benchmarks.measuring import Flat
from benchmarks.native import NATIVE, native_code, with_native_code
from benchmarks.places import redis_environment
from benchmarks.rounds import Comparison, Measured, Options, Progress, Turn, compare, fresh_keys, run_concurrently
from integr8s_idem import IdempotencyManager
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, by_authorization

KEYS: Final = ("http_guarded", "http_by_hand", "http_requests", "http_guarded_native")
CONCURRENCY: Final = 32
ANSWER: Final = b'{"receipt":"receipt-1"}'
BODY: Final = b'{"order_id": "order-1", "quantity": 3}'
HEADERS: Final = [
    (b"host", b"shop.example"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"user-agent", b"benchmark/1.0"),
    (b"authorization", b"Bearer 3fd1c2a0b7e94c55"),
    (b"content-type", b"application/json"),
    (b"content-length", str(len(BODY)).encode()),
]
SCOPE: Final[dict[str, Any]] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.4"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/orders",
    "raw_path": b"/orders",
    "query_string": b"",
    "root_path": "",
    "client": ("10.0.0.7", 40_000),
    "server": ("10.0.0.1", 80),
}


class Application:
    """A FastAPI application with an endpoint that does nothing, guarded if it has a manager, or by hand."""

    def __init__(
        self, manager: IdempotencyManager | None = None, by_hand: RawRedis | BareRequests | None = None
    ) -> None:
        self.handled = 0
        self._app = app = FastAPI()

        async def order() -> dict[str, str]:
            self.handled += 1
            return {"receipt": "receipt-1"}

        async def order_by_hand(request: Request) -> dict[str, str]:
            assert by_hand is not None
            await by_hand.run(request.headers["idempotency-key"], self._count)
            return {"receipt": "receipt-1"}

        app.post("/orders")(order if by_hand is None else order_by_hand)
        if manager is not None:
            app.add_middleware(IdempotencyKeyMiddleware, manager=manager, identity=by_authorization, required=True)

    async def _count(self) -> None:
        self.handled += 1

    async def order(self, key: str) -> list[tuple[bytes, bytes]]:
        """Send an order as a server would, check the answer, and return its headers."""
        headers = [*HEADERS, (b"idempotency-key", b'"%b"' % key.encode())]
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": BODY, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app({**SCOPE, "headers": headers, "state": {}}, receive, send)
        ensure(sent[0]["status"] == 200 and sent[1]["body"] == ANSWER, f"unexpected answer: {sent}")
        return sent[0]["headers"]  # type: ignore[no-any-return]


def bare(app: Application, keys: Iterator[str]) -> Turn:
    """Create a turn of new keys, without a look at the records."""

    async def turn(seconds: float) -> Measured:
        before = app.handled
        measured = await run_concurrently(app.order, keys, CONCURRENCY, seconds)
        ensure(app.handled - before == measured.events, f"{app.handled - before} of {measured.events} handled")
        return measured

    return turn


def guarded(app: Application, keys: Iterator[str], client: Redis) -> Turn:
    """Create a turn of new keys, each of which must be handled once and recorded; a retry is checked at its end."""

    async def turn(seconds: float) -> Measured:
        before, records = app.handled, await client.dbsize()
        measured = await run_concurrently(app.order, keys, CONCURRENCY, seconds)
        key = next(keys)
        for is_retry in (False, True):
            headers = await app.order(key)
            ensure(((b"idempotency-replayed", b"true") in headers) is is_retry, "a retry is not recognized")
        handled, recorded = app.handled - before, await client.dbsize() - records
        ensure(handled == recorded == measured.events + 1, f"{handled} handled, {recorded} recorded, {measured}")
        return measured

    return turn


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with redis_environment() as env:
        turns = {
            "guarded_endpoint": guarded(
                Application(await env.manager("bench")), fresh_keys("guarded"), env.plain_client()
            ),
            "endpoint": bare(Application(), fresh_keys("bare")),
            "endpoint_by_hand": bare(Application(by_hand=RawRedis(env)), fresh_keys("by-hand")),
            "endpoint_with_requests": bare(
                Application(by_hand=BareRequests(await env.repository())), fresh_keys("requests")
            ),
        }
        figures = {
            "http_guarded": ("guarded_endpoint", "endpoint"),
            "http_by_hand": ("endpoint_by_hand", "endpoint"),
            "http_requests": ("endpoint_with_requests", "endpoint"),
        }
        if NATIVE is not None:
            with native_code():
                application = Application(await env.manager("bench"))
            turn = guarded(application, fresh_keys("guarded-native"), env.plain_client())
            turns["guarded_endpoint_native"] = with_native_code(turn)
            figures["http_guarded_native"] = ("guarded_endpoint_native", "endpoint")
        comparison = Comparison("http_fresh_c32", turns, figures, by_cpu=True)
        return await compare(comparison, options, progress) | {"http.server": env.version}
