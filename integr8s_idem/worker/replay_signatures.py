"""Sign replays, and verify that the sender of a message knows the `[replay] secret`.  No I/O."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_PURPOSE: Final = b"integr8s-idem replay 1"
"""The first signed field, so that signatures made for another purpose are not valid here."""
_COPY_PURPOSE: Final = b"integr8s-idem retry 1"


class ReplayClaim(NamedTuple):
    """What the replay headers of a message claim."""

    topic: str
    group: bytes = b""
    """The consumer group that handles the message; empty for all."""
    handler: bytes = b""
    """The handler that runs; empty for all handlers of the group."""
    event: bytes = b""
    """`event_hash` of the event's id; empty if the dead letter does not contain it."""
    generation: int = 0


def event_hash(event_id: str) -> bytes:
    """Return the hash of an event's id for headers, since ids may contain personal data."""
    return hashlib.sha256(event_id.encode("utf-8", "backslashreplace")).hexdigest().encode()


def signature_of(claim: ReplayClaim, value: bytes | None, headers: Iterable[tuple[str, bytes]], secret: bytes) -> bytes:
    """Return the signature of a message.

    Args:
        claim: The claim of the message.
        value: The body of the message; `None` equals an empty one, as in the publisher.
        headers: The message's own headers.  They are signed only if the claim has no `event`, since one of them may be
            the event's id.
        secret: The key of the HMAC.
    """
    own = b"" if claim.event else hashlib.sha256(_joined(_flattened(headers))).digest()
    fields = (
        _PURPOSE,
        claim.topic.encode(),
        claim.group,
        claim.handler,
        claim.event,
        b"%d" % claim.generation,
        hashlib.sha256(value or b"").digest(),
        own,
    )
    return hmac.new(secret, _joined(fields), hashlib.sha256).hexdigest().encode()


def copy_signature(
    topic: str,
    fields: Sequence[bytes],
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes]],
    secret: bytes,
) -> bytes:
    """Return the signature of a copy in a retry topic.

    Args:
        topic: The retry topic.
        fields: The values of the headers that were added to the message, in their order.  One of them is the hash of
            the event's id.
        key: The Kafka key of the message.
        value: The body of the message; `None` equals an empty one.
        headers: The message's own headers, in their order: codecs read them, so they decide what the handler gets.
        secret: The key of the HMAC.
    """
    signed = (
        _COPY_PURPOSE,
        topic.encode(),
        *fields,
        b"" if key is None else b"key:" + key,
        hashlib.sha256(value or b"").digest(),
        hashlib.sha256(_joined(_flattened(headers))).digest(),
    )
    return hmac.new(secret, _joined(signed), hashlib.sha256).hexdigest().encode()


def is_signed(
    signature: bytes,
    claim: ReplayClaim,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes]],
    secrets: Iterable[bytes],
) -> bool:
    """Whether `signature` was made with one of `secrets`, for this message and this claim."""
    return any(hmac.compare_digest(signature_of(claim, value, headers, secret), signature) for secret in secrets)


def _flattened(headers: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        yield name.encode("utf-8", "backslashreplace")
        yield value or b""


def _joined(fields: Iterable[bytes]) -> bytes:
    """Join fields, each prefixed with its length, so that different lists never yield the same bytes."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(8), field))
