"""Records in Redis 6.2 or newer, or Valkey: one round trip for a whole batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import AskError, ResponseError, TryAgainError

from integr8s_idem.config.durations import Duration, duration
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
from integr8s_idem.stores import Surveyed
from integr8s_idem.stores.redis import codec, keyspace, scripts
from integr8s_idem.stores.redis.batches import MOST_KEYS, slices
from integr8s_idem.stores.redis.cluster import RedisClusterClient
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.stores.redis.round_trips import ReplicaWait, send
from integr8s_idem.stores.redis.servers import Argument, Lazily, OneServer, Servers

_ABSENT: Final = 0
_OTHER_TYPE: Final = 1
_ASK_AGAIN: Final = 2
_OTHER_TYPE_REASON: Final = "the key holds another Redis type"
_READ_AT_ONCE: Final = 200
_COMPLETED: Final = bytes((codec.COMPLETED,))
_FAILED: Final = bytes((codec.FAILED,))


class RecordsInRedis:
    """The verbs of the store, wherever the records are."""

    def __init__(self, servers: Servers, timeout: timedelta, key_prefix: str, wait: ReplicaWait | None) -> None:
        self._servers = servers
        self._timeout = timeout
        self._mark = f"{key_prefix}:store-id"
        self._wait = wait

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts: list[Verdict | None] = []
        for start in range(0, len(requests), MOST_KEYS):
            verdicts += await self._reserve(requests[start : start + MOST_KEYS])
        while waiting := [index for index, verdict in enumerate(verdicts) if verdict is None]:
            now = waiting[:MOST_KEYS]
            for index, verdict in zip(now, await self._reserve([requests[index] for index in now]), strict=True):
                verdicts[index] = verdict
        return cast(list[Verdict], verdicts)

    async def _reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict | None]:
        """One round trip; `None` for a request that must be asked again."""
        keys = [request.key for request in requests]
        wishes = Lazily(codec.timed_wish_of, requests)
        with guarded("reserve", self._timeout):
            told = await self._servers.run(scripts.RESERVE, keys, wishes, wait=self._wait)
        verdicts: list[Verdict | None] = [None] * len(requests)
        for places, (now_us, *answers) in told:
            for place, answer in zip(places, answers, strict=True):
                request = requests[place]
                if answer == _ABSENT:
                    verdicts[place] = Reserved(
                        key=request.key, token=request.token, attempt=1, fence=now_us, lease=request.lease
                    )
                elif answer != _ASK_AGAIN:
                    verdicts[place] = _verdict(request, answer, now_us)
        return verdicts

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        keys = [reservation.key for reservation in reservations]
        marks = list(map(codec.mark_of, reservations))
        return await self._write("renew", scripts.RENEW, keys, marks, [codec.milliseconds(lease)])

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        outcomes = list(map(codec.outcome_of_completion, completions))
        return await self._settle("complete", _COMPLETED, completions, outcomes)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        outcomes = list(map(codec.outcome_of_failure, failures))
        return await self._settle("fail", _FAILED, failures, outcomes)

    async def _settle(
        self, operation: str, status: bytes, settled: Sequence[Completion | Failure], outcomes: list[bytes]
    ) -> list[bool]:
        keys = [item.reservation.key for item in settled]
        arguments = [
            codec.life_of(item.ttl) + codec.mark_of(item.reservation) + outcome
            for item, outcome in zip(settled, outcomes, strict=True)
        ]
        return await self._write(operation, scripts.SETTLE, keys, arguments, [status])

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        keys = [reservation.key for reservation in reservations]
        arguments = [codec.mark_of(reservation) + codec.life_of(2 * reservation.lease) for reservation in reservations]
        return await self._write("release", scripts.RELEASE, keys, arguments)

    async def _write(
        self,
        operation: str,
        script: scripts.Script,
        keys: Sequence[str],
        arguments: Sequence[bytes],
        head: Sequence[Argument] = (),
    ) -> list[bool]:
        written = [False] * len(keys)
        for part in slices(list(map(len, arguments))):
            with guarded(operation, self._timeout):
                told = await self._servers.run(script, keys[part], arguments[part], head, self._wait)
            for places, answers in told:
                for place, answer in zip(places, answers, strict=True):
                    written[part.start + place] = bool(answer)
        return written

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        records: list[IdempotencyRecord | None] = []
        for key, answer in zip(keys, await self._read("get", keys), strict=True):
            if isinstance(answer, Corrupt):
                raise CorruptRecordError(key, answer.reason)
            records.append(answer)
        return records

    async def _read(self, operation: str, keys: Sequence[str]) -> list[IdempotencyRecord | Corrupt | None]:
        answers: list[IdempotencyRecord | Corrupt | None] = [None] * len(keys)
        async for part in self._read_in_parts(operation, keys):
            for index, answer in part:
                answers[index] = answer
        return answers

    async def _read_in_parts(
        self, operation: str, keys: Sequence[str]
    ) -> AsyncIterator[list[tuple[int, IdempotencyRecord | Corrupt | None]]]:
        """What is under keys, by their indexes, a round trip at a time: results may be large."""
        waiting: Sequence[int] = range(len(keys))
        while waiting:
            now, later = waiting[:_READ_AT_ONCE], waiting[_READ_AT_ONCE:]
            with guarded(operation, self._timeout):
                told = await self._servers.run(scripts.READ, [keys[index] for index in now], [])
            again: list[int] = []
            part: list[tuple[int, IdempotencyRecord | Corrupt | None]] = []
            for places, (now_us, *found) in told:
                for place, raw, life in zip(places, found[::2], found[1::2], strict=True):
                    index = now[place]
                    if raw == _ASK_AGAIN:
                        again.append(index)
                    else:
                        part.append((index, _readable(keys[index], raw, now_us, life)))
            yield part
            waiting = [*sorted(again), *later]

    async def delete(self, keys: Sequence[str]) -> int:
        deleted = 0
        for start in range(0, len(keys), MOST_KEYS):
            with guarded("delete", self._timeout):
                deleted += await self._servers.unlink(keys[start : start + MOST_KEYS], self._wait)
        return deleted

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Every readable record whose key starts with `prefix`, in no order, page by page.

        Records that cannot be read are left out: `reserve` and `get` report them.  As with
        Redis's SCAN, what is written meanwhile may or may not be seen, and a record may be
        seen twice while the server grows.  So may one that moves within a cluster meanwhile.
        """
        async for page in self._survey("scan", prefix, ()):
            for answer in page.found:
                if isinstance(answer, IdempotencyRecord):
                    yield answer

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """As `scan`, page by page, and with the records that cannot be read."""
        return self._survey("survey", prefix, holding)

    async def _survey(self, operation: str, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
        async for page in keyspace.pages(self._servers, self._timeout, operation, prefix, holding):
            names = [name for name in map(keyspace.name_of, page.names) if name is not None]
            keys = [key for key in map(self._servers.key_of, names) if key != self._mark]
            async for part in self._read_in_parts(operation, keys):
                yield Surveyed([answer for _, answer in part if answer is not None], 0)
            yield Surveyed((), page.passed)

    async def size(self) -> int | None:
        """How many keys there are, those of other programs included; `None` where this user may not ask."""
        return await keyspace.size(self._servers, self._timeout)

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("end_leases", b"end", seen)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("forget", b"forget", seen)

    async def _change_seen(self, operation: str, how: bytes, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        keys, marks = [record.key for record in seen], list(map(codec.seen_of, seen))
        return await self._write(operation, scripts.SEEN, keys, marks, [how])

    async def count_active(self, prefix: str) -> int:
        active = 0
        now_ms: dict[Redis, int] = {}
        async for client, page, _ in keyspace.pages(self._servers, self._timeout, "count_active", prefix):
            if not page:
                continue
            with guarded("count_active", self._timeout):
                if client not in now_ms:
                    seconds, microseconds = await client.time()
                    now_ms[client] = seconds * 1000 + microseconds // 1000
                headers = await _headers(client, page)
            active += sum(isinstance(header, bytes) and codec.holds_lease(header, now_ms[client]) for header in headers)
        return active

    async def ping(self) -> StoreHealth:
        with guarded("ping", self._timeout):
            await self._servers.run(scripts.READ, [], [])
            return await self._servers.health(self._mark, self._wait)


class RedisIdempotencyRepository(RecordsInRedis):
    """`IdempotencyRepository` on one Redis server and its replicas, found by address or through Sentinels.

    A batch is one `EVALSHA` (per 1 000 keys and 4 MiB of arguments, in order); time is the
    server's, read once per call.  Every record has an expiry.  Times have a resolution of a
    millisecond, lengths of time beyond a century are cut.  The record format is in
    `integr8s_idem.stores.redis.codec`.

    The client is the caller's: the repository never closes it.  It must answer with bytes
    (`decode_responses` off).  The server must keep what it is given: `maxmemory-policy
    noeviction` and some persistence; `ping` says what is missing.

    With `wait_replicas`, every write is followed by `WAIT` in the same round trip.  It raises
    `StoreUnavailableError` unless so many replicas have confirmed it in time.  The write itself stands
    on the primary then, and reaches the replicas once they are back; it may be repeated, and a
    repetition finds its own reservation or outcome and waits for the replicas again.  `WAIT` makes a loss in a
    failover rare, not impossible: replicas have the write in memory, not on disk, and whoever elects the
    new primary may choose one that has not confirmed.  Replicas that are all asked for leave no such choice,
    and stop all work when one of them is away.

    An ACL user needs, with `KEY_PREFIX` as in `[idempotency] key_prefix`:

        ~KEY_PREFIX:* +evalsha +script|load +get +set +setrange +time +pttl +pexpire
        +scan +getrange +unlink        for scan, count_active and delete
        +ping +info +config|get        for ping, beside the first line; it says so where info or config is refused
        +client|setname +select        for the connections of `redis_client`

    and `+wait` for `wait_replicas`.

    Args:
        client: A client of redis-py; `redis_client` and `redis_sentinel_client` make one from settings.
        timeout: Longest wait for one call, retries of the driver included, before
            `StoreUnavailableError`.  Longer than `wait_timeout`.
        key_prefix: As in `[idempotency]`.  `KEY_PREFIX:store-id` names what the server holds: it is written
            once, has no expiry, and tells `ping` when it is gone.
        wait_replicas: Replicas that must have each write before it counts; 0 for none.
        wait_timeout: How long they may take.

    Raises:
        StoreConfigurationError: The client decodes answers.
    """

    def __init__(
        self,
        client: Redis,
        *,
        timeout: Duration = timedelta(seconds=2),
        key_prefix: str = "idempotency",
        wait_replicas: int = 0,
        wait_timeout: Duration = timedelta(seconds=1),
    ) -> None:
        if client.connection_pool.connection_kwargs.get("decode_responses"):
            raise StoreConfigurationError("start", "records are bytes: make the client with decode_responses=False")
        super().__init__(
            OneServer(client), duration(timeout, "timeout"), key_prefix, _wait(wait_replicas, wait_timeout)
        )
        self.client = client


class RedisClusterIdempotencyRepository(RecordsInRedis):
    """`IdempotencyRepository` on a Redis Cluster.

    As `RedisIdempotencyRepository`, and: records are kept under `{idem:N}KEY`, where N names one of 128
    buckets, so that a batch is one round trip to each primary that has keys of it, all at once.  Each bucket
    is asked by a script of its own, at its own moment.  `StoreHealth.identity` changes when any primary has
    lost what it held, `lineage` when a replica was seen to take a primary's place.  `WAIT` is asked of each
    primary that was written to: one that falls short fails the whole call.

    An ACL user needs `~{idem:*}KEY_PREFIX:*` instead of `~KEY_PREFIX:*`, and `+cluster|slots +asking` beside
    the rest (before Redis 7: `+cluster`).

    Args:
        client: `redis_cluster_client` makes one from settings; the repository never closes it.
        timeout: Longest wait for one call, redirects included.
        key_prefix, wait_replicas, wait_timeout: As for `RedisIdempotencyRepository`.
    """

    def __init__(
        self,
        client: RedisClusterClient,
        *,
        timeout: Duration = timedelta(seconds=2),
        key_prefix: str = "idempotency",
        wait_replicas: int = 0,
        wait_timeout: Duration = timedelta(seconds=1),
    ) -> None:
        super().__init__(client, duration(timeout, "timeout"), key_prefix, _wait(wait_replicas, wait_timeout))
        self.client = client


def _wait(replicas: int, timeout: Duration) -> ReplicaWait | None:
    return ReplicaWait(replicas, duration(timeout, "wait_timeout")) if replicas else None


async def _headers(client: Redis, names: list[bytes]) -> list[bytes | Exception]:
    headers: list[bytes | Exception] = await send(
        client, [("GETRANGE", name, 0, codec.HEADER_BYTES - 1) for name in names]
    )
    for header in headers:
        # One that holds another type is none of ours, and one that is on its way to another server is counted there.
        passing = isinstance(header, AskError | TryAgainError) or str(header).startswith("WRONGTYPE")
        if isinstance(header, ResponseError) and not passing:
            raise header
    return headers


def _verdict(request: ReserveRequest, answer: Any, now_us: int) -> Verdict:
    if answer == _OTHER_TYPE:
        return Corrupt(key=request.key, reason=_OTHER_TYPE_REASON)
    return codec.verdict_of(request, answer, now_us)


def _readable(key: str, raw: Any, now_us: int, life: int) -> IdempotencyRecord | Corrupt | None:
    if raw is None:
        return None
    if raw == _OTHER_TYPE:
        return Corrupt(key=key, reason=_OTHER_TYPE_REASON)
    try:
        return codec.record_of(key, raw, now_us, life)
    except codec.UnreadableError as error:
        return Corrupt(key=key, reason=str(error))
