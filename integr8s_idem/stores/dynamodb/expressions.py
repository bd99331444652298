"""Build DynamoDB requests: one conditional write per operation and key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from integr8s_idem.config.store_sections import MOST_RESULT_BYTES
from integr8s_idem.records import NOBODY, Completion, Failure, IdempotencyRecord, Reserved
from integr8s_idem.stores.dynamodb.items import (
    COMPLETED,
    FAILED,
    PROCESSING,
    Item,
    microseconds,
    number,
    purge_at,
    seen_version,
    text,
)

Arguments = dict[str, Any]

HELD: Final = "#status = :processing AND #fence = :fence AND #token = :token AND #expires_at > :earliest"
"""The reservation still owns the record."""

_RENEWED: Final = f"{HELD} AND #lease_until > :nothing"
_SEEN: Final = ("status", "fence", "token", "lease_until", "expires_at")
"""Attributes that together identify the state of a record."""
_TOMBSTONE: Final = (
    "SET #expires_at = :nothing, #purge_at = :purge REMOVE #status, #attempt, #token, #lease_until, #previous, "
    "#settled_at, #fingerprint, #owner, #trace, #result, #content_type, #result_dropped, #error, "
    "#lapsed, #lapsed_alone, #alone"
)
_UNCHANGED: Final = "#status = :status AND #fence = :fence AND #lease_until = :lease_until AND #expires_at > :earliest"
_NAME: Final = re.compile(r"#(\w+)")
_NOTHING: Final = number(0)
_RETURN_OLD: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
"""Makes a failed write return the existing item, which saves a read."""


@lru_cache(maxsize=128)
def names(expression: str) -> Mapping[str, str]:
    """Map the placeholders in `expression` to attribute names, many of which are reserved words."""
    return {f"#{name}": name for name in _NAME.findall(expression)}


def put_item(item: Item, seen: Item) -> Arguments:
    """Write `item` if the existing item still is `seen`, which is empty for none."""
    condition, values = "attribute_not_exists(#key)", {}
    if seen:
        parts = [f"#{name} = :{name}" if name in seen else f"attribute_not_exists(#{name})" for name in _SEEN]
        condition = " AND ".join(["attribute_exists(#key)", *parts])
        values = {":" + name: seen[name] for name in _SEEN if name in seen}
    arguments: Arguments = {
        "Item": item,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(condition),
        **_RETURN_OLD,
    }
    if values:
        arguments["ExpressionAttributeValues"] = values
    return arguments


def _update_held(reserved: Reserved, update: str, condition: str, values: Arguments, earliest: int) -> Arguments:
    return {
        "Key": {"key": {"S": reserved.key}},
        "UpdateExpression": update,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{update} {condition}"),
        "ExpressionAttributeValues": {
            ":processing": number(PROCESSING),
            ":fence": number(reserved.fence),
            ":token": {"B": reserved.token},
            ":earliest": number(earliest),
            **values,
        },
        **_RETURN_OLD,
    }


def renew_lease(reserved: Reserved, until: int, earliest: int) -> Arguments:
    """Extend the lease, if the record lives long enough."""
    values = {":until": number(until), ":nothing": _NOTHING}
    condition = f"{_RENEWED} AND #expires_at >= :until"
    return _update_held(reserved, "SET #lease_until = :until", condition, values, earliest)


def renew_lease_and_record(reserved: Reserved, until: int, expires_at: int, earliest: int) -> Arguments:
    """Extend the lease and the record, which must outlive its lease, so that the attempt is counted."""
    update = "SET #lease_until = :until, #expires_at = :expires_at, #purge_at = :purge"
    values = {":until": number(until), ":expires_at": number(expires_at), ":purge": purge_at(expires_at)}
    condition = f"{_RENEWED} AND #expires_at < :until"
    return _update_held(reserved, update, condition, values | {":nothing": _NOTHING}, earliest)


def release_lease(reserved: Reserved, earliest: int) -> Arguments:
    return _update_held(reserved, "SET #lease_until = :nothing", HELD, {":nothing": _NOTHING}, earliest)


def schedule_work(reserved: Reserved, due: int, expires_at: int, earliest: int) -> Arguments:
    """Let nobody hold the record until `due`, and keep it until `expires_at`, if it does not live longer."""
    update = "SET #lease_until = :due, #token = :nobody, #expires_at = :expires_at, #purge_at = :purge"
    values = {
        ":due": number(due),
        ":nobody": {"B": NOBODY},
        ":expires_at": number(expires_at),
        ":purge": purge_at(expires_at),
    }
    return _update_held(reserved, update, f"{HELD} AND #expires_at < :expires_at", values, earliest)


def schedule_work_of_lasting_record(reserved: Reserved, due: int, expires_at: int, earliest: int) -> Arguments:
    """Let nobody hold the record until `due`, if it lives until `expires_at` anyway."""
    values = {":due": number(due), ":nobody": {"B": NOBODY}, ":expires_at": number(expires_at)}
    update = "SET #lease_until = :due, #token = :nobody"
    return _update_held(reserved, update, f"{HELD} AND #expires_at >= :expires_at", values, earliest)


def settle_record(outcome: Completion | Failure, now: int, earliest: int) -> Arguments:
    """Write an outcome; a result that is too large for an item is dropped, and marked as dropped."""
    expires_at = now + microseconds(outcome.ttl)
    values: Arguments = {
        ":now": number(now),
        ":expires_at": number(expires_at),
        ":purge": purge_at(expires_at),
        ":nothing": _NOTHING,
        ":status": number(COMPLETED if isinstance(outcome, Completion) else FAILED),
    }
    update = (
        "SET #status = :status, #settled_at = :now, #expires_at = :expires_at, #purge_at = :purge, "
        "#lease_until = :nothing"
    )
    for name, value in _outcome(outcome).items():
        update += f", #{name} = :{name}"
        values[f":{name}"] = value
    return _update_held(outcome.reservation, f"{update} REMOVE #owner", HELD, values, earliest)


def _outcome(outcome: Completion | Failure) -> Arguments:
    if isinstance(outcome, Failure):
        return {"error": text(outcome.error)}
    if outcome.result is None:
        return {"result_dropped": {"BOOL": outcome.result_dropped}}
    media_type = text(outcome.result.content_type)
    if len(outcome.result.body) + len(media_type["S"].encode()) > MOST_RESULT_BYTES:
        return {"result_dropped": {"BOOL": True}}
    return {
        "result": {"B": outcome.result.body},
        "content_type": media_type,
        "result_dropped": {"BOOL": outcome.result_dropped},
    }


def delete_record(key: str, now: int) -> Arguments:
    """Replace a record by a tombstone of key and fence, and return the old item."""
    condition = "attribute_exists(#key)"
    return {
        "Key": {"key": {"S": key}},
        "UpdateExpression": _TOMBSTONE,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{_TOMBSTONE} {condition}"),
        "ExpressionAttributeValues": {":nothing": _NOTHING, ":purge": purge_at(now)},
        "ReturnValues": "ALL_OLD",
    }


def end_seen_lease(record: IdempotencyRecord, now: int, earliest: int) -> Arguments:
    """End the lease of a record that has not changed since it was seen."""
    request = _update_seen(record, "SET #lease_until = :nothing", f"{_UNCHANGED} AND #status = :processing", earliest)
    request["ExpressionAttributeValues"] |= {":nothing": _NOTHING, ":processing": number(PROCESSING)}
    return request


def delete_seen_record(record: IdempotencyRecord, now: int, earliest: int) -> Arguments:
    """Replace a record by a tombstone, if it has not changed since it was seen."""
    request = _update_seen(record, _TOMBSTONE, _UNCHANGED, earliest)
    request["ExpressionAttributeValues"] |= {":nothing": _NOTHING, ":purge": purge_at(now)}
    return request


def _update_seen(record: IdempotencyRecord, update: str, condition: str, earliest: int) -> Arguments:
    seen = {f":{name}": number(value) for name, value in seen_version(record).items()}
    return {
        "Key": {"key": {"S": record.key}},
        "UpdateExpression": update,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{update} {condition}"),
        "ExpressionAttributeValues": {**seen, ":earliest": number(earliest)},
        **_RETURN_OLD,
    }


def scan_table(prefix: str, earliest: int, *, active: bool = False, holding: Sequence[str] = ()) -> Arguments:
    """Read unexpired records whose keys start with `prefix` and contain all of `holding`, or count active leases."""
    # An item without an expiry is foreign or corrupt, and must not count as absent.
    unexpired = (
        "#expires_at > :earliest" if active else "(attribute_not_exists(#expires_at) OR NOT #expires_at <= :earliest)"
    )
    parts, values = [unexpired], {":earliest": number(earliest)}
    if prefix:
        parts.append("begins_with(#key, :prefix)")
        values[":prefix"] = {"S": prefix}
    for place, part in enumerate(holding):
        parts.append(f"contains(#key, :part{place})")
        values[f":part{place}"] = {"S": part}
    if active:
        parts += ["#status = :processing", "#lease_until > :earliest"]
        values[":processing"] = number(PROCESSING)
    condition = " AND ".join(parts)
    return {
        "FilterExpression": condition,
        "ExpressionAttributeNames": names(condition),
        "ExpressionAttributeValues": values,
        "Select": "COUNT" if active else "ALL_ATTRIBUTES",
        "ConsistentRead": True,
    }
