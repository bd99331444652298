"""Errors of the driver and the server as ours.  The only place that knows both."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from types import TracebackType
from typing import Final

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    DataError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError

_PASSING: Final = {
    "OOM": "Redis is out of memory (maxmemory) and refuses writes",
    "READONLY": "this Redis is a read-only replica",
    "MISCONF": "Redis cannot save to its disk and refuses writes",
    "NOREPLICAS": "Redis has fewer replicas than min-replicas-to-write and refuses writes",
    "MASTERDOWN": "this replica has lost its primary",
    "CLUSTERDOWN": "the Redis Cluster is down, or nobody has some of its slots: look at CLUSTER INFO",
    "TRYAGAIN": "the Redis Cluster is moving these keys",
    "LOADING": "Redis is loading its data",
    "BUSY": "Redis is busy with a long script",
    "NOSCRIPT": "Redis loses our scripts as fast as they are loaded (SCRIPT FLUSH)",
}
"""Refusals that end by themselves or by an operator's hand, without a change on our side."""


class TooFewReplicasError(RedisError):
    """What was written has not reached as many replicas as it must."""

    def __init__(self, wanted: int, confirmed: object, timeout: timedelta) -> None:
        super().__init__(
            f"{confirmed} of the {wanted} replicas that must have each write confirmed it within "
            f"{timeout.total_seconds():g} s: the primary has it, and it may be repeated; "
            "bring the replicas back, or lower wait_replicas in [store]"
        )


class PrimaryUnknownError(MasterNotFoundError):
    """No Sentinel has heard of a primary of this name."""


_FOUND: Final = {
    "OOM": Code.STORE_MEMORY,
    "READONLY": Code.STORE_REPLICA,
    "MASTERDOWN": Code.STORE_REPLICA,
    "NOREPLICAS": Code.STORE_TOO_FEW_REPLICAS,
    "CLUSTERDOWN": Code.STORE_CLUSTER_DOWN,
}
"""Refusals that have a code of their own for `doctor`."""

_CODE: Final = re.compile(rf"\b({'|'.join(_PASSING)})\b")
_COMMAND: Final = re.compile(r"permissions? to run the '([^']+)' command")
_REFUSED: Final = re.compile(r"NOPERM|permissions|can't run this command")


class guarded:  # noqa: N801  # `with guarded(…)`, as contextlib's
    """Give what happens inside `timeout`, and translate what goes wrong.

    Raises:
        StoreUnavailableError: No answer in time, no connection, or a refusal that passes.
        StoreConfigurationError: A refusal that does not pass by waiting.
    """

    __slots__ = ("_cancellations", "_limit", "_operation", "_seconds", "_task")

    def __init__(self, operation: str, timeout: timedelta) -> None:
        self._operation = operation
        self._seconds = timeout.total_seconds()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "the store needs an asyncio task"
        self._task = task
        self._cancellations = task.cancelling()
        self._limit = Deadline(asyncio.get_running_loop().time() + self._seconds)
        self._limit.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._limit.__exit__(kind, error, trace)
        except TimeoutError:
            raise self._late(error) from error
        if error is not None:
            self._translate(error)
        elif self._task.cancelling() > self._cancellations:
            # The driver waits by asyncio.wait_for, which swallows some cancellations before Python 3.12.
            raise asyncio.CancelledError

    def _late(self, error: BaseException | None) -> StoreUnavailableError:
        failure = _connection_failure(error)
        told = f"no connection to Redis: {failure}; tried" if failure else "no answer from Redis"
        duration = "for" if failure else "within"
        return StoreUnavailableError(self._operation, f"{told} {duration} {self._seconds:g} s")

    def _translate(self, error: BaseException) -> None:
        if isinstance(error, DataError):
            return  # an argument that the driver cannot send is a bug of the caller, not the store's state
        if isinstance(error, TimeoutError):
            raise self._late(error) from error
        if isinstance(error, RedisError):
            raise translated(self._operation, error) from error
        if isinstance(error, OSError):
            raise StoreUnavailableError(
                self._operation, f"no connection to Redis: {_connection_failure(error)}"
            ) from error


