"""Guards of a single call: this library, redis-py by hand, and other libraries as their authors intend."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig as PowertoolsConfig
from aws_lambda_powertools.utilities.idempotency import idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from idemkit import MethodConfig, RedisBackend, idempotent
from idempotency_kit import AsyncIdempotencyCoordinator, IdempotencyDomainService, JsonResultAdapter
from idempotency_kit.infra.storage.redis.aio import RedisAsyncIdempotencyRepository

from benchmarks.contestants import ensure
from benchmarks.places import RedisEnvironment
from integr8s_idem._util.tokens import new_token
from integr8s_idem.engine.coalescer import Coalescer
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import decode_result, encode_result, return_type_of
from integr8s_idem.keys import KeySpace
from integr8s_idem.records import Completed, Completion, Reserved, ReserveRequest
from integr8s_idem.stores import IdempotencyRepository

RECEIPT: Final = {"receipt": "receipt-1"}
"""The result of the work; all contestants store it."""
_PROCESSING, _DONE = b"processing", b'{"receipt": "receipt-1"}'
_LEASE_SECONDS: Final = 300
"""The default of this library."""
_LEASE: Final = timedelta(seconds=_LEASE_SECONDS)
_TTL: Final = timedelta(hours=24)
_TOKEN: Final = b"0123456789abcdef"


def _scope(_: object) -> str:
    return "bench"


class Guard(Protocol):
    """Runs the work for new keys."""

    handled: int
    """How often the work has run."""

    @property
    def answer(self) -> object:
        """The return value for a duplicate."""
        ...

    async def once(self, key: str) -> object:
        """Run the work of `key`, or return its stored result."""
        ...


class Integr8sIdem:
    """`manager.run` of this library."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self.handled, self.answer = 0, RECEIPT
        self._manager = manager

    async def once(self, key: str) -> dict[str, str]:
        return await self._manager.run(key, self._work)

    async def _work(self) -> dict[str, str]:
        self.handled += 1
        return RECEIPT


class RawRedis:
    """redis-py by hand: `SET NX EX`, the work, `SET KEEPTTL`. A duplicate is a losing `SET NX`."""

    def __init__(self, env: RedisEnvironment) -> None:
        self.handled, self.answer = 0, None
        self._client = env.plain_client()

    async def once(self, key: str) -> None:
        await self.run(key, self._work)

    async def run(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` if the key is new."""
        if await self._client.set(key, _PROCESSING, nx=True, ex=_LEASE_SECONDS):
            await work()
            ensure(await self._client.set(key, _DONE, keepttl=True), key)

    async def _work(self) -> None:
        self.handled += 1


class BareRequests:
    """The two requests of this library and nothing else of its guard.

    No key of its own, fingerprint, lease that is renewed, limit of attempts, or result.
    """

    def __init__(self, repository: IdempotencyRepository) -> None:
        self.handled, self.answer = 0, None
        self._repository = repository
        self._reserve = Coalescer(repository.reserve).answer
        self._complete = Coalescer(repository.complete).answer

    async def once(self, key: str) -> None:
        await self.run(key, self._work)

    async def run(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` if the key is new."""
        verdict = await self._reserve(ReserveRequest(key=key, token=_TOKEN, lease=_LEASE, retention=_TTL))
        if isinstance(verdict, Reserved):
            await work()
            ensure(await self._complete(Completion(reservation=verdict, ttl=_TTL)), key)

    async def together(self, keys: Sequence[str]) -> None:
        """Reserve and complete new keys, in two requests."""
        requests = [ReserveRequest(key=key, token=_TOKEN, lease=_LEASE, retention=_TTL) for key in keys]
        verdicts = await self._repository.reserve(requests)
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        written = await self._repository.complete([Completion(reservation=each, ttl=_TTL) for each in reserved])
        ensure(len(written) == len(keys) and all(written), "a key was not new, or an outcome was refused")

    async def _work(self) -> None:
        self.handled += 1


class RequestsWithParts:
    """The requests, and what no guard with stored results can do without: key, token, result.

    It decides nothing, and has no limits of time or attempts, fingerprint, lease that is renewed, or telemetry.
    """

    def __init__(self, repository: IdempotencyRepository) -> None:
        self.handled, self.answer = 0, RECEIPT
        self._space = KeySpace("idempotency", "bench")
        self._reserve = Coalescer(repository.reserve).answer
        self._complete = Coalescer(repository.complete).answer

    async def once(self, key: str) -> object:
        resolved = self._space.key(key)
        request = ReserveRequest(
            key=self._space.full(resolved), token=new_token(), lease=_LEASE, retention=_TTL, owner="bench"
        )
        verdict = await self._reserve(request)
        if isinstance(verdict, Completed):
            assert verdict.result is not None
            return decode_result(resolved.label, verdict.result, return_type_of(self._work))
        assert isinstance(verdict, Reserved)
        value = await self._work()
        ensure(await self._complete(Completion(reservation=verdict, ttl=_TTL, result=encode_result(value))), key)
        return value

    async def _work(self) -> dict[str, str]:
        self.handled += 1
        return RECEIPT


class Idemkit:
    """idemkit's decorator for functions, with its Redis backend."""

    def __init__(self, env: RedisEnvironment) -> None:
        self.handled, self.answer = 0, RECEIPT
        self._backend = RedisBackend.from_url(env.url)
        env.stack.push_async_callback(self._backend.aclose)

        # The decorator has no type annotations.
        @idempotent(backend=self._backend, config=MethodConfig(key_fields=["order_id"], scope=_scope))  # type: ignore[untyped-decorator]
        async def charge(order_id: str) -> dict[str, str]:
            self.handled += 1
            return RECEIPT

        self._charge = charge

    async def once(self, key: str) -> Any:
        return await self._charge(order_id=key)


class IdempotencyKit:
    """idempotency-kit's coordinator, with its Redis repository."""

    def __init__(self, env: RedisEnvironment) -> None:
        self.handled, self.answer = 0, RECEIPT
        repository = RedisAsyncIdempotencyRepository(env.plain_client())
        self._coordinator = AsyncIdempotencyCoordinator(repository, IdempotencyDomainService())
        self._adapter = JsonResultAdapter()

    async def once(self, key: str) -> Any:
        return await self._coordinator.coordinate("charge", key, 3600, self._adapter, self._work)

    async def _work(self) -> dict[str, str]:
        self.handled += 1
        return RECEIPT


class _LambdaContext:
    """A Lambda context whose remaining time is the lease."""

    def get_remaining_time_in_millis(self) -> int:
        return _LEASE_SECONDS * 1000


class Powertools:
    """AWS Lambda Powertools' decorator with its cache layer; synchronous, so one call at a time."""

    def __init__(self, env: RedisEnvironment) -> None:
        # Powertools reads the function name from this variable, which Lambda sets.
        os.environ.setdefault("AWS_LAMBDA_FUNCTION_NAME", "bench")
        logging.getLogger("aws_lambda_powertools").setLevel(logging.WARNING)
        self.handled, self.answer = 0, RECEIPT
        self._client = redis.Redis.from_url(env.url, decode_responses=True)
        env.stack.callback(self._client.close)
        client: Any = self._client  # its Protocol has fewer arguments than redis-py
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
