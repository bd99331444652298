"""Store records in a DynamoDB table, with one conditional write per key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import CorruptRecordError, StoreUnavailableError
from integr8s_idem.records import (
    NOBODY,
    Completion,
    Corrupt,
    Database,
    Failure,
    IdempotencyRecord,
    Previous,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY, Surveyed
from integr8s_idem.stores.dynamodb import expressions
from integr8s_idem.stores.dynamodb.batches import map_concurrently
from integr8s_idem.stores.dynamodb.calls import Calls, ConditionFailedError, retries
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.stores.dynamodb.errors import THROTTLED
from integr8s_idem.stores.dynamodb.items import (
    COMPLETED,
    FAILED,
    Entry,
    Item,
    UnreadableError,
    entry_of,
    existing_verdict,
    fence_of,
    has_expired,
    holds,
    item_of,
    microseconds,
    record_of,
    renewed_item,
)
from integr8s_idem.stores.dynamodb.table import MARKER, Health

MAX_ATTEMPTS: Final = 5
"""Conditional writes of one reservation, before concurrent changes of its record are reported as an outage."""

_CONTENDED: Final = f"{{key}} was changed concurrently {MAX_ATTEMPTS} times"
_MAX_BATCH_GET: Final = 100


class DynamoIdempotencyRepository:
    """`IdempotencyRepository` in an Amazon DynamoDB table in one region.

    Each key of a batch is a separate request, with up to `concurrency` requests at a time.  A new key, a duplicate, a
    completion, a failure, a release and a renewal take one request, because a failed conditional write returns the
    existing item.  A released, lapsed or expired key, and a request repeated after a lost response, take two requests.
    Each concurrent change of the record takes one more, up to five.  Reads are strongly consistent.

    *The clock.*  DynamoDB has no request for the time, and the wall clocks of workers are not reliable.  But each
    response has a `Date` of AWS's clock in seconds.  From these, the store derives an interval that contains the
    current time of AWS, and a monotonic clock advances it between responses (see `ServerClock`).  So the first call of
    a process takes one additional request.  Leases and expiries are written with the end of the interval and checked
    with its start.  So no lease ends early, even if the wall clock of a worker is wrong.  A takeover can be late by the
    length of the interval: two seconds and two round trips between two processes that have just started, some
    milliseconds after a hundred responses.  After a machine was suspended (such as a migrated virtual machine), its
    first lease is too short by the duration of the suspension; a takeover is then possible, and the fence rejects the
    former owner.  AWS rejects requests from a machine whose wall clock is off by minutes; the `StoreUnavailableError`
    says so.

    *Fences* are `max(previous + 1, AWS's clock)`.  The item of an expired or deleted record stays for at least another
    hour, so that the next fence is greater even if two clocks differ.

    The limit for an item is 400 KiB: a result larger than 407 552 bytes, including its media type, is dropped
    (`result_dropped`), but duplicates are still detected.  Expired items count as absent at once; DynamoDB deletes them
    within days (TTL on `purge_at`).

    `scan` and `count_active` read the whole table, regardless of the prefix: one read unit for each 4 KB of all
    records.  `count_every` therefore sets how long `count_active` may cache its result.

    Do not use a global table of several regions with eventual consistency: the last writer wins, so two regions can
    both reserve a key.  `ping` warns about that, and about a missing TTL.  Other settings cannot lose acknowledged
    writes.

    The repository never closes the client.  Its identity needs the permissions dynamodb:GetItem, PutItem, UpdateItem
    and BatchGetItem; Scan for `scan` and `count_active`; and DescribeTable and DescribeTimeToLive for `ping`.
    `migrate` also needs CreateTable and UpdateTimeToLive.

    Args:
        client: An aiobotocore client for DynamoDB, such as `dynamo_client` opens.
        table: The name of the table; `integr8s-idem store migrate` creates it.
        timeout: Maximum duration of one request, including retries after throttling; then it raises
            `StoreUnavailableError`.
        concurrency: Maximum number of concurrent requests of one batch.
        count_every: How long `count_active` returns a cached result instead of reading the table.
        clock: A clock for tests.
    """

    def __init__(
        self,
        client: Any,
        table: str,
        *,
        timeout: Duration = timedelta(seconds=5),
        concurrency: int = 32,
        count_every: Duration = timedelta(0),
        clock: ServerClock | None = None,
    ) -> None:
        self.client = client
        self.table = table
        self._clock = clock or ServerClock()
        self._calls = Calls(table, duration(timeout, "timeout"), self._clock)
        self._health = Health(client, self._calls)
        self._concurrency = concurrency
        self._count_every = microseconds(duration(count_every, "count_every"))
        self._counts: dict[str, tuple[int, int]] = {}
        """Time by `tick` and result of the last count, by prefix."""

    @property
    def database(self) -> Database:
        """The database, for metrics."""
        endpoint = urlsplit(self.client.meta.endpoint_url)
        return Database("aws.dynamodb", address=endpoint.hostname or "", port=endpoint.port)

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        await self._ensure_clock("reserve")
        return await map_concurrently(requests, lambda request: request.key, self._reserve, self._concurrency)

    async def _reserve(self, request: ReserveRequest) -> Verdict:
        seen: Item = {}
        for _ in range(MAX_ATTEMPTS):
            verdict, item = self._decide(request, seen)
            if item is None:
                return verdict
            try:
                await self._send("reserve", self.client.put_item, expressions.put_item(item, seen))
            except ConditionFailedError as refused:
                seen = refused.item
            else:
                return verdict
        raise StoreUnavailableError("reserve", _CONTENDED.format(key=request.key))

    def _decide(self, request: ReserveRequest, seen: Item) -> tuple[Verdict, Item | None]:
        """Return the verdict on the existing item, and the item to write, if any."""
        earliest, now = self._clock.earliest(), self._clock.latest()
        if has_expired(seen, earliest):
            return self._new_reservation(request, now, 1, fence_of(seen))
        try:
            entry = entry_of(seen)
        except UnreadableError as error:
            return Corrupt(key=request.key, reason=str(error)), None
        existing = existing_verdict(request, entry, earliest)
        if existing is not None:
            return existing, None
        if entry.lease_until and entry.token == request.token:
            # A reservation with the same token: the response to an earlier call was lost.  That call replaced the
            # trace of the previous attempt.
            verdict = Reserved(
                key=request.key,
                token=entry.token,
                attempt=entry.attempt,
                fence=entry.fence,
                lease=request.lease,
                previous=entry.previous,
                lapsed=entry.lapsed,
                lapsed_alone=entry.lapsed_alone,
            )
            return verdict, renewed_item(request, seen, now)
        return self._new_reservation(request, now, entry.attempt + 1, entry.fence, entry)

    def _new_reservation(
        self, request: ReserveRequest, now: int, attempt: int, last_fence: int, last: Entry | None = None
    ) -> tuple[Reserved, Item]:
        has_lapsed = last is not None and last.lease_until > 0 and last.token != NOBODY
        previous = Previous.LAPSED if has_lapsed else Previous.RELEASED if last is not None else Previous.NONE
        reserved = Reserved(
            key=request.key,
            token=request.token,
            attempt=attempt,
            fence=max(last_fence + 1, now),
            lease=request.lease,
            previous=previous,
            lapsed=last.lapsed + has_lapsed if last is not None else 0,
            lapsed_alone=last.lapsed_alone + (has_lapsed and last.alone) if last is not None else 0,
            trace=last.trace if last is not None else None,
        )
        return reserved, item_of(request, reserved, now)

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        await self._ensure_clock("renew")
        length = microseconds(lease)

        async def renew(one: Reserved) -> bool:
            return await self._renew(one, length)

        return await map_concurrently(reservations, lambda one: one.key, renew, self._concurrency)

    async def _renew(self, one: Reserved, length: int) -> bool:
        until, earliest = self._clock.latest() + length, self._clock.earliest()
        request = expressions.renew_lease(one, until, earliest)
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._send("renew", self.client.update_item, request)
            except ConditionFailedError as refused:
                entry = _entry_or_none(refused.item)
                if entry is None or not holds(entry, one, earliest) or not entry.lease_until:
                    return False
                longer = entry.expires_at < until
                request = (
                    expressions.renew_lease_and_record(one, until, until + length, earliest)
                    if longer
                    else expressions.renew_lease(one, until, earliest)
                )
            else:
                return True
        raise StoreUnavailableError("renew", _CONTENDED.format(key=one.key))

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._settle("complete", COMPLETED, completions)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._settle("fail", FAILED, failures)

    async def _settle(self, operation: str, status: int, settled: Sequence[Completion | Failure]) -> list[bool]:
        await self._ensure_clock(operation)

        async def settle(one: Completion | Failure) -> bool:
            earliest = self._clock.earliest()
            try:
                change = expressions.settle_record(one, self._clock.latest(), earliest)
                await self._send(operation, self.client.update_item, change)
            except ConditionFailedError as refused:
                entry = _entry_or_none(refused.item)
                # An earlier call whose response was lost wrote this outcome; the fence identifies the reservation.
                return (
                    entry is not None
                    and (entry.status, entry.fence) == (status, one.reservation.fence)
                    and entry.expires_at > earliest
                )
            return True

        return await map_concurrently(settled, lambda one: one.reservation.key, settle, self._concurrency)

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        await self._ensure_clock("release")
        if delay > NO_DELAY:
            times = microseconds(delay), microseconds(retention)
            schedule = partial(self._schedule, times=times)
            return await map_concurrently(reservations, lambda one: one.key, schedule, self._concurrency)

        async def release(one: Reserved) -> bool:
            change = expressions.release_lease(one, self._clock.earliest())
            try:
                await self._send("release", self.client.update_item, change)
            except ConditionFailedError:
                return False
            return True

        return await map_concurrently(reservations, lambda one: one.key, release, self._concurrency)

    async def _schedule(self, one: Reserved, times: tuple[int, int]) -> bool:
        delay, retention = times
        due, earliest = self._clock.latest() + delay, self._clock.earliest()
        schedule = expressions.schedule_work
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._send("release", self.client.update_item, schedule(one, due, due + retention, earliest))
            except ConditionFailedError as refused:
                entry = _entry_or_none(refused.item)
                if entry is not None and holds(entry, one, earliest, by=NOBODY):
                    return True  # by an earlier call, whose response was lost
                if entry is None or not holds(entry, one, earliest):
                    return False
                lasts = entry.expires_at >= due + retention
                schedule = expressions.schedule_work_of_lasting_record if lasts else expressions.schedule_work
            else:
                return True
        raise StoreUnavailableError("release", _CONTENDED.format(key=one.key))

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        await self._ensure_clock("get")
        unique = list(dict.fromkeys(keys))
        found: dict[str, Item] = {}
        for start in range(0, len(unique), _MAX_BATCH_GET):
            found |= await self._read(unique[start : start + _MAX_BATCH_GET])
        earliest = self._clock.earliest()
        return [self._record(key, found.get(key, {}), earliest) for key in keys]

    async def _read(self, keys: Sequence[str]) -> dict[str, Item]:
        """Read the items of `keys`.  A response is limited to 16 MiB; the remaining keys are requested again."""
        found: dict[str, Item] = {}
        pending: Any = {"Keys": [{"key": {"S": key}} for key in keys], "ConsistentRead": True}
        async with retries("get", self._calls.timeout) as backoff:
            while pending:
                response = await self._calls.send("get", self.client.batch_get_item, RequestItems={self.table: pending})
                items = response["Responses"].get(self.table, [])
                found |= {item["key"]["S"]: item for item in items}
                pending = response.get("UnprocessedKeys", {}).get(self.table)
                if pending and not items:
                    await backoff.after(StoreUnavailableError("get", THROTTLED["ThrottlingException"]))
        return found

    @staticmethod
    def _record(key: str, item: Item, earliest: int) -> IdempotencyRecord | None:
        if has_expired(item, earliest):
            return None
        try:
            return record_of(entry_of(item), earliest)
        except UnreadableError as error:
            raise CorruptRecordError(key, str(error)) from error

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete records, with one request per key.  A tombstone of key and fence stays for at least an hour."""
        await self._ensure_clock("delete")

        async def delete(key: str) -> bool:
            try:
                response = await self._send(
                    "delete", self.client.update_item, expressions.delete_record(key, self._clock.latest())
                )
            except ConditionFailedError:
                return False
            return not has_expired(response["Attributes"], self._clock.earliest())

        return sum(await map_concurrently(keys, lambda key: key, delete, self._concurrency))

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Iterate over all readable records whose key starts with `prefix`, in no order, in pages of up to a megabyte.

        Reads the whole table.  Corrupt records are omitted; `reserve` and `get` report them.  Concurrent writes may or
        may not be included.
        """
        async for page in self._survey("scan", prefix, ()):
            for found in page.found:
                if isinstance(found, IdempotencyRecord):
                    yield found

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """Iterate like `scan`, page by page, but include corrupt records."""
        return self._survey("survey", prefix, holding)

    async def _survey(self, operation: str, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
        async for page in self._pages(operation, prefix, holding=holding):
            earliest = self._clock.earliest()
            found = [_record_or_corrupt(item, earliest) for item in page["Items"] if item["key"] != MARKER["key"]]
            yield Surveyed(found, page["ScannedCount"])

    async def size(self) -> int | None:
        """Return DynamoDB's item count of the last few hours; `None` if the identity lacks the permission."""
        return await self._health.size()

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("end_leases", seen, expressions.end_seen_lease)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("forget", seen, expressions.delete_seen_record)

    async def _change_seen(
        self,
        operation: str,
        seen: Sequence[IdempotencyRecord],
        change: Callable[[IdempotencyRecord, int, int], expressions.Arguments],
    ) -> list[bool]:
        await self._ensure_clock(operation)

        async def change_one(one: IdempotencyRecord) -> bool:
            try:
                request = change(one, self._clock.latest(), self._clock.earliest())
                await self._send(operation, self.client.update_item, request)
            except ConditionFailedError:
                return False
            return True

        return await map_concurrently(seen, lambda one: one.key, change_one, self._concurrency)

    async def count_active(self, prefix: str) -> int:
        """Count active leases, or return a count that is at most `count_every` old.  Reads the whole table."""
        tick = self._clock.tick()
        counted, active = self._counts.get(prefix, (0, 0))
        if prefix in self._counts and tick - counted < self._count_every:
            return active
        active = 0
        async for page in self._pages("count_active", prefix, active=True):
            active += page["Count"]
        self._counts[prefix] = tick, active
        return active

    async def _pages(
        self, operation: str, prefix: str, *, active: bool = False, holding: Sequence[str] = ()
    ) -> AsyncIterator[dict[str, Any]]:
        await self._ensure_clock(operation)
        request = expressions.scan_table(prefix, self._clock.earliest(), active=active, holding=holding)
        while True:
            page = await self._send(operation, self.client.scan, request)
            yield page
            if "LastEvaluatedKey" not in page:
                return
            request["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    async def ping(self) -> StoreHealth:
        return await self._health.check()

    async def _ensure_clock(self, operation: str) -> None:
        """Send a small request before the first call of a process, because only responses contain the time."""
        if not self._clock.known:
            await self._send(operation, self.client.get_item, {"Key": MARKER})

    async def _send(self, operation: str, action: Any, request: dict[str, Any]) -> dict[str, Any]:
        return await self._calls.send(operation, action, TableName=self.table, **request)


def _record_or_corrupt(item: Item, now: int) -> IdempotencyRecord | Corrupt:
    try:
        return record_of(entry_of(item), now)
    except UnreadableError as error:
        return Corrupt(key=item["key"]["S"], reason=str(error))


def _entry_or_none(item: Item) -> Entry | None:
    try:
        return entry_of(item)
    except UnreadableError:
        return None
