"""Generate `docs/reference/spans.md`: each span with its attributes, and the spans of typical situations."""

from __future__ import annotations

from typing import Final

from integr8s_idem.telemetry import DeliveryOutcome, conventions
from integr8s_idem.telemetry.span_help import SITUATIONS, SPANS, SpanHelp
from tests.packaging.markdown import MADE, cell, table

_HEAD: Final = f"""\
`integr8s-idem run` records spans with the OpenTelemetry SDK and exports them according to `[telemetry]`. If the
application has set its own TracerProvider, they go there instead. Messaging spans follow the semantic conventions of
OpenTelemetry, version {conventions.SCHEMA_URL.rpartition("/")[2]} (`schema_url`). In this version they are in
development.

From a trace to its record: `integr8s-idem keys explain` takes the value of `{conventions.DELIVERY}`, such as
`orders:3:1042`. From the record to the trace: its output names the trace and the span of the delivery that did the
work. [Reading a trace](../explanation/traces.md) explains both, and shows a request as a picture.

Spans of deliveries and of sent messages are recorded by the worker and by `EventPublisher`. FastStream and loops of
your own get the `idempotency.*` spans below those of your own instrumentation, if their manager comes from a container
with `TelemetryProvider`: one that you create with `IdempotencyManager(…)` has neither spans nor metrics. A duplicate
that is answered from the local memory (`local_memory_keys`) has no spans of phases. In a worker, the span of its
delivery has the link to the run; elsewhere there is no span that could have it.

A call to the store for one unit of work runs in the context of its caller, so that spans of an instrumented driver are
below the span of its phase. A call for several of them, or for the renewal of leases, runs in the context in which the
manager was created.

`{conventions.SERVER_ADDRESS}` and `{conventions.SERVER_PORT}` are those of the first broker in
`[kafka] bootstrap_servers`. Keys and messages of exceptions are in spans only with `[telemetry] span_keys = true`. A
trace that is not sampled costs no span.
"""

_SITUATIONS: Final = """\
An indented span is a child. In parentheses: outcome or verdict, how the previous attempt ended, the attempt, the class
of the error, and links to other spans. [`recorded_spans`](api/testing.md) writes such trees in your tests.
"""

_OWN: Final = {
    conventions.DELIVERY: "topic, partition and offset",
    conventions.OUTCOME: "how the delivery ended: see below",
    conventions.ATTEMPT: "number of the attempt, or of the last one of the delivery",
    conventions.VERDICT: (
        "the answer: `Reserved`, `InProgress`, `Scheduled`, `Completed`, `Failed`, `KeyReused` or `Corrupt`"
    ),
    conventions.PREVIOUS: "how the previous attempt ended: `lapsed` or `released`",
    conventions.ANSWER: "the answer of a reconcile function: `done`, `not_done` or `unknown`; absent after an error",
    conventions.LOOKS: "how many times the key was found in progress",
    conventions.DEAD_LETTER_REASON: "why it was dead-lettered, from a closed set",
    conventions.SERVICE: "name of the service",
    conventions.EVENT_TYPE: "type of the event",
    conventions.HANDLER: "name of the handler; of a delivery, only if its event has one handler",
    conventions.KEY: "key of the work; only with `span_keys`",
    conventions.INTERRUPTED: "exception that ended the span without an error, such as a cancellation",
    conventions.RELATION: "of a link: `run`, `previous_attempt` or `member`",
}
"""Meanings of the attributes that the conventions do not define."""

_OUTCOMES: Final = {
    DeliveryOutcome.IGNORED: "no handler of this service was to run",
    DeliveryOutcome.DUPLICATE: "an earlier run had completed; its result was used",
    DeliveryOutcome.EXECUTED: "the handler has run",
    DeliveryOutcome.IN_PROGRESS: 'skipped, since another run was in progress (`on_in_progress = "skip"`)',
    DeliveryOutcome.RETRY_LATER: "settled, since a copy of it waits in a retry topic",
    DeliveryOutcome.DISCARDED: "settled, although its handler failed, by a rule",
    DeliveryOutcome.RELEASED: "not settled, and will be redelivered: the partition was revoked, or the worker stopped",
    DeliveryOutcome.LOST_LEASE: "as `released`, after a run had lost its lease",
    DeliveryOutcome.RETRIED: "as `released`, after a run had failed",
    DeliveryOutcome.DEAD_LETTERED: "given up, and published to the dead-letter topic",
    DeliveryOutcome.UNDECODABLE: "dead-lettered, because the message is not a valid event",
}


def page() -> str:
    lines = ["# Spans", "", MADE, "", _HEAD, ""]
    for span in SPANS:
        lines += [f"## `{span.name}`", "", *_section(span)]
    lines += ["## Own attributes", ""]
    lines += [*table(("attribute", "meaning"), [(f"`{name}`", cell(text)) for name, text in _OWN.items()]), ""]
    lines += [
        "## Outcomes",
        "",
        "If a delivery has several handlers, the outcome furthest down in this list counts.",
        "",
    ]
    lines += [
        *table(("outcome", "meaning"), [(f"`{each.value}`", cell(_OUTCOMES[each])) for each in DeliveryOutcome]),
        "",
    ]
    lines += ["## Situations", "", _SITUATIONS, ""]
    for name, tree in SITUATIONS.items():
        lines += [f"### {name.capitalize()}", "", "```text", tree, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(span: SpanHelp) -> list[str]:
    lines = [f"Kind: {span.kind}. {span.meaning}", ""]
    lines += [f"- Always: {_names(span.always)}", f"- If known or applicable: {_names(span.sometimes)}"]
    if span.links:
        lines.append(f"- Links: {span.links}")
    return [*lines, ""]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
