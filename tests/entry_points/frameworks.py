"""Entry points of frameworks: HTTP and FastStream, on their in-memory test servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import httpx
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.message import AckStatus, StreamMessage
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem.errors import KeyReusedError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from tests.entry_points.entry import Answer, Case, Entry, Process, Sees

_NOTHING: Final = object()


class Http(Entry):
    name = "http"
    label = "`Idempotency-Key`"
    sees: ClassVar = {
        # The draft requires a conflict for concurrent retries; with `wait=` they wait instead.
        Case.TWO_AT_ONCE: (Sees.CONFLICT, Sees.VALUE),
        Case.CRASH: (Sees.CONFLICT, Sees.VALUE),
        # A server error is not stored as an outcome: the client decides how often to retry.
        Case.FAILURES: (Sees.ERROR,),
        # The client gets the response, so it has no reason to retry.
        Case.DOWN_FOR_LONG: (Sees.VALUE,),
    }
    words: ClassVar = {
        Sees.VALUE: "the response",
        Sees.CONFLICT: "409",
        Sees.ERROR: "500",
        Sees.REUSED: "422",
        Sees.DOWN: "503",
        Sees.LOST: "503",
        Sees.DROPPED: "409, response gone",
        Sees.CANCELLED: "(the client is gone)",
    }

    def __init__(self, process: Process) -> None:
        super().__init__(process)

        async def endpoint(request: Request) -> Response:
            value = await self.work(self.run_here((await request.body()).decode()))
            # The application serializes it before the middleware sees the response.
            return JSONResponse(list(value) if isinstance(value, Iterator) else value)

        app = Starlette(routes=[Route("/work", endpoint, methods=["POST"])])
        app.add_middleware(IdempotencyKeyMiddleware, manager=self.manager, identity=anyone, required=True)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, key: str, payload: str = "p") -> Answer:
        response = await self._client.post("/work", content=payload, headers={"Idempotency-Key": f'"{key}"'})
        match response.status_code:
            case 200:
                return Answer(Sees.VALUE, response.json())
            case 409:
                gone = "response is not available" in response.json()["title"]
                return Answer(Sees.DROPPED if gone else Sees.CONFLICT)
            case 422:
                return Answer(Sees.REUSED)
            case 500:
                return Answer(Sees.ERROR)
            case 503:
                not_processed = "was not processed" in response.json()["detail"]
                return Answer(Sees.DOWN if not_processed else Sees.LOST)
            case _:
                raise AssertionError(response)


class FastStream(Entry):
    name = "faststream"
    label = "FastStream"
    # The broker is the sender; it learns only whether the message is acknowledged.
    sees: ClassVar = {
        Case.FAILURE: (Sees.AGAIN, Sees.VALUE),
        Case.FAILURES: (Sees.AGAIN, Sees.GIVEN_UP),
        Case.ZOMBIE: (Sees.AGAIN, Sees.VALUE),
        Case.DOWN_BEFORE: (Sees.AGAIN, Sees.VALUE),
        Case.DOWN_FOR_LONG: (Sees.AGAIN, Sees.VALUE),
    }
    words: ClassVar = {
        Sees.VALUE: "acknowledged",
        Sees.AGAIN: "redelivered",
        Sees.GIVEN_UP: "passed to `given_up`, acknowledged",
        Sees.REUSED: "passed to `given_up`, acknowledged",
        Sees.DROPPED: "acknowledged, nothing published",
    }

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._given_up: list[Exception] = []
        self._last: StreamMessage[Any] | None = None
        self._returned: Any = None

    async def open(self) -> None:
        guard = IdempotencyMiddleware(self.manager, key=by_header("event_id"), given_up=self._give_up)
        # The first middleware is the outermost: it sees what the guard returns to FastStream.
        broker = KafkaBroker(middlewares=[self._watching(), guard])

        @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
        async def handle(body: str) -> Any:
            return await self.work(self.run_here(body))

        self._stack = AsyncExitStack()
        self._broker = await self._stack.enter_async_context(TestKafkaBroker(broker))

    async def close(self) -> None:
        await self._stack.aclose()

    def _watching(self) -> Any:
        entry = self

        class Watch(BaseMiddleware[Any, Any]):
            async def consume_scope(
                self, call_next: Callable[[StreamMessage[Any]], Awaitable[Any]], msg: StreamMessage[Any]
            ) -> Any:
                entry._last = msg
                entry._returned = await call_next(msg)
                return entry._returned

        return Watch

    async def _give_up(self, record: Any, error: Exception) -> None:
        self._given_up.append(error)

    async def send(self, key: str, payload: str = "p") -> Answer:
        self._last, self._returned = None, _NOTHING
        # In a separate task, like a consumer's, so that a cancellation does not reach the test.
        await asyncio.create_task(self._broker.publish(payload, "orders", headers={"event_id": key}))
        if not await self.acknowledged():
            return Answer(Sees.AGAIN)
        if self._given_up:
            reused = isinstance(self._given_up.pop(), KeyReusedError)
            return Answer(Sees.REUSED if reused else Sees.GIVEN_UP)
        if self._returned is _NOTHING:
            return Answer(Sees.DROPPED)
        return Answer(Sees.VALUE, self._returned)

    async def acknowledged(self) -> bool:
        return self._last is not None and self._last.committed is AckStatus.ACKED
