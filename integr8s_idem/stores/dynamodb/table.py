"""Create the table, and check its health and settings."""

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

MARKER: Final = {"key": {"S": "§store"}}
"""Key of the item with the identity of the store; keys of records are ASCII, so they differ."""

PURGE: Final = "purge_at"
"""The TTL attribute of the table."""

KEYS: Final = [{"AttributeName": "key", "KeyType": "HASH"}]
TYPES: Final = [{"AttributeName": "key", "AttributeType": "S"}]
_POLL_SECONDS: Final = 0.2
_INSPECT_SECONDS: Final = 3_600.0
_TOUCH: Final[dict[str, Any]] = {
    "UpdateExpression": "SET #identity = if_not_exists(#identity, :identity), #seen_at = :seen_at",
    "ExpressionAttributeNames": {"#identity": "identity", "#seen_at": "seen_at"},
    "ReturnValues": "ALL_NEW",
}


async def migrate(client: Any, table: str, *, timeout: timedelta = timedelta(minutes=5)) -> list[str]:
    """Create the table with on-demand billing, enable its TTL, and return the steps done, in order.

    Any number of processes may call this concurrently.  An existing table keeps its billing, indexes and backups.

    Raises:
        StoreConfigurationError: A table of this name has other keys or another TTL attribute.
        StoreUnavailableError: The table is not ready within `timeout`.
    """
    calls, done = Calls(table, timeout, ServerClock()), []
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            if not await _describe(client, calls):
                done += await _create_table(client, calls)
            await _wait_until_active(client, calls)
            done += await _enable_ttl(client, calls)
    except TimeoutError as error:
        raise StoreUnavailableError("migrate", f"the table {table} is not ready yet") from error
    return done


async def _create_table(client: Any, calls: Calls) -> list[str]:
    created = await calls.send(
        "migrate",
        client.create_table,
        accepts="ResourceInUseException",  # another process has just created it
        TableName=calls.table,
        KeySchema=KEYS,
        AttributeDefinitions=TYPES,
        BillingMode="PAY_PER_REQUEST",
    )
    return [f"create table {calls.table}"] if created else []


async def _wait_until_active(client: Any, calls: Calls) -> None:
    while True:
        found = await _describe(client, calls)
        if found.get("TableStatus") in ("ACTIVE", "UPDATING"):
            return _check(calls.table, found)
        await asyncio.sleep(_POLL_SECONDS)


def _check(table: str, found: Mapping[str, Any]) -> None:
    types = {one["AttributeName"]: one["AttributeType"] for one in found["AttributeDefinitions"]}
    if found["KeySchema"] != KEYS or types["key"] != "S":
        keys = ", ".join(f"{one['AttributeName']} ({types[one['AttributeName']]})" for one in found["KeySchema"])
        reason = f"the table {table} has the keys {keys}; the store needs only key (S): choose another table"
        raise StoreConfigurationError("migrate", reason, Code.SCHEMA_OTHER)


async def _enable_ttl(client: Any, calls: Calls) -> list[str]:
    status, attribute = await _ttl(client, calls)
    if status in ("ENABLED", "ENABLING"):
        if attribute != PURGE:
            raise StoreConfigurationError(
                "migrate",
                f"the TTL attribute of the table {calls.table} is {attribute}, the store needs {PURGE}: "
                "choose another table",
            )
        return []
    wanted = {"Enabled": True, "AttributeName": PURGE}
    try:
        await calls.send("migrate", client.update_time_to_live, TableName=calls.table, TimeToLiveSpecification=wanted)
    except StoreConfigurationError:
        if (await _ttl(client, calls))[1] != PURGE:  # otherwise another process has just set it
            raise
        return []
    return [f"enable TTL on {PURGE}"]


async def _ttl(client: Any, calls: Calls, operation: str = "migrate") -> tuple[str, str]:
    answer = await calls.send(operation, client.describe_time_to_live, TableName=calls.table)
    found = answer["TimeToLiveDescription"]
    return found["TimeToLiveStatus"], found.get("AttributeName", "")


async def _describe(client: Any, calls: Calls) -> dict[str, Any]:
    """Return the description of the table; empty if it does not exist."""
    answer = await calls.send(
        "migrate", client.describe_table, accepts="ResourceNotFoundException", TableName=calls.table
    )
    found: dict[str, Any] = answer.get("Table", {})
    return found


class Health:
    """Checks the table for `ping`.  It reads the settings once an hour, because AWS limits these requests."""

    def __init__(self, client: Any, calls: Calls) -> None:
        self._client = client
        self._calls = calls
        self._warnings: tuple[StoreWarning, ...] = ()
        self._inspected_at: float | None = None

    async def check(self) -> StoreHealth:
        """Check the table with a write, so that a table that rejects writes fails."""
        start = time.perf_counter()
        values = {":identity": {"S": secrets.token_hex(16)}, ":seen_at": {"N": str(time.time_ns() // 1_000)}}
        answer = await self._calls.send(
            "ping",
            self._client.update_item,
            TableName=self._calls.table,
            Key=MARKER,
            ExpressionAttributeValues=values,
            **_TOUCH,
        )
        latency = timedelta(seconds=time.perf_counter() - start)
        if self._inspected_at is None or time.monotonic() - self._inspected_at > _INSPECT_SECONDS:
            await self._inspect_settings()
        return StoreHealth(
            kind="dynamodb",
            version="",
            latency=latency,
            warnings=self._warnings,
            identity=answer["Attributes"]["identity"]["S"],
            keeps_all=True,
        )

    async def size(self) -> int | None:
        """Return DynamoDB's item count of the last few hours; `None` if the identity lacks the permission."""
        try:
            answer = await self._calls.send("size", self._client.describe_table, TableName=self._calls.table)
        except StoreConfigurationError as error:
            if error.code is Code.STORE_PERMISSION:
                return None
            raise
        return int(answer["Table"]["ItemCount"])

    async def _inspect_settings(self) -> None:
        try:
            answer = await self._calls.send("ping", self._client.describe_table, TableName=self._calls.table)
            deletion = await _ttl(self._client, self._calls, "ping")
        except StoreConfigurationError as error:
            self._warnings = (_uninspected(error),)
        except StoreUnavailableError:
            return  # the table accepts writes; a later ping reads its settings
        else:
            self._warnings = tuple(_warnings(answer["Table"], deletion))
        self._inspected_at = time.monotonic()


def _uninspected(error: StoreConfigurationError) -> StoreWarning:
    return StoreWarning(
        Code.STORE_UNSEEN,
        f"the settings of the table cannot be read ({error.reason})",
        "settings that lose records, or keep them forever, stay undetected",
        "allow dynamodb:DescribeTable and dynamodb:DescribeTimeToLive",
    )


def _warnings(found: Mapping[str, Any], deletion: tuple[str, str]) -> Iterator[StoreWarning]:
    if found.get("Replicas") and found.get("MultiRegionConsistency", "EVENTUAL") != "STRONG":
        what = "the table is replicated between regions, and the last writer wins"
        remedy = "use multi-Region strong consistency, or a table of one region"
        yield StoreWarning(Code.STORE_REGIONS, what, "two regions can reserve the same key", remedy)
    if deletion not in (("ENABLED", PURGE), ("ENABLING", PURGE)):
        what, cost = f"expired records are never deleted: no TTL on {PURGE}", "the table and its cost grow"
        yield StoreWarning(Code.STORE_NOT_PURGED, what, cost, MIGRATE)
