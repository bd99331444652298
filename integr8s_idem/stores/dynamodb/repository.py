"""Records in a table of DynamoDB: one conditional write for a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import CorruptRecordError, StoreUnavailableError
from integr8s_idem.records import (
    Completion,
    Corrupt,
    Failure,
    IdempotencyRecord,
    Previous,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import Surveyed
from integr8s_idem.stores.dynamodb import expressions
from integr8s_idem.stores.dynamodb.batches import each
from integr8s_idem.stores.dynamodb.calls import Calls, RefusedError, patient
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.stores.dynamodb.errors import THROTTLED
from integr8s_idem.stores.dynamodb.items import (
    COMPLETED,
    FAILED,
    Entry,
    Item,
    UnreadableError,
    answer_of,
    ended,
    entry_of,
    fence_of,
    found_again,
    holds,
    item_of,
    microseconds,
    record_of,
)
from integr8s_idem.stores.dynamodb.table import MARK, Health

TRIES: Final = 5
"""Conditional writes of one reservation, before somebody who changes the record all the time is told as an outage."""

_READ_AT_ONCE: Final = 100


class DynamoIdempotencyRepository:
    """`IdempotencyRepository` in a table of Amazon DynamoDB, of one region.

    Each key of a batch is a request of its own, up to `concurrency` at once.  A new key, a duplicate, a completion, a
    failure, a release and a renewal are one request: a write that is refused answers with what is there.  A key that
    was released, lapsed or expired, and a wish repeated after a lost answer, are two; one more for each time that
    somebody else changes the record in between, five at most.  Reads are strongly consistent.

    *The clock.*  DynamoDB cannot be asked for the time, and the clocks of workers are not to be trusted.  Each answer
    says its second by AWS's clock, though (`Date`); the store keeps from them between which two moments that clock
    stands, counts on by a clock that nobody sets, and learns with each answer: see `ServerClock`.  The first call of a
    process therefore asks once more.  Leases and expiries are written by the later moment and judged by the earlier
    one.  So no lease ends early, whatever a worker's wall clock says; a takeover can be late by what is not known:
    two seconds and two round trips between two processes that have just started, some milliseconds after a hundred
    answers.  A machine that was suspended whole (a virtual machine that was moved) writes its first lease after that
    too short by the length of the suspension; a takeover is then possible, and the fence refuses the loser.  AWS itself
    refuses requests of a machine whose wall clock is minutes off: that is `StoreUnavailableError`, and says so.

    *Fences* are `max(previous + 1, that clock)`.  A record that expired or was deleted stays as an item for another
    hour at least, so that the next fence is greater even if two clocks differ.

    An item holds 400 KiB: a result larger than 407 552 bytes, media type included, is dropped (`result_dropped`) and
    the protection stays.  Expired items count as absent at once; DynamoDB deletes them within days (TTL on `purge_at`).

    `scan` and `count_active` read the whole table, whatever the prefix: one read unit for each 4 KB of all records.
    For that reason `count_every` tells how old the answer of `count_active` may be.

    Never on a global table of several regions with eventual consistency: the last writer wins, and two regions both
    get a key.  `ping` warns of that, of a missing TTL, and of nothing else: what was acknowledged is kept.

    The client is the caller's: the repository never closes it.  Its identity needs dynamodb:GetItem, PutItem,
    UpdateItem, BatchGetItem, and Scan for `scan` and `count_active`, DescribeTable and DescribeTimeToLive for `ping`;
    `migrate` beside these CreateTable and UpdateTimeToLive.

    Args:
        client: A client of aiobotocore for DynamoDB; `dynamo_client` makes one from settings.
        table: Its name; `integr8s-idem store migrate` makes it.
        timeout: Longest wait for one request before `StoreUnavailableError`, pauses after throttling included.
        concurrency: Most requests of one batch at once.
        count_every: How long `count_active` repeats its answer instead of reading the table.
        clock: For tests.
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
        """By prefix: when it was counted, by `tick`, and how many there were."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        await self._know_the_time("reserve")
        return await each(requests, lambda request: request.key, self._reserve, self._concurrency)

    async def _reserve(self, request: ReserveRequest) -> Verdict:
        seen: Item = {}
        for _ in range(TRIES):
            verdict, item = self._decided(request, seen)
            if item is None:
                return verdict
            try:
                await self._ask("reserve", self.client.put_item, expressions.putting(item, seen))
            except RefusedError as refused:
                seen = refused.item
            else:
                return verdict
        raise StoreUnavailableError("reserve", f"{request.key} was changed by others {TRIES} times while we looked")

    def _decided(self, request: ReserveRequest, seen: Item) -> tuple[Verdict, Item | None]:
        """The verdict on what is there, and what must be written for it to hold."""
        judged, now = self._clock.earliest(), self._clock.latest()
        if ended(seen, judged):
            return self._taken(request, now, 1, fence_of(seen))
        try:
            entry = entry_of(seen)
        except UnreadableError as error:
            return Corrupt(key=request.key, reason=str(error)), None
        answer = answer_of(request, entry, judged)
        if answer is not None:
            return answer, None
        if entry.lease_until and entry.token == request.token:
            # Our own reservation: the answer to an earlier call was lost.
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
            return verdict, found_again(request, seen, now)
        return self._taken(request, now, entry.attempt + 1, entry.fence, entry)

    def _taken(
        self, request: ReserveRequest, now: int, attempt: int, last_fence: int, last: Entry | None = None
    ) -> tuple[Reserved, Item]:
        has_lapsed = last is not None and last.lease_until > 0
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
        )
        return reserved, item_of(request, reserved, now)

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        await self._know_the_time("renew")
        length = microseconds(lease)

        async def asked(one: Reserved) -> bool:
            return await self._renew(one, length)

        return await each(reservations, lambda one: one.key, asked, self._concurrency)

    async def _renew(self, one: Reserved, length: int) -> bool:
        until, judged = self._clock.latest() + length, self._clock.earliest()
        ask = expressions.renewing(one, until, judged)
        for _ in range(TRIES):
            try:
                await self._ask("renew", self.client.update_item, ask)
            except RefusedError as refused:
                entry = _readable(refused.item)
                if entry is None or not holds(entry, one, judged) or not entry.lease_until:
                    return False
                longer = entry.expires_at < until
                ask = (
                    expressions.prolonging(one, until, until + length, judged)
                    if longer
                    else expressions.renewing(one, until, judged)
                )
            else:
                return True
        raise StoreUnavailableError("renew", f"{one.key} was changed by others {TRIES} times while we looked")

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._settle("complete", COMPLETED, completions)

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._settle("fail", FAILED, failures)

    async def _settle(self, operation: str, status: int, settled: Sequence[Completion | Failure]) -> list[bool]:
        await self._know_the_time(operation)

        async def asked(one: Completion | Failure) -> bool:
            judged = self._clock.earliest()
            try:
                change = expressions.settling(one, self._clock.latest(), judged)
                await self._ask(operation, self.client.update_item, change)
            except RefusedError as refused:
                entry = _readable(refused.item)
                # Settled so by an earlier call, whose answer was lost: the fence names the reservation.
                return (
                    entry is not None
                    and (entry.status, entry.fence) == (status, one.reservation.fence)
                    and entry.expires_at > judged
                )
            return True

        return await each(settled, lambda one: one.reservation.key, asked, self._concurrency)

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        await self._know_the_time("release")

        async def asked(one: Reserved) -> bool:
            change = expressions.releasing(one, self._clock.earliest())
            try:
                await self._ask("release", self.client.update_item, change)
            except RefusedError:
                return False
            return True

        return await each(reservations, lambda one: one.key, asked, self._concurrency)

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        await self._know_the_time("get")
        different = list(dict.fromkeys(keys))
        found: dict[str, Item] = {}
        for start in range(0, len(different), _READ_AT_ONCE):
            found |= await self._read(different[start : start + _READ_AT_ONCE])
        judged = self._clock.earliest()
        return [self._record(key, found.get(key, {}), judged) for key in keys]

    async def _read(self, keys: Sequence[str]) -> dict[str, Item]:
        """What is under `keys`; an answer has 16 MiB at most, and what it leaves out is asked for again."""
        found: dict[str, Item] = {}
        waiting: Any = {"Keys": [{"key": {"S": key}} for key in keys], "ConsistentRead": True}
        async with patient("get", self._calls.timeout) as patience:
            while waiting:
                answer = await self._calls.send("get", self.client.batch_get_item, RequestItems={self.table: waiting})
                items = answer["Responses"].get(self.table, [])
                found |= {item["key"]["S"]: item for item in items}
                waiting = answer.get("UnprocessedKeys", {}).get(self.table)
                if waiting and not items:
                    await patience.after(StoreUnavailableError("get", THROTTLED["ThrottlingException"]))
        return found

    @staticmethod
    def _record(key: str, item: Item, judged: int) -> IdempotencyRecord | None:
        if ended(item, judged):
            return None
        try:
            return record_of(entry_of(item), judged)
        except UnreadableError as error:
            raise CorruptRecordError(key, str(error)) from error

    async def delete(self, keys: Sequence[str]) -> int:
        """As in the Protocol; one request a key.  A stump of key and fence stays for an hour at least."""
        await self._know_the_time("delete")

        async def asked(key: str) -> bool:
            try:
                answer = await self._ask(
                    "delete", self.client.update_item, expressions.deleting(key, self._clock.latest())
                )
            except RefusedError:
                return False
            return not ended(answer["Attributes"], self._clock.earliest())

        return sum(await each(keys, lambda key: key, asked, self._concurrency))

    async def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Every readable record whose key starts with `prefix`, in no order, in pages of up to a megabyte.

        Reads the whole table.  Records that cannot be read are left out: `reserve` and `get` report them.  What is
        written meanwhile may or may not be seen.
        """
        async for page in self._survey("scan", prefix, ()):
            for found in page.found:
                if isinstance(found, IdempotencyRecord):
                    yield found

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """As `scan`, page by page, and with the records that cannot be read."""
        return self._survey("survey", prefix, holding)

    async def _survey(self, operation: str, prefix: str, holding: Sequence[str]) -> AsyncIterator[Surveyed]:
        async for page in self._pages(operation, prefix, holding=holding):
            judged = self._clock.earliest()
            found = [_found(item, judged) for item in page["Items"] if item["key"] != MARK["key"]]
            yield Surveyed(found, page["ScannedCount"])

    async def size(self) -> int | None:
        """What DynamoDB counted within the last hours; `None` where this user may not ask."""
        return await self._health.size()

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("end_leases", seen, expressions.ending_seen)

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        return await self._change_seen("forget", seen, expressions.deleting_seen)

    async def _change_seen(
        self,
        operation: str,
        seen: Sequence[IdempotencyRecord],
        change: Callable[[IdempotencyRecord, int, int], expressions.Arguments],
    ) -> list[bool]:
        await self._know_the_time(operation)

        async def asked(one: IdempotencyRecord) -> bool:
            try:
                ask = change(one, self._clock.latest(), self._clock.earliest())
                await self._ask(operation, self.client.update_item, ask)
            except RefusedError:
                return False
            return True

        return await each(seen, lambda one: one.key, asked, self._concurrency)

    async def count_active(self, prefix: str) -> int:
        """As in the Protocol, and up to `count_every` old.  Reads the whole table."""
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
        await self._know_the_time(operation)
        ask = expressions.scanning(prefix, self._clock.earliest(), active=active, holding=holding)
        while True:
            page = await self._ask(operation, self.client.scan, ask)
            yield page
            if "LastEvaluatedKey" not in page:
                return
            ask["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    async def ping(self) -> StoreHealth:
        return await self._health.ask()

    async def _know_the_time(self, operation: str) -> None:
        """The first call of a process asks for something small before, since only an answer tells the time."""
        if not self._clock.known:
            await self._ask(operation, self.client.get_item, {"Key": MARK})

    async def _ask(self, operation: str, action: Any, ask: dict[str, Any]) -> dict[str, Any]:
        return await self._calls.send(operation, action, TableName=self.table, **ask)


def _found(item: Item, now: int) -> IdempotencyRecord | Corrupt:
    try:
        return record_of(entry_of(item), now)
    except UnreadableError as error:
        return Corrupt(key=item["key"]["S"], reason=str(error))


def _readable(item: Item) -> Entry | None:
    try:
        return entry_of(item)
    except UnreadableError:
        return None
