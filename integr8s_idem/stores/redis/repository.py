"""Records in Redis 6.2 or newer, or Valkey: one Lua call for a whole batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from integr8s_idem.errors import CorruptRecordError, StoreConfigurationError
from integr8s_idem.records import (
    Completion,
    Corrupt,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores.redis import codec
from integr8s_idem.stores.redis.batches import MOST_KEYS, slices
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.stores.redis.health import health_of
from integr8s_idem.stores.redis.scripts import Scripts

_ABSENT: Final = 0
_OTHER_TYPE: Final = 1
_ASK_AGAIN: Final = 2
_OTHER_TYPE_REASON: Final = "the key holds another Redis type"
_READ_AT_ONCE: Final = 200
_SCAN_COUNT: Final = 500
_COMPLETED: Final = bytes((codec.COMPLETED,))
_FAILED: Final = bytes((codec.FAILED,))


class RedisIdempotencyRepository:
    """`IdempotencyRepository` on one Redis server and its replicas.

    A batch is one `EVALSHA` (per 1 000 keys and 4 MiB of arguments, in order); time is the
    server's, read once per call.  Every record has an expiry.  Times have a resolution of a
    millisecond, lengths of time beyond a century are cut.  The record format is in
    `integr8s_idem.stores.redis.codec`.

    The client is the caller's: the repository never closes it.  It must answer with bytes
    (`decode_responses` off).  The server must keep what it is given: `maxmemory-policy
    noeviction` and some persistence; `ping` says what is missing.

    An ACL user needs, with `KEY_PREFIX` as in `[idempotency] key_prefix`:

        ~KEY_PREFIX:* +evalsha +script|load +get +set +setrange +time +pttl +pexpire
        +scan +getrange +unlink        for scan, count_active and delete
        +ping +info +config|get        for ping, beside the first line; it says so where info or config is refused
        +client|setname +select        for the connections of `redis_client`

    Args:
        client: A client of redis-py; `redis_client` makes one from settings.
        timeout: Longest wait for one call, retries of the driver included, before
            `StoreUnavailableError`.
        key_prefix: As in `[idempotency]`.  `KEY_PREFIX:store-id` names what the server holds: it is written
            once, has no expiry, and tells `ping` when it is gone.

    Raises:
        StoreConfigurationError: The client decodes answers.
    """

    def __init__(
        self, client: Redis, *, timeout: timedelta = timedelta(seconds=2), key_prefix: str = "idempotency"
    ) -> None:
        if client.connection_pool.connection_kwargs.get("decode_responses"):
            raise StoreConfigurationError("start", "records are bytes: make the client with decode_responses=False")
        self.client = client
        self._timeout = timeout
        self._mark = f"{key_prefix}:store-id"
        self._scripts = Scripts(client)

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(requests)
        waiting: Sequence[int] = range(len(requests))
        while waiting:
            again: list[int] = []
            for start in range(0, len(waiting), MOST_KEYS):
                again += await self._reserve(requests, waiting[start : start + MOST_KEYS], verdicts)
            waiting = again
        return cast(list[Verdict], verdicts)

    async def _reserve(
        self, requests: Sequence[ReserveRequest], indexes: Sequence[int], verdicts: list[Verdict | None]
    ) -> list[int]:
        """One call: fills `verdicts`, and tells the indexes that must be asked again."""
        keys = [requests[index].key for index in indexes]
        arguments = _wishes(requests, indexes)
        async with guarded("reserve", self._timeout):
            answers = await self._scripts.reserve(keys, arguments)
        now_us: int = answers[0]
        again: list[int] = []
        for index, answer in zip(indexes, answers[1:], strict=True):
            request = requests[index]
            if answer == _ABSENT:
                verdicts[index] = Reserved(
                    key=request.key, token=request.token, attempt=1, fence=now_us, lease=request.lease
                )
            elif answer == _ASK_AGAIN:
                again.append(index)
            elif answer == _OTHER_TYPE:
                verdicts[index] = Corrupt(key=request.key, reason=_OTHER_TYPE_REASON)
            else:
                verdicts[index] = codec.verdict_of(request, answer, now_us)
        return again

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        lease_ms = codec.milliseconds(lease)
        answers: list[bool] = []
        for start in range(0, len(reservations), MOST_KEYS):
            part = reservations[start : start + MOST_KEYS]
            arguments: list[bytes | int] = [lease_ms]
            arguments += map(codec.mark_of, part)
            async with guarded("renew", self._timeout):
                written = await self._scripts.renew([reservation.key for reservation in part], arguments)
            answers += map(bool, written)
        return answers

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        outcomes = [codec.outcome_of_completion(completion) for completion in completions]
        return await self._settle("complete", _COMPLETED, completions, outcomes)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        outcomes = [codec.outcome_of_failure(failure) for failure in failures]
        return await self._settle("fail", _FAILED, failures, outcomes)

    async def _settle(
        self, operation: str, status: bytes, settled: Sequence[Completion | Failure], outcomes: list[bytes]
    ) -> list[bool]:
        answers: list[bool] = []
        for part in slices(list(map(len, outcomes))):
            keys: list[str] = []
            arguments: list[bytes | int] = [status]
            ttl = None
            packed_ttl = b""
            for outcome, item in zip(outcomes[part], settled[part], strict=True):
                if item.ttl is not ttl:
                    ttl = item.ttl
                    packed_ttl = codec.packed_ms(codec.life_ms(ttl))
                keys.append(item.reservation.key)
                arguments.append(packed_ttl + codec.mark_of(item.reservation) + outcome)
            async with guarded(operation, self._timeout):
                written = await self._scripts.settle(keys, arguments)
            answers += map(bool, written)
        return answers

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(reservations), MOST_KEYS):
            part = reservations[start : start + MOST_KEYS]
            arguments: list[bytes | int] = []
            for reservation in part:
                arguments += (codec.mark_of(reservation), 2 * codec.life_ms(reservation.lease))
            async with guarded("release", self._timeout):
                written = await self._scripts.release([reservation.key for reservation in part], arguments)
            answers += map(bool, written)
        return answers

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        records: list[IdempotencyRecord | None] = []
        for key, answer in zip(keys, await self._read("get", keys), strict=True):
            if isinstance(answer, Corrupt):
                raise CorruptRecordError(key, answer.reason)
            records.append(answer)
        return records

    async def _read(self, operation: str, keys: Sequence[str]) -> list[IdempotencyRecord | Corrupt | None]:
        answers: list[IdempotencyRecord | Corrupt | None] = [None] * len(keys)
        waiting: Sequence[int] = range(len(keys))
        while waiting:
            now, later = waiting[:_READ_AT_ONCE], waiting[_READ_AT_ONCE:]
            async with guarded(operation, self._timeout):
                found = await self._scripts.read([keys[index] for index in now], [])
            again: list[int] = []
            for index, raw, life in zip(now, found[1::2], found[2::2], strict=True):
                if raw == _ASK_AGAIN:
                    again.append(index)
                else:
                    answers[index] = _readable(keys[index], raw, found[0], life)
            waiting = [*again, *later]
        return answers

    async def delete(self, keys: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(keys), MOST_KEYS):
            async with guarded("delete", self._timeout):
                deleted += await self.client.unlink(*keys[start : start + MOST_KEYS])
        return deleted

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Every readable record whose key starts with `prefix`, in no order, page by page.

        Records that cannot be read are left out: `reserve` and `get` report them.  As with
        Redis's SCAN, what is written meanwhile may or may not be seen, and a record may be
        seen twice while the server grows.
        """
        async for page in self._pages("scan", prefix):
            keys = [key for key in map(_key, page) if key is not None]
            for answer in await self._read("scan", keys):
                if isinstance(answer, IdempotencyRecord):
                    yield answer

    async def count_active(self, prefix: str) -> int:
        async with guarded("count_active", self._timeout):
            seconds, microseconds = await self.client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        active = 0
        async for page in self._pages("count_active", prefix):
            async with guarded("count_active", self._timeout):
                headers = await self._headers(page)
            active += sum(isinstance(header, bytes) and codec.holds_lease(header, now_ms) for header in headers)
        return active

    async def _headers(self, keys: list[bytes]) -> list[bytes | Exception]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(key, 0, codec.HEADER_BYTES - 1)
            headers: list[bytes | Exception] = await pipeline.execute(raise_on_error=False)
        for header in headers:
            if isinstance(header, ResponseError) and not str(header).startswith("WRONGTYPE"):
                raise header
        return headers

    async def _pages(self, operation: str, prefix: str) -> AsyncIterator[list[bytes]]:
        pattern = _glob(prefix)
        cursor = 0
        while True:
            async with guarded(operation, self._timeout):
                cursor, page = await self.client.scan(cursor, match=pattern, count=_SCAN_COUNT)
            if page:
                yield cast(list[bytes], page)
            if cursor == 0:
                return

    async def ping(self) -> StoreHealth:
        async with guarded("ping", self._timeout):
            await self._scripts.read([], [])
            return await health_of(self.client, self._mark)


