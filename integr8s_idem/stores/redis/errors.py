"""Translation of errors of the driver and the server into errors of this package."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import Final, Self

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

from integr8s_idem._util.deadlines import CallDeadline
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import ApplicationError, StoreConfigurationError, StoreError, StoreUnavailableError

_TEMPORARY: Final = {
    "OOM": "Redis is out of memory (maxmemory) and refuses writes",
    "READONLY": "this Redis is a read-only replica",
    "MISCONF": "Redis cannot save to its disk and refuses writes",
    "NOREPLICAS": "Redis has fewer replicas than min-replicas-to-write and refuses writes",
    "MASTERDOWN": "this replica has lost its primary",
    "CLUSTERDOWN": "the Redis Cluster is down, or some of its slots have no owner: check CLUSTER INFO",
    "TRYAGAIN": "the Redis Cluster is moving these keys",
    "LOADING": "Redis is loading its data",
    "BUSY": "Redis is busy with a long-running script",
    "NOSCRIPT": "Redis keeps losing the scripts that are loaded (SCRIPT FLUSH)",
}
"""Refusals that are temporary, or that an operator resolves on the server."""


class TooFewReplicasError(RedisError):
    """Too few replicas confirmed a write."""

    def __init__(self, wanted: int, confirmed: object, timeout: timedelta) -> None:
        super().__init__(
            f"{confirmed} of {wanted} required replicas confirmed the write within {timeout.total_seconds():g} s: "
            "the primary has it, and it may be repeated; restore the replicas, or lower wait_replicas in [store]"
        )


class PrimaryUnknownError(MasterNotFoundError):
    """No Sentinel knows a primary of this name."""


_CODE_OF_REFUSAL: Final = {
    "OOM": Code.STORE_MEMORY,
    "READONLY": Code.STORE_REPLICA,
    "MASTERDOWN": Code.STORE_REPLICA,
    "NOREPLICAS": Code.STORE_TOO_FEW_REPLICAS,
    "CLUSTERDOWN": Code.STORE_CLUSTER_DOWN,
}
"""Refusals with a specific diagnostic code."""

_TEMPORARY_CODE: Final = re.compile(rf"\b({'|'.join(_TEMPORARY)})\b")
_REFUSED_COMMAND: Final = re.compile(r"permissions? to run the '([^']+)' command")
_OTHER_LOOP: Final = re.compile(r"[Ee]vent loop is closed|different (event )?loop|loop other than the current one")
"""Errors of asyncio for a connection that was opened in another event loop; the last one is that of its debug mode."""
_NO_PERMISSION: Final = re.compile(r"NOPERM|permissions|can't run this command")


class guarded(CallDeadline):  # noqa: N801  # used as `with guarded(…)`
    """Limit the block to `timeout`, and translate errors of the driver.

    Raises:
        StoreUnavailableError: No answer in time, no connection, or a temporary refusal.
        StoreConfigurationError: A refusal that is permanent.
        ApplicationError: The connection was opened in another event loop.
    """

    __slots__ = ("_operation", "_seconds")

    def __init__(self, operation: str, timeout: timedelta) -> None:
        # As `CallDeadline.__init__`; a call would cost as much as the assignments.
        self.expired = False
        self._clock = None
        self._operation = operation
        self._seconds = timeout.total_seconds()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "the store needs an asyncio task"
        self.when = task.get_loop().time() + self._seconds
        self.enter(task)
        return self

    def ended(self, error: BaseException | None) -> None:
        try:
            super().ended(error)
        except TimeoutError:
            raise self._timed_out(error) from error
        if error is not None:
            self._translate(error)

    def _timed_out(self, error: BaseException | None) -> StoreUnavailableError:
        failure = _connection_failure(error)
        reason = f"no connection to Redis: {failure}; tried for" if failure else "no answer from Redis within"
        return StoreUnavailableError(self._operation, f"{reason} {self._seconds:g} s")

    def _translate(self, error: BaseException) -> None:
        if isinstance(error, DataError):
            return  # an argument that the driver cannot send is a bug in the caller, not a failure of the store
        if isinstance(error, TimeoutError):
            raise self._timed_out(error) from error
        if isinstance(error, RedisError):
            raise translated(self._operation, error) from error
        if isinstance(error, OSError):
            raise StoreUnavailableError(
                self._operation, f"no connection to Redis: {_connection_failure(error)}"
            ) from error
        if isinstance(error, RuntimeError) and _OTHER_LOOP.search(str(error)):
            raise ApplicationError(
                "the connections of this store belong to another event loop: create the client, the store and the "
                "manager in the event loop in which they are used, and close them there"
            ) from error


def _connection_failure(error: BaseException | None) -> str:
    """Return why the driver could not connect, even if the deadline passed between its attempts."""
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
    """Return the error of this package for one of the driver."""
    if isinstance(error, TooFewReplicasError):
        return StoreUnavailableError(operation, str(error), Code.STORE_TOO_FEW_REPLICAS)
    if isinstance(error, PrimaryUnknownError):
        return StoreUnavailableError(operation, str(error), Code.STORE_PRIMARY_UNKNOWN)
    refusal = _server_error(error)
    if isinstance(refusal, MovedError):
        return StoreConfigurationError(operation, 'this server is part of a Redis Cluster: set kind = "redis-cluster"')
    if isinstance(refusal, AuthenticationError | AuthorizationError | AuthenticationWrongNumberOfArgsError):
        reason = "Redis does not accept this user and password"
        return StoreConfigurationError(operation, reason, Code.STORE_CREDENTIALS)
    if isinstance(refusal, BusyLoadingError):
        return StoreUnavailableError(operation, _TEMPORARY["LOADING"])
    if not isinstance(refusal, ResponseError):
        return StoreUnavailableError(operation, f"no connection to Redis: {_connection_failure(error) or error}")
    if "cluster support disabled" in str(refusal):
        return StoreConfigurationError(operation, 'this server is not part of a Redis Cluster: set kind = "redis"')
    # The driver strips the error code from the text if it has a class for it.
    text = f"{_CODE_OF_CLASS.get(type(refusal).__name__, '')} {refusal}"
    if isinstance(refusal, NoPermissionError) or _NO_PERMISSION.search(text):
        return StoreConfigurationError(operation, _permission(text), Code.STORE_PERMISSION)
    temporary = _TEMPORARY_CODE.search(text)
    if temporary is not None:
        name = temporary.group(1)
        return StoreUnavailableError(operation, _TEMPORARY[name], _CODE_OF_REFUSAL.get(name, Code.STORE_UNAVAILABLE))
    return StoreConfigurationError(operation, f"Redis answers: {_redacted(str(refusal))}")


def _server_error(error: BaseException) -> BaseException:
    """Return the error of the server if the driver wraps one, as it does while connecting."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ResponseError | AuthenticationError | AuthorizationError):
            return cause
        cause = cause.__cause__
    return error


_CODE_OF_CLASS: Final = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "NoScriptError": "NOSCRIPT",
    "TryAgainError": "TRYAGAIN",
}
"""By class name, since older drivers lack some of these classes."""


def _permission(text: str) -> str:
    command = _REFUSED_COMMAND.search(text)
    if command is not None:
        name = command.group(1).lower()
        # Redis 6.2 reports no subcommand; the store needs only one.
        rule = {"script": "script|load", "sentinel": "sentinel|masters"}.get(name, name)
        where = " on every Sentinel" if rule.startswith("sentinel") else ""
        return f"this Redis user may not run {name.upper()}: grant it +{rule}{where}"
    if "access" in text:
        return "this Redis user may not access these keys: grant it ~prefix* for the prefix of [idempotency] key_prefix"
    # Redis 6.2 does not report which command of a script was refused.
    return (
        "this Redis user may not run a command inside a script: grant it +get +set +setrange +time +pttl +pexpire "
        "and +evalsha +script|load"
    )


def _redacted(text: str) -> str:
    # "unknown command 'X', with args beginning with: ..." would show keys and tokens.
    return text.partition(", with args")[0][:300]