def _connection_failure(error: BaseException | None) -> str:
    """Why the driver could not connect, also if the deadline has ended a pause between its attempts."""
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__context__
    failure = next((each for each in chain if isinstance(each, RedisConnectionError | ConnectionError)), None)
    if failure is None:
        return ""
    is_refused = any(isinstance(each, ConnectionRefusedError) for each in chain)
    return f"connection refused ({failure})" if is_refused else str(failure)


def translated(operation: str, error: RedisError) -> StoreError:
    """Our error for one of the driver's."""
    if isinstance(error, TooFewReplicasError):
        return StoreUnavailableError(operation, str(error), Code.STORE_TOO_FEW_REPLICAS)
    if isinstance(error, PrimaryUnknownError):
        return StoreUnavailableError(operation, str(error), Code.STORE_PRIMARY_UNKNOWN)
    told = _told_by_server(error)
    if isinstance(told, MovedError):
        return StoreConfigurationError(operation, 'this server is part of a Redis Cluster: set kind = "redis-cluster"')
    if isinstance(told, AuthenticationError | AuthorizationError | AuthenticationWrongNumberOfArgsError):
        said = "Redis does not accept this user and password"
        return StoreConfigurationError(operation, said, Code.STORE_CREDENTIALS)
    if isinstance(told, BusyLoadingError):
        return StoreUnavailableError(operation, _PASSING["LOADING"])
    if not isinstance(told, ResponseError):
        return StoreUnavailableError(operation, f"no connection to Redis: {_connection_failure(error) or error}")
    if "cluster support disabled" in str(told):
        return StoreConfigurationError(operation, 'this server is part of no Redis Cluster: set kind = "redis"')
    # The driver cuts the code off the text where it has a class for it.
    text = f"{_CODES.get(type(told).__name__, '')} {told}"
    if isinstance(told, NoPermissionError) or _REFUSED.search(text):
        return StoreConfigurationError(operation, _permission(text), Code.STORE_PERMISSION)
    passing = _CODE.search(text)
    if passing is not None:
        name = passing.group(1)
        return StoreUnavailableError(operation, _PASSING[name], _FOUND.get(name, Code.STORE_UNAVAILABLE))
    return StoreConfigurationError(operation, f"Redis answers: {_harmless(str(told))}")


def _told_by_server(error: BaseException) -> BaseException:
    """What the server refused with, where the driver wraps it: it does so while it connects."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ResponseError | AuthenticationError | AuthorizationError):
            return cause
        cause = cause.__cause__
    return error


_CODES: Final = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "NoScriptError": "NOSCRIPT",
    "TryAgainError": "TRYAGAIN",
}
"""By name: older drivers lack some of these classes."""


def _permission(text: str) -> str:
    command = _COMMAND.search(text)
    if command is not None:
        name = command.group(1).lower()
        # Redis 6.2 names the command alone; we need only one of its kind.
        rule = {"script": "script|load", "sentinel": "sentinel|masters"}.get(name, name)
        where = " at every Sentinel" if rule.startswith("sentinel") else ""
        return f"this Redis user may not run {name.upper()}: give it +{rule}{where}"
    if "access" in text:
        return "this Redis user may not touch these keys: give it ~prefix* for the prefix of [idempotency] key_prefix"
    # Redis 6.2 does not say which command a script was refused.
    return (
        "this Redis user may not run a command inside a script: give it +get +set +setrange +time +pttl +pexpire "
        "and +evalsha +script|load"
    )


def _harmless(text: str) -> str:
    # "unknown command 'X', with args beginning with: ..." would show keys and tokens.
    return text.partition(", with args")[0][:300]
