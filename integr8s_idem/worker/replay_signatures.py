"""Signatures of replays: proof that the sender of a message knows the `[replay] secret`.  Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_PURPOSE: Final = b"integr8s-idem replay 1"
"""The first signed field: a signature made for anything else never fits here."""


class ReplayClaim(NamedTuple):
    """What the replay headers of a message ask for."""

    topic: str
    group: bytes = b""
    """The consumer group that is to handle it; empty for all."""
    handler: bytes = b""
    """The handler that is to run; empty for all of the group."""
    event: bytes = b""
    """`event_hash` of the event's id; empty where the dead letter did not say it."""
    generation: int = 0


def event_hash(event_id: str) -> bytes:
    """An event's id as headers carry it: a hash, since ids may hold personal data."""
    return hashlib.sha256(event_id.encode("utf-8", "backslashreplace")).hexdigest().encode()


def signature_of(claim: ReplayClaim, value: bytes | None, headers: Iterable[tuple[str, bytes]], secret: bytes) -> bytes:
    """The signature of a message, for its header.

    Args:
        claim: What the message asks for.
        value: Its body; none and an empty one are the same, as for the publisher.
        headers: Its own headers.  They are signed where the claim does not name the event, whose id may be one of them.
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
    """Each field after its length, so that no two lists of fields make the same bytes."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(8), field))
