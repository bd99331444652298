"""What is asked of DynamoDB, in its words: one conditional write for each verb and key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from integr8s_idem.config.sections import MOST_RESULT_BYTES
from integr8s_idem.records import Completion, Failure, IdempotencyRecord, Reserved
from integr8s_idem.stores.dynamodb.items import (
    COMPLETED,
    FAILED,
    PROCESSING,
    Item,
    microseconds,
    number,
    purge_at,
    seen_of,
    text,
)

Arguments = dict[str, Any]

HELD: Final = "#status = :processing AND #fence = :fence AND #token = :token AND #expires_at > :judged"
"""The record still belongs to one reservation."""

_RENEWED: Final = f"{HELD} AND #lease_until > :nothing"
_SEEN: Final = ("status", "fence", "token", "lease_until", "expires_at")
"""No two states of a record agree in all of these."""
_STUMP: Final = (
    "SET #expires_at = :nothing, #purge_at = :purge REMOVE #status, #attempt, #token, #lease_until, #previous, "
    "#settled_at, #fingerprint, #owner, #trace, #result, #content_type, #result_dropped, #error, "
    "#lapsed, #lapsed_alone, #alone"
)
_AS_SEEN: Final = "#status = :status AND #fence = :fence AND #lease_until = :lease_until AND #expires_at > :judged"
_NAME: Final = re.compile(r"#(\w+)")
_NOTHING: Final = number(0)
_TELL: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
"""A write that is refused says what is there: no second question."""


@lru_cache(maxsize=128)
def names(expression: str) -> Mapping[str, str]:
    """Attributes by the placeholders in `expression`: many of their names are words of DynamoDB's own."""
    return {f"#{name}": name for name in _NAME.findall(expression)}


def putting(item: Item, seen: Item) -> Arguments:
    """Write `item` where there is still exactly what was seen; nothing, if nothing was."""
    condition, values = "attribute_not_exists(#key)", {}
    if seen:
        parts = [f"#{name} = :{name}" if name in seen else f"attribute_not_exists(#{name})" for name in _SEEN]
        condition = " AND ".join(["attribute_exists(#key)", *parts])
        values = {":" + name: seen[name] for name in _SEEN if name in seen}
    arguments: Arguments = {
        "Item": item,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(condition),
        **_TELL,
    }
    if values:
        arguments["ExpressionAttributeValues"] = values
    return arguments


def _updating(reserved: Reserved, update: str, condition: str, values: Arguments, judged: int) -> Arguments:
    return {
        "Key": {"key": {"S": reserved.key}},
        "UpdateExpression": update,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{update} {condition}"),
        "ExpressionAttributeValues": {
            ":processing": number(PROCESSING),
            ":fence": number(reserved.fence),
            ":token": {"B": reserved.token},
            ":judged": number(judged),
            **values,
        },
        **_TELL,
    }


def renewing(reserved: Reserved, until: int, judged: int) -> Arguments:
    """A new end of the lease, within the life of the record."""
    values = {":until": number(until), ":nothing": _NOTHING}
    condition = f"{_RENEWED} AND #expires_at >= :until"
    return _updating(reserved, "SET #lease_until = :until", condition, values, judged)


def prolonging(reserved: Reserved, until: int, expires_at: int, judged: int) -> Arguments:
    """A new end of the lease beyond the life of the record, which outlives it, so that the attempt still counts."""
    update = "SET #lease_until = :until, #expires_at = :expires_at, #purge_at = :purge"
    values = {":until": number(until), ":expires_at": number(expires_at), ":purge": purge_at(expires_at)}
    condition = f"{_RENEWED} AND #expires_at < :until"
    return _updating(reserved, update, condition, values | {":nothing": _NOTHING}, judged)


def releasing(reserved: Reserved, judged: int) -> Arguments:
    return _updating(reserved, "SET #lease_until = :nothing", HELD, {":nothing": _NOTHING}, judged)


