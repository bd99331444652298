"""Options that Kafka's clients share: where the brokers are, how to talk to them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

from integr8s_idem.config import KafkaSettings

T = TypeVar("T")


def connection_options(settings: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments for a consumer, a producer or an admin client of aiokafka."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": settings.client_id,
        "security_protocol": settings.security_protocol,
        "request_timeout_ms": int(settings.request_timeout_seconds * 1000),
    }
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = ssl.create_default_context(cafile=settings.ssl_ca_file)
    if settings.security_protocol.startswith("SASL"):
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        password = settings.sasl_password
        options["sasl_plain_password"] = password.get_secret_value() if password is not None else None
    return options


async def bounded(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """The answer of `call`, in a task of its own.

    With its broker gone, aiokafka may block for ever in `commit` and `stop`, and may raise a
    `CancelledError` of its own; neither must reach whoever waits.

    Raises:
        TimeoutError: It took longer, or was cancelled from within.
    """
    task = asyncio.get_running_loop().create_task(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.cancelled():
        raise TimeoutError("the client gave the call up")
    return task.result()
