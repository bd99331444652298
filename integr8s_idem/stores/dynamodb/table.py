"""The table: made by `migrate`, looked at by `ping`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from integr8s_idem.diagnostics import Code, StoreWarning
from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.dynamodb.calls import Calls
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.stores.dynamodb.errors import MIGRATE

MARK: Final = {"key": {"S": "§store"}}
"""Key of the item that names what the table holds; keys of records are ASCII."""

PURGE: Final = "purge_at"
"""The attribute after which DynamoDB deletes an item."""

KEYS: Final = [{"AttributeName": "key", "KeyType": "HASH"}]
TYPES: Final = [{"AttributeName": "key", "AttributeType": "S"}]
_LOOK_EVERY: Final = 0.2
_LOOK_AGAIN: Final = 3_600.0
_MARKED: Final[dict[str, Any]] = {
    "UpdateExpression": "SET #identity = if_not_exists(#identity, :identity), #seen_at = :seen_at",
    "ExpressionAttributeNames": {"#identity": "identity", "#seen_at": "seen_at"},
    "ReturnValues": "ALL_NEW",
}


async def migrate(client: Any, table: str, *, timeout: timedelta = timedelta(minutes=5)) -> list[str]:
    """Make the table, billed per request, with its TTL; what was done, in order.

    Any number of processes may ask at once.
    A table that is there is kept with its billing, its indexes and its backups.

    Raises:
        StoreConfigurationError: A table of this name has other keys, or deletes by another attribute.
        StoreUnavailableError: It is not ready within `timeout`.
    """
    calls, done = Calls(table, timeout, ServerClock()), []
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            if not await _described(client, calls):
                done += await _made(client, calls)
            await _ready(client, calls)
            done += await _purging(client, calls)
    except TimeoutError as error:
        raise StoreUnavailableError("migrate", f"the table {table} is not ready yet") from error
    return done


async def _made(client: Any, calls: Calls) -> list[str]:
    made = await calls.send(
        "migrate",
        client.create_table,
        accepts="ResourceInUseException",  # somebody else has just made it
        TableName=calls.table,
        KeySchema=KEYS,
        AttributeDefinitions=TYPES,
        BillingMode="PAY_PER_REQUEST",
    )
    return [f"table {calls.table}"] if made else []


async def _ready(client: Any, calls: Calls) -> None:
    while True:
        found = await _described(client, calls)
        if found.get("TableStatus") in ("ACTIVE", "UPDATING"):
            return _check(calls.table, found)
        await asyncio.sleep(_LOOK_EVERY)


def _check(table: str, found: Mapping[str, Any]) -> None:
    types = {one["AttributeName"]: one["AttributeType"] for one in found["AttributeDefinitions"]}
    if found["KeySchema"] != KEYS or types["key"] != "S":
        keys = ", ".join(f"{one['AttributeName']} ({types[one['AttributeName']]})" for one in found["KeySchema"])
        said = f"the table {table} has the keys {keys}; the store needs key (S) alone: name another table"
        raise StoreConfigurationError("migrate", said, Code.SCHEMA_OTHER)


async def _purging(client: Any, calls: Calls) -> list[str]:
    status, attribute = await _ttl(client, calls)
    if status in ("ENABLED", "ENABLING"):
        if attribute != PURGE:
            raise StoreConfigurationError(
                "migrate", f"the table {calls.table} deletes by {attribute}, the store by {PURGE}: name another table"
            )
        return []
    wanted = {"Enabled": True, "AttributeName": PURGE}
    try:
        await calls.send("migrate", client.update_time_to_live, TableName=calls.table, TimeToLiveSpecification=wanted)
    except StoreConfigurationError:
        if (await _ttl(client, calls))[1] != PURGE:  # if it is, somebody else has just set it
            raise
        return []
    return [f"deletion of expired records by {PURGE}"]


async def _ttl(client: Any, calls: Calls, operation: str = "migrate") -> tuple[str, str]:
    answer = await calls.send(operation, client.describe_time_to_live, TableName=calls.table)
    found = answer["TimeToLiveDescription"]
    return found["TimeToLiveStatus"], found.get("AttributeName", "")


async def _described(client: Any, calls: Calls) -> dict[str, Any]:
    """The table; empty if there is none."""
    answer = await calls.send(
        "migrate", client.describe_table, accepts="ResourceNotFoundException", TableName=calls.table
    )
    found: dict[str, Any] = answer.get("Table", {})
    return found


class Health:
    """What `ping` asks of one table.  Its settings are looked at once an hour: AWS allows few such questions."""

    def __init__(self, client: Any, calls: Calls) -> None:
        self._client = client
        self._calls = calls
        self._warnings: tuple[StoreWarning, ...] = ()
        self._looked: float | None = None

    async def ask(self) -> StoreHealth:
        """Ask with a write: a table that takes none does not pass."""
        start = time.perf_counter()
        values = {":identity": {"S": secrets.token_hex(16)}, ":seen_at": {"N": str(time.time_ns() // 1_000)}}
        answer = await self._calls.send(
            "ping",
            self._client.update_item,
            TableName=self._calls.table,
            Key=MARK,
            ExpressionAttributeValues=values,
            **_MARKED,
        )
        latency = timedelta(seconds=time.perf_counter() - start)
        if self._looked is None or time.monotonic() - self._looked > _LOOK_AGAIN:
            await self._look()
        return StoreHealth(
            kind="dynamodb",
            version="",
            latency=latency,
            warnings=self._warnings,
            identity=answer["Attributes"]["identity"]["S"],
            keeps_all=True,
        )

    async def size(self) -> int | None:
        """How many items the table has, as DynamoDB counted them within the last hours; `None`: we may not ask."""
        try:
            answer = await self._calls.send("size", self._client.describe_table, TableName=self._calls.table)
        except StoreConfigurationError as error:
            if error.code is Code.STORE_PERMISSION:
                return None
            raise
        return int(answer["Table"]["ItemCount"])

    async def _look(self) -> None:
        try:
            answer = await self._calls.send("ping", self._client.describe_table, TableName=self._calls.table)
            deletion = await _ttl(self._client, self._calls, "ping")
        except StoreConfigurationError as error:
            self._warnings = (_unseen(error),)
        except StoreUnavailableError:
            return  # it takes writes, and that is what counts: its settings are looked at by a later ping
        else:
            self._warnings = tuple(_warnings(answer["Table"], deletion))
        self._looked = time.monotonic()


def _unseen(error: StoreConfigurationError) -> StoreWarning:
    return StoreWarning(
        Code.STORE_UNSEEN,
        f"the table's settings cannot be looked at ({error.reason})",
        "what loses records, or keeps them for ever, stays unseen",
        "allow dynamodb:DescribeTable and dynamodb:DescribeTimeToLive",
    )


def _warnings(found: Mapping[str, Any], deletion: tuple[str, str]) -> Iterator[StoreWarning]:
    if found.get("Replicas") and found.get("MultiRegionConsistency", "EVENTUAL") != "STRONG":
        what = "the table is replicated between regions, and the last writer wins"
        remedy = "use multi-Region strong consistency, or a table of one region"
        yield StoreWarning(Code.STORE_REGIONS, what, "two regions can get one key", remedy)
    if deletion not in (("ENABLED", PURGE), ("ENABLING", PURGE)):
        what, cost = f"expired records are never deleted: no TTL on {PURGE}", "the table grows, and is paid for"
        yield StoreWarning(Code.STORE_NOT_PURGED, what, cost, MIGRATE)