def settling(one: Completion | Failure, now: int, judged: int) -> Arguments:
    """Remember an outcome; a result that no item can hold is dropped, and its dropping remembered."""
    expires_at = now + microseconds(one.ttl)
    values: Arguments = {
        ":now": number(now),
        ":expires_at": number(expires_at),
        ":purge": purge_at(expires_at),
        ":nothing": _NOTHING,
        ":status": number(COMPLETED if isinstance(one, Completion) else FAILED),
    }
    update = (
        "SET #status = :status, #settled_at = :now, #expires_at = :expires_at, #purge_at = :purge, "
        "#lease_until = :nothing"
    )
    for name, value in _outcome(one).items():
        update += f", #{name} = :{name}"
        values[f":{name}"] = value
    return _updating(one.reservation, f"{update} REMOVE #owner", HELD, values, judged)


def _outcome(one: Completion | Failure) -> Arguments:
    if isinstance(one, Failure):
        return {"error": text(one.error)}
    if one.result is None:
        return {"result_dropped": {"BOOL": one.result_dropped}}
    media_type = text(one.result.content_type)
    if len(one.result.body) + len(media_type["S"].encode()) > MOST_RESULT_BYTES:
        return {"result_dropped": {"BOOL": True}}
    return {
        "result": {"B": one.result.body},
        "content_type": media_type,
        "result_dropped": {"BOOL": one.result_dropped},
    }


def deleting(key: str, now: int) -> Arguments:
    """Leave a stump of key and fence, and answer with what was there."""
    condition = "attribute_exists(#key)"
    return {
        "Key": {"key": {"S": key}},
        "UpdateExpression": _STUMP,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{_STUMP} {condition}"),
        "ExpressionAttributeValues": {":nothing": _NOTHING, ":purge": purge_at(now)},
        "ReturnValues": "ALL_OLD",
    }


def ending_seen(record: IdempotencyRecord, now: int, judged: int) -> Arguments:
    """End the lease of a record that is still what somebody saw."""
    ask = _of_seen(record, "SET #lease_until = :nothing", f"{_AS_SEEN} AND #status = :processing", judged)
    ask["ExpressionAttributeValues"] |= {":nothing": _NOTHING, ":processing": number(PROCESSING)}
    return ask


def deleting_seen(record: IdempotencyRecord, now: int, judged: int) -> Arguments:
    """As `deleting`, if the record is still what somebody saw."""
    ask = _of_seen(record, _STUMP, _AS_SEEN, judged)
    ask["ExpressionAttributeValues"] |= {":nothing": _NOTHING, ":purge": purge_at(now)}
    return ask


def _of_seen(record: IdempotencyRecord, update: str, condition: str, judged: int) -> Arguments:
    seen = {f":{name}": number(value) for name, value in seen_of(record).items()}
    return {
        "Key": {"key": {"S": record.key}},
        "UpdateExpression": update,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": names(f"{update} {condition}"),
        "ExpressionAttributeValues": {**seen, ":judged": number(judged)},
        **_TELL,
    }


def scanning(prefix: str, judged: int, *, active: bool = False, holding: Sequence[str] = ()) -> Arguments:
    """What lives under `prefix`, and holds some parts: records, or the number of those that hold a lease."""
    # An item that does not say when it expires is none of ours, or damaged; neither is taken for absent.
    lives = "#expires_at > :judged" if active else "(attribute_not_exists(#expires_at) OR NOT #expires_at <= :judged)"
    parts, values = [lives], {":judged": number(judged)}
    if prefix:
        parts.append("begins_with(#key, :prefix)")
        values[":prefix"] = {"S": prefix}
    for place, part in enumerate(holding):
        parts.append(f"contains(#key, :part{place})")
        values[f":part{place}"] = {"S": part}
    if active:
        parts += ["#status = :processing", "#lease_until > :judged"]
        values[":processing"] = number(PROCESSING)
    condition = " AND ".join(parts)
    return {
        "FilterExpression": condition,
        "ExpressionAttributeNames": names(condition),
        "ExpressionAttributeValues": values,
        "Select": "COUNT" if active else "ALL_ATTRIBUTES",
        "ConsistentRead": True,
    }