def _wishes(requests: Sequence[ReserveRequest], indexes: Sequence[int]) -> list[bytes | int]:
    arguments: list[bytes | int] = []
    lease = retention = None
    times = b""
    for index in indexes:
        request = requests[index]
        # The requests of a batch usually share these two objects.
        if request.lease is not lease or request.retention is not retention:
            lease, retention = request.lease, request.retention
            lease_ms = codec.milliseconds(lease)
            # A record that is gone before its lease would leave the key with two owners.
            retention_ms = max(codec.life_ms(retention), lease_ms)
            times = codec.packed_ms(lease_ms) + codec.packed_ms(retention_ms)
        arguments.append(times + codec.wish_of(request))
    return arguments


def _readable(key: str, raw: Any, now_us: int, life: int) -> IdempotencyRecord | Corrupt | None:
    if raw is None:
        return None
    if raw == _OTHER_TYPE:
        return Corrupt(key=key, reason=_OTHER_TYPE_REASON)
    try:
        return codec.record_of(key, raw, now_us, life)
    except codec.UnreadableError as error:
        return Corrupt(key=key, reason=str(error))


def _key(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        # Our keys are ASCII: this one is somebody else's.
        return None


def _glob(prefix: str) -> str:
    """A pattern for SCAN that `prefix` matches letter by letter."""
    return "".join("\\" + letter if letter in "\\*?[]" else letter for letter in prefix) + "*"
