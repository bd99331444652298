"""Errors of the driver and the server as ours.  The only place that knows both."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    DataError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError

_PASSING: Final = {
    "OOM": "Redis is out of memory (maxmemory) and refuses writes",
    "READONLY": "this Redis is a read-only replica",
    "MISCONF": "Redis cannot save to its disk and refuses writes",
    "NOREPLICAS": "Redis has fewer replicas than min-replicas-to-write and refuses writes",
    "MASTERDOWN": "this replica has lost its primary",
    "CLUSTERDOWN": "the Redis Cluster is down",
    "TRYAGAIN": "the Redis Cluster is moving these keys",
    "LOADING": "Redis is loading its data",
    "BUSY": "Redis is busy with a long script",
}
"""Refusals that end by themselves or by an operator's hand, without a change on our side."""

_CODE: Final = re.compile(rf"\b({'|'.join(_PASSING)})\b")
# Refused inside a script, Redis 6.2 does not say which command it was.
_REFUSED: Final = re.compile(r"permissions? to run the '([^']+)' command|can't run this command|access a key|NOPERM")


@asynccontextmanager
async def guarded(operation: str, timeout: timedelta) -> AsyncIterator[None]:
    """Give what happens inside `timeout`, and translate what goes wrong.

    Raises:
        StoreUnavailableError: No answer in time, no connection, or a refusal that passes.
        StoreConfigurationError: A refusal that does not pass by waiting.
    """
    seconds = timeout.total_seconds()
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StoreUnavailableError(operation, f"no answer from Redis within {seconds:g} s") from error
    except DataError:
        # An argument that the driver cannot send is a bug of the caller, not the store's state.
        raise
    except RedisError as error:
        raise translated(operation, error) from error
    except OSError as error:
        raise StoreUnavailableError(operation, f"no connection to Redis: {error}") from error


def translated(operation: str, error: RedisError) -> StoreError:
    """Our error for one of the driver's."""
    if isinstance(error, AuthenticationError | AuthorizationError | AuthenticationWrongNumberOfArgsError):
        return StoreConfigurationError(operation, "Redis does not accept this user and password")
    if not isinstance(error, ResponseError):
        return StoreUnavailableError(operation, f"no connection to Redis: {error}")
    # The driver cuts the code off the text where it has a class for it.
    text = f"{getattr(error, 'status_code', None) or ''} {error}"
    if isinstance(error, NoPermissionError) or _REFUSED.search(text):
        return StoreConfigurationError(operation, _permission(text))
    passing = _CODE.search(text)
    if passing is None:
        passing = _CODE.search(_code_of_class(error))
    if passing is not None:
        return StoreUnavailableError(operation, _PASSING[passing.group(1)])
    return StoreConfigurationError(operation, f"Redis answers: {_harmless(str(error))}")


def _code_of_class(error: ResponseError) -> str:
    """The code, told by the class: older drivers keep it nowhere else."""
    return {
        "OutOfMemoryError": "OOM",
        "ReadOnlyError": "READONLY",
        "ClusterDownError": "CLUSTERDOWN",
        "MasterDownError": "MASTERDOWN",
        "TryAgainError": "TRYAGAIN",
    }.get(type(error).__name__, "")


def _permission(text: str) -> str:
    refused = _REFUSED.search(text)
    if refused is not None and refused.group(1):
        return f"this Redis user may not run {refused.group(1).upper()}: give it +{refused.group(1).lower()}"
    if "key" in text:
        return "this Redis user may not touch these keys: give it ~prefix* for the prefix of [idempotency] key_prefix"
    return (
        "this Redis user may not run a command inside a script: give it +get +set +setrange +time +pttl +pexpire "
        "and +evalsha +script|load"
    )


def _harmless(text: str) -> str:
    # "unknown command 'X', with args beginning with: ..." would show keys and tokens.
    return text.partition(", with args")[0][:300]
