"""Records in Redis 6.2 or newer, or Valkey, with one round trip per batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final

from redis.asyncio import Redis

from integr8s_idem._util.longest_duration import limited
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import CorruptRecordError, StoreConfigurationError
from integr8s_idem.records import (
    Completion,
    Corrupt,
    Database,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY, Surveyed
from integr8s_idem.stores.redis import batch_codec, codec, keyspace, scripts
from integr8s_idem.stores.redis.batch_codec import ASK_AGAIN, OTHER_TYPE, OTHER_TYPE_REASON
from integr8s_idem.stores.redis.batches import MOST_KEYS, slices
from integr8s_idem.stores.redis.cluster import RedisClusterClient
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.stores.redis.round_trips import ReplicaWait
from integr8s_idem.stores.redis.servers import KEYS_PER_RUN, Argument, Lazily, OneServer, Servers

_READ_AT_ONCE: Final = 200
_COMPLETED: Final = bytes((codec.COMPLETED,))
_FAILED: Final = bytes((codec.FAILED,))


class RecordsInRedis:
    """The operations of the store on one server or on a cluster."""

    def __init__(self, servers: Servers, timeout: timedelta, key_prefix: str, wait: ReplicaWait | None) -> None:
        self._servers = servers
        self._timeout = timeout
        self._store_id_key = f"{key_prefix}:store-id"
        self._wait = wait

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if len(requests) > MOST_KEYS:
            parts = [requests[start : start + MOST_KEYS] for start in range(0, len(requests), MOST_KEYS)]
            return [verdict for part in parts for verdict in await self.reserve(part)]
        verdicts: list[Verdict | None] = [None] * len(requests)
        waiting: Sequence[int] = range(len(requests))
        asked = requests
        while waiting:
            # Those of several runs of the script are encoded while the server executes the previous run.
            is_one_run = len(asked) <= KEYS_PER_RUN
            arguments = batch_codec.encode_requests(asked) if is_one_run else Lazily(batch_codec.encode_requests, asked)
            with guarded("reserve", self._timeout):
                keys = [request.key for request in asked]
                runs = await self._servers.run(scripts.RESERVE, keys, arguments, wait=self._wait)
            for index, verdict in zip(waiting, batch_codec.verdicts_of_runs(asked, runs), strict=True):
                verdicts[index] = verdict
            # Some must be sent again.
            waiting = [index for index in waiting if verdicts[index] is None]
            asked = [requests[index] for index in waiting]
        return verdicts  # type: ignore[return-value]  # each of them is a verdict by now

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        keys = [reservation.key for reservation in reservations]
        holders = list(map(codec.encode_holder, reservations))
        return await self._write("renew", scripts.RENEW, keys, holders, [codec.milliseconds(lease)])

    def complete(self, completions: Sequence[Completion]) -> Coroutine[Any, Any, list[bool]]:
        keys = [completion.reservation.key for completion in completions]
        if len(keys) <= KEYS_PER_RUN:
            arguments = batch_codec.encode_completions(completions)
            return self._write("complete", scripts.SETTLE, keys, arguments, [_COMPLETED])
        later = Lazily(batch_codec.encode_completions, completions)
        sizes = [0 if completion.result is None else len(completion.result.body) for completion in completions]
        return self._write("complete", scripts.SETTLE, keys, later, [_COMPLETED], sizes=sizes)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        keys = [failure.reservation.key for failure in failures]
        arguments = [
            codec.encode_life(failure.ttl) + codec.encode_holder(failure.reservation) + codec.encode_failure(failure)
            for failure in failures
        ]
        return await self._write("fail", scripts.SETTLE, keys, arguments, [_FAILED])

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        keys = [reservation.key for reservation in reservations]
        if delay > NO_DELAY:
            holders = list(map(codec.encode_holder, reservations))
            times = codec.encode_times(delay, limited(delay) + limited(retention))
            return await self._write("release", scripts.SCHEDULE, keys, holders, [times])
        arguments = [codec.encode_holder(item) + codec.encode_life(2 * item.lease) for item in reservations]
        return await self._write("release", scripts.RELEASE, keys, arguments)

    async def _write(
        self,
        operation: str,
        script: scripts.Script,
        keys: Sequence[str],
        arguments: Sequence[bytes],
        head: Sequence[Argument] = (),
        *,
        sizes: Sequence[int] | None = None,
    ) -> list[bool]:
        """Run a script on keys; `sizes` are about the bytes of arguments that are encoded when they are sent."""
        written = [False] * len(keys)
        for part in slices(list(map(len, arguments)) if sizes is None else sizes):
            is_all = part.stop - part.start == len(keys)
            some_keys, some_arguments = (keys, arguments) if is_all else (keys[part], arguments[part])
            with guarded(operation, self._timeout):
                runs = await self._servers.run(script, some_keys, some_arguments, head, self._wait)
            for indexes, answers in runs:
                for index, answer in zip(indexes, answers, strict=True):
                    written[part.start + index] = bool(answer)
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
        """Yield records with the indexes of their keys, one round trip at a time, since results may be large."""
        waiting: Sequence[int] = range(len(keys))
        while waiting:
            batch, later = waiting[:_READ_AT_ONCE], waiting[_READ_AT_ONCE:]
            with guarded(operation, self._timeout):
                runs = await self._servers.run(scripts.READ, [keys[index] for index in batch], [])
            again: list[int] = []
            part: list[tuple[int, IdempotencyRecord | Corrupt | None]] = []
            for positions, (now_us, *found) in runs:
                for position, raw, life in zip(positions, found[::2], found[1::2], strict=True):
                    index = batch[position]
                    if raw == ASK_AGAIN:
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
        """Yield every readable record whose key starts with `prefix`, in no particular order.

        Records that cannot be read are skipped; `reserve` and `get` report them.  As with SCAN of
        Redis, records written during the scan may or may not be returned, and a record may be
        returned twice while the server resizes its table or a slot moves within a cluster.
        """
        async for page in self._survey("scan", prefix, ()):
            for answer in page.found:
                if isinstance(answer, IdempotencyRecord):
                    yield answer

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """Yield pages of records like `scan`, including records that cannot be read."""
        return self._survey("survey", prefix, holding)

    async def _survey(self, operation: str, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
        async for page in keyspace.pages(self._servers, self._timeout, operation, prefix, holding):
            names = [name for name in map(keyspace.name_of, page.names) if name is not None]
            keys = [key for key in map(self._servers.key_of, names) if key != self._store_id_key]
            async for part in self._read_in_parts(operation, keys):
                yield Surveyed([answer for _, answer in part if answer is not None], 0)
            yield Surveyed((), page.passed)

    async def size(self) -> int | None:
        """Return the number of keys, including those of other programs; `None` if this user may not run INFO."""
        return await keyspace.size(self._servers, self._timeout)

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("end_leases", b"end", seen)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("forget", b"forget", seen)

    async def _change_seen(self, operation: str, action: bytes, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        keys, versions = [record.key for record in seen], list(map(codec.encode_seen, seen))
        return await self._write(operation, scripts.SEEN, keys, versions, [action])

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
                headers = await keyspace.headers(client, page)
            active += sum(isinstance(header, bytes) and codec.holds_lease(header, now_ms[client]) for header in headers)
        return active

    async def ping(self) -> StoreHealth:
        with guarded("ping", self._timeout):
            await self._servers.run(scripts.READ, [], [])
            return await self._servers.health(self._store_id_key, self._wait)


class RedisIdempotencyRepository(RecordsInRedis):
    """`IdempotencyRepository` on one Redis server and its replicas, found by address or through Sentinels.

    A batch is one `EVALSHA` (per 1 000 keys and 4 MiB of arguments, in order).  The time is read from the
    server's clock once per call.  Every record has an expiry.  Times have a resolution of one
    millisecond; durations are limited to a century.  `integr8s_idem.stores.redis.codec` describes
    the format of records.

    The repository never closes the client.  The client must return bytes (`decode_responses` off).  The
    server must retain the records: set `maxmemory-policy noeviction` and some persistence; `ping` reports
    what is missing.

    With `wait_replicas`, every write is followed by `WAIT` in the same round trip.  If fewer replicas confirm
    it in time, the call raises `StoreUnavailableError`.  The write remains on the primary, and reaches the
    replicas once they are back; you may repeat the call, which finds its own reservation or outcome and waits
    for the replicas again.  `WAIT` makes losses in a failover rare, not impossible: replicas hold the write
    in memory, not on disk, and a replica that has not confirmed it may be elected as the new primary.  If you
    require all replicas, this cannot happen, but one missing replica stops all work.

    An ACL user needs these permissions, with `KEY_PREFIX` from `[idempotency] key_prefix`:

        ~KEY_PREFIX:* +evalsha +script|load +get +set +setrange +time +pttl +pexpire
        +scan +getrange +unlink        for scan, count_active and delete
        +ping +info +config|get        for ping, in addition to the first line; it reports if info or config is refused
        +client|setname +select        for the connections of `redis_client`

    and `+wait` for `wait_replicas`.

    Args:
        client: A client of redis-py.  `redis_client` and `redis_sentinel_client` create one from settings, whose calls
            take less time than those of the driver's own clients.
        timeout: Limit for one call, including retries of the driver, before
            `StoreUnavailableError`.  Must be longer than `wait_timeout`.
        key_prefix: As in `[idempotency]`.  The key `KEY_PREFIX:store-id` identifies the data of the server: it is
            written once and has no expiry, so that `ping` detects the loss of data.
        wait_replicas: Replicas that must confirm each write; 0 for none.
        wait_timeout: Limit for their confirmation.

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
            raise StoreConfigurationError("start", "records are bytes: create the client with decode_responses=False")
        super().__init__(
            OneServer(client), duration(timeout, "timeout"), key_prefix, _wait(wait_replicas, wait_timeout)
        )
        self.client = client

    @property
    def database(self) -> Database:
        """The database, for metrics; without an address if Sentinels name the server."""
        options = self.client.connection_pool.connection_kwargs
        address = options.get("host") or options.get("path") or ""
        return Database("redis", str(options.get("db") or 0), address, options.get("port") if address else None)


