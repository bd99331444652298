"""Names of span attributes: OpenTelemetry's semantic conventions, and those of this library.

The messaging conventions are in development; their names and types here are those of version 1.44.0.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the semantic conventions."""

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
OFFSET: Final = "messaging.kafka.offset"
MESSAGE_ID: Final = "messaging.message.id"
GROUP: Final = "messaging.consumer.group.name"
CLIENT_ID: Final = "messaging.client.id"
BATCH_SIZE: Final = "messaging.batch.message_count"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"

SERVICE: Final = "idempotency.service"
EVENT_TYPE: Final = "idempotency.event_type"
HANDLER: Final = "idempotency.handler"
DELIVERY: Final = "idempotency.delivery"
"""Topic, partition and offset of a delivery, as `integr8s-idem keys explain` takes them."""
OUTCOME: Final = "idempotency.outcome"
"""A `DeliveryOutcome`."""
DEAD_LETTER_REASON: Final = "idempotency.dead_letter_reason"
"""Why a message was dead-lettered, from a closed set."""
ATTEMPT: Final = "idempotency.attempt"
VERDICT: Final = "idempotency.verdict"
PREVIOUS: Final = "idempotency.previous"
"""How the previous attempt ended, if there was one: `released` or `lapsed`."""
ANSWER: Final = "idempotency.answer"
"""Answer of a reconcile function: `done`, `not_done` or `unknown`."""
LOOKS: Final = "idempotency.looks"
"""How many times a key was found in progress."""
KEY: Final = "idempotency.key"
"""Set only if a setting allows it."""
INTERRUPTED: Final = "idempotency.interrupted"
"""Name of the exception that ended a phase without an error, such as a cancellation."""
RELATION: Final = "idempotency.relation"
"""Of a link: a `Relation`."""


def first_server(servers: str) -> tuple[str, int] | None:
    """Return the address and port of the first of `servers`, as `host:port`, separated by commas; `None` if invalid."""
    host, _, port = servers.partition(",")[0].strip().rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def error_type_of(error: BaseException) -> str:
    """Return the value of `error.type` for an exception: the full name of its class."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
