"""What each span means, and which spans a worker records in typical situations.

`docs/reference/spans.md` is made from these tables, and tests hold real spans against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from integr8s_idem.telemetry import Phase, conventions

_CLIENT: Final = (conventions.CLIENT_ID, conventions.SERVER_ADDRESS, conventions.SERVER_PORT)
_OPERATION: Final = (conventions.SYSTEM, conventions.OPERATION_NAME, conventions.OPERATION_TYPE)
_ENDED: Final = (conventions.ERROR_TYPE, conventions.INTERRUPTED)
_PLACE: Final = (conventions.DESTINATION, conventions.PARTITION, conventions.OFFSET, conventions.MESSAGE_ID)


@dataclass(frozen=True)
class SpanHelp:
    """A kind of span."""

    name: str
    """`<topic>` stands for the name of a topic."""
    kind: str
    meaning: str
    always: tuple[str, ...]
    """Attributes of every such span."""
    sometimes: tuple[str, ...] = ()
    """Attributes that are set if they are known, or if they apply."""
    links: str = ""


def _phase(phase: Phase, meaning: str, *sometimes: str, links: str = "") -> SpanHelp:
    both = (conventions.EVENT_TYPE, conventions.HANDLER, *sometimes, *_ENDED)
    return SpanHelp(phase.value, "internal", meaning, (conventions.SERVICE,), both, links)


SPANS: Final = (
    SpanHelp(
        "process <topic>",
        "consumer",
        "A delivery, from decoding until it is settled or released: all attempts of all handlers. Its "
        "status is ERROR if the message cannot be decoded or is dead-lettered, or if an attempt failed or lost its "
        "lease, even if a later attempt succeeded. `idempotency.outcome` says how it ended.",
        (
            *_OPERATION,
            conventions.DESTINATION,
            conventions.PARTITION,
            conventions.OFFSET,
            conventions.GROUP,
            conventions.SERVICE,
            conventions.DELIVERY,
            conventions.OUTCOME,
        ),
        (
            conventions.MESSAGE_ID,
            conventions.EVENT_TYPE,
            conventions.HANDLER,
            conventions.ATTEMPT,
            conventions.DEAD_LETTER_REASON,
            *_CLIENT,
            *_ENDED,
        ),
        "to the span of the producer, which is also its parent; `run`: to the span of the delivery whose run did the "
        "work, if the local memory knew it",
    ),
    _phase(
        Phase.RESERVE,
        "A request to the store for the key. While another run is in progress, only the first answer and the one that "
        "ends the wait have a span; while the store does not answer, only the first failure.",
        conventions.VERDICT,
        conventions.ATTEMPT,
        conventions.PREVIOUS,
        conventions.KEY,
        links="`previous_attempt`: to the span of the delivery that made the previous attempt, unless it is this one; "
        "for a guarded function or request, to the span of its reservation",
    ),
    _phase(Phase.WAIT, "The wait for another run of the same work, once per wait.", conventions.LOOKS),
    _phase(Phase.HANDLE, "A call of a handler, or of a guarded function.", conventions.ATTEMPT),
    SpanHelp(
        "idempotency.handle_batch",
        "internal",
        "A call of a batch handler, as a child of the `idempotency.handle` span of its first recorded member.",
        (
            *_OPERATION,
            conventions.GROUP,
            conventions.SERVICE,
            conventions.EVENT_TYPE,
            conventions.HANDLER,
            conventions.BATCH_SIZE,
        ),
        (conventions.DESTINATION, *_CLIENT, *_ENDED),
        "`member`: to each recorded member",
    ),
    _phase(Phase.COMPLETE, "Recording that the work is done."),
    _phase(Phase.FAIL, "Recording that the work has failed permanently."),
    _phase(Phase.RELEASE, "Releasing the key without an outcome, so that the work can be repeated."),
    _phase(
        Phase.REPLAY,
        "The use of a stored outcome instead of a run.",
        links="`run`: to the span of the delivery whose run did the work; for a guarded function or request, to the "
        "span of its reservation",
    ),
    SpanHelp(
        "send <topic>",
        "producer or client",
        "A message, from sending until the broker has confirmed it: an event, also from an outbox, or a dead letter. "
        "An event carries the context of this span, whose kind is producer. An event from an outbox keeps the context "
        "of its handler, and a dead letter that of the original message: then the kind is client.",
        (*_OPERATION, conventions.DESTINATION),
        (conventions.SERVICE, *_PLACE[1:], *_CLIENT, *_ENDED),
        "of kind client, to the span whose context the message carries",
    ),
)

_RUN: Final = """\
process order_placed (executed, attempt 1)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1)
    idempotency.complete"""
_DUPLICATE: Final = """\
process order_placed (duplicate)
    idempotency.reserve (Completed)
    idempotency.replay (run → process order_placed)"""
_DEAD_LETTER: Final = """\
process order_placed (dead_lettered, attempt 1, integr8s_idem.errors.PermanentError)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1, integr8s_idem.errors.PermanentError)
    idempotency.fail
    send order_placed.dlq"""

SITUATIONS: Final[Mapping[str, str]] = {
    "handled": "send order_placed\n" + "\n".join(f"    {line}" for line in _RUN.splitlines()),
    "duplicate": f"{_RUN}\n{_DUPLICATE}",
    "concurrent duplicate": f"""\
{_RUN}
process order_placed (duplicate)
    idempotency.reserve (InProgress)
    idempotency.wait
    idempotency.reserve (Completed)
    idempotency.replay (run → process order_placed)""",
    "concurrent duplicate that is skipped": f"""\
{_RUN}
process order_placed (in_progress)
    idempotency.reserve (InProgress)""",
    "takeover": """\
process order_placed
process order_placed (executed, attempt 2)
    idempotency.reserve (InProgress)
    idempotency.wait
    idempotency.reserve (Reserved, lapsed, attempt 2, previous_attempt → process order_placed)
    idempotency.handle (attempt 2)
    idempotency.complete""",
    "lost lease": """\
process order_placed (lost_lease, attempt 1, integr8s_idem.errors.LeaseLostError)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1, integr8s_idem.errors.LeaseLostError)""",
    "failure": """\
process order_placed (retried, attempt 1, OSError)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1, OSError)
    idempotency.release""",
    "retry, then success": """\
process order_placed (executed, attempt 2, OSError)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1, OSError)
    idempotency.release
    idempotency.reserve (Reserved, released, attempt 2)
    idempotency.handle (attempt 2)
    idempotency.complete""",
    "dead letter": _DEAD_LETTER,
    "discarded": """\
process order_placed (discarded, attempt 1)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1, KeyError)
    idempotency.complete""",
    "undecodable": """\
process order_placed (undecodable, integr8s_idem.errors.UndecodableEventError)
    send order_placed.dlq""",
    "batch": """\
process order_placed (executed, attempt 1)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1)
        idempotency.handle_batch (member 1 → idempotency.handle, member 2 → idempotency.handle)
    idempotency.complete
process order_placed (executed, attempt 1)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1)
    idempotency.complete""",
    "transaction": """\
process order_placed (executed, attempt 1)
    idempotency.reserve (Reserved, attempt 1)
    idempotency.handle (attempt 1)
        send order_paid""",
    "replay": f"{_DEAD_LETTER}\n{_RUN}",
}
"""Trees of spans, as `RecordedSpans.tree` of `integr8s_idem.testing` writes them."""