class RedisClusterIdempotencyRepository(RecordsInRedis):
    """`IdempotencyRepository` on a Redis Cluster.

    It works like `RedisIdempotencyRepository`, with these differences: records are stored as `{idem:N}KEY`, where
    N identifies one of 128 buckets, so that a batch is one round trip to each primary involved, all in parallel.
    The script runs once per bucket, each with its own time.  `StoreHealth.identity` changes when any primary has
    lost its data, `lineage` when a replica replaced a primary.  `WAIT` is sent to each primary that was
    written to; if one of them has too few replicas, the whole call fails.

    An ACL user needs `~{idem:*}KEY_PREFIX:*` instead of `~KEY_PREFIX:*`, and `+cluster|slots +asking` in addition
    to the other permissions (before Redis 7: `+cluster`).

    Args:
        client: `redis_cluster_client` creates one from settings; the repository never closes it.
        timeout: Limit for one call, including redirects.
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

    @property
    def database(self) -> Database:
        """The database, for metrics.  A cluster has several servers, so there is no address."""
        return Database("redis")


def _wait(replicas: int, timeout: Duration) -> ReplicaWait | None:
    return ReplicaWait(replicas, duration(timeout, "wait_timeout")) if replicas else None


def _readable(key: str, raw: Any, now_us: int, life: int) -> IdempotencyRecord | Corrupt | None:
    if raw is None:
        return None
    if raw == OTHER_TYPE:
        return Corrupt(key=key, reason=OTHER_TYPE_REASON)
    try:
        return codec.record_of(key, raw, now_us, life)
    except codec.UnreadableError as error:
        return Corrupt(key=key, reason=str(error))
