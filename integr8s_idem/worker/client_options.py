"""Connection options that all Kafka clients share, and timeouts for their calls."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

from integr8s_idem.config import KafkaSettings

T = TypeVar("T")


def connection_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return keyword arguments for a consumer, producer or admin client of aiokafka."""
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
    """Await `call` in a separate task, for at most `seconds`.

    When its broker is unavailable, aiokafka may block forever in `commit` and `stop`, or raise a `CancelledError`
    although nobody cancelled the call.

    Raises:
        TimeoutError: The call took longer, or aiokafka cancelled it.
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
        raise TimeoutError("the client cancelled the call")
    return task.result()
