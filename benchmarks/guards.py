"""Who guards one call: the library, redis-py by hand, and other libraries as their authors mean them to be used."""

from __future__ import annotations

import logging
import os
from typing import Any, Final, Protocol

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig as PowertoolsConfig
from aws_lambda_powertools.utilities.idempotency import idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from idemkit import MethodConfig, RedisBackend, idempotent
from idempotency_kit import AsyncIdempotencyCoordinator, IdempotencyDomainService, JsonResultAdapter
from idempotency_kit.infra.storage.redis.aio import RedisAsyncIdempotencyRepository

from benchmarks.contestants import must
from benchmarks.places import RedisPlace
from integr8s_idem.engine.manager import IdempotencyManager

RECEIPT: Final = {"receipt": "receipt-1"}
"""What the work returns; all keep it."""
_HELD, _DONE = b"processing", b'{"receipt": "receipt-1"}'
_LEASE_SECONDS: Final = 300
"""The library's own default."""


def _scope(_: object) -> str:
    return "bench"


class Guard(Protocol):
    """Does its work for keys that are new."""

    handled: int
    """How often the work was really done."""

    @property
    def answer(self) -> object:
        """What a duplicate is told."""
        ...

    async def once(self, key: str) -> object:
        """The work of `key`, or what became of it."""
        ...


class Ours:
    """`manager.run`."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self.handled, self.answer = 0, RECEIPT
        self._manager = manager

    async def once(self, key: str) -> dict[str, str]:
        return await self._manager.run(key, self._work)

    async def _work(self) -> dict[str, str]:
        self.handled += 1
        return RECEIPT


class RawRedis:
    """redis-py by hand: `SET NX EX`, the work, `SET KEEPTTL`.  A duplicate is one `SET NX` that loses."""

    def __init__(self, place: RedisPlace) -> None:
        self.handled, self.answer = 0, None
        self._client = place.plain_client()

    async def once(self, key: str) -> None:
        if await self._client.set(key, _HELD, nx=True, ex=_LEASE_SECONDS):
            await self._work()
            must(await self._client.set(key, _DONE, keepttl=True), key)

    async def _work(self) -> None:
        self.handled += 1


class Idemkit:
    """idemkit's decorator for functions, on its Redis backend."""

    def __init__(self, place: RedisPlace) -> None:
        self.handled, self.answer = 0, RECEIPT
        self._backend = RedisBackend.from_url(place.url)
        place.stack.push_async_callback(self._backend.aclose)

        # A decorator that says nothing of what it decorates.
        @idempotent(backend=self._backend, config=MethodConfig(key_fields=["order_id"], scope=_scope))  # type: ignore[untyped-decorator]
        async def charge(order_id: str) -> dict[str, str]:
            self.handled += 1
            return RECEIPT

        self._charge = charge

    async def once(self, key: str) -> Any:
        return await self._charge(order_id=key)


class IdempotencyKit:
    """idempotency-kit's coordinator, on its Redis repository."""

    def __init__(self, place: RedisPlace) -> None:
        self.handled, self.answer = 0, RECEIPT
        repository = RedisAsyncIdempotencyRepository(place.plain_client())
        self._coordinator = AsyncIdempotencyCoordinator(repository, IdempotencyDomainService())
        self._adapter = JsonResultAdapter()

    async def once(self, key: str) -> Any:
        return await self._coordinator.coordinate("charge", key, 3600, self._adapter, self._work)

    async def _work(self) -> dict[str, str]:
        self.handled += 1
        return RECEIPT


class _LambdaContext:
    """What Lambda tells about the time that is left: the lease."""

    def get_remaining_time_in_millis(self) -> int:
        return _LEASE_SECONDS * 1000


class Powertools:
    """AWS Lambda Powertools' decorator on its cache layer: a synchronous library, so one call at a time."""

    def __init__(self, place: RedisPlace) -> None:
        # It takes the name of the function's place from here, as Lambda sets it.
        os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "bench")
        logging.getLogger("aws_lambda_powertools").setLevel(logging.WARNING)
        self.handled, self.answer = 0, RECEIPT
        self._client = redis.Redis.from_url(place.url, decode_responses=True)
        place.stack.callback(self._client.close)
        client: Any = self._client  # its Protocol knows fewer arguments than redis-py has
        layer = CachePersistenceLayer(client=client)
        config = PowertoolsConfig()
        context: Any = _LambdaContext()
        config.register_lambda_context(context)

        @idempotent_function(data_keyword_argument="order_id", persistence_store=layer, config=config)  # type: ignore[untyped-decorator]
        def charge(order_id: str) -> dict[str, str]:
            self.handled += 1
            return RECEIPT

        self._charge = charge

    async def once(self, key: str) -> Any:
        return self._charge(order_id=key)
