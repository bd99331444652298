"""Translation of Redis errors, in every form in which the driver raises them."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from redis import exceptions as driver
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.stores.redis.errors import translated

INSIDE = "Error running script (call to f_0123): @user_script:7: @user_script: 7: -"


@pytest.mark.scenario(50)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (driver.ConnectionError("Connection refused"), "Connection refused"),
        (driver.TimeoutError("Timeout reading"), "Timeout reading"),
        (driver.MaxConnectionsError("Too many connections"), "Too many"),
        (driver.BusyLoadingError("Redis is loading"), "loading"),
        (driver.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "out of memory"),
        (driver.ResponseError(INSIDE + "OOM command not allowed when used memory > 'maxmemory'."), "out of memory"),
        (driver.ReadOnlyError("You can't write against a read only replica."), "read-only"),
        (driver.ResponseError(INSIDE + "READONLY You can't write against a read only replica."), "read-only"),
        (driver.ResponseError("MISCONF Redis is configured to save RDB snapshots, but"), "disk"),
        (driver.ResponseError("NOREPLICAS Not enough good replicas to write."), "fewer replicas"),
        (driver.MasterDownError("Link with MASTER is down"), "lost its primary"),
        (driver.ClusterDownError("The cluster is down"), "Cluster is down"),
        (driver.TryAgainError("Multiple keys request during rehashing"), "moving"),
        (driver.NoScriptError("No matching script. Please use EVAL."), "keeps losing the scripts"),
        (driver.ResponseError("BUSY Redis is busy running a script."), "busy"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_temporary_error_of_redis_is_an_unavailable_store(error: driver.RedisError, reason: str) -> None:
    error_of_store = translated("reserve", error)

    assert type(error_of_store) is StoreUnavailableError
    assert reason in error_of_store.reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (driver.AuthenticationError("invalid username-password pair or user is disabled."), "user and password"),
        (driver.AuthenticationError("Authentication required."), "user and password"),
        (driver.AuthenticationWrongNumberOfArgsError("wrong number of arguments"), "user and password"),
        (driver.NoPermissionError("User a has no permissions to run the 'evalsha' command"), "grant it +evalsha"),
        (driver.NoPermissionError("this user has no permissions to run the 'scan' command or"), "grant it +scan"),
        (driver.NoPermissionError("No permissions to access a key"), "key_prefix"),
        (driver.ResponseError(INSIDE + "NOPERM The user executing the script can't run this command"), "+setrange"),
        (driver.ResponseError("ACL failure in script: User a has no permissions to run the 'set' command"), "+set"),
        (driver.ResponseError("DB index is out of range"), "DB index is out of range"),
        (driver.ClusterCrossSlotError("Keys in request don't hash to the same slot"), "same slot"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_permanent_error_of_redis_is_a_configuration_error(error: driver.RedisError, reason: str) -> None:
    error_of_store = translated("reserve", error)

    assert type(error_of_store) is StoreConfigurationError
    assert reason in error_of_store.reason


@pytest.mark.scenario(104)
def test_an_error_does_not_show_arguments_that_the_server_repeats() -> None:
    error = driver.ResponseError("unknown command 'EVALSHA', with args beginning with: 'secret-key' 'token'")

    error_of_store: StoreError = translated("reserve", error)

    assert "EVALSHA" in str(error_of_store)
    assert "secret-key" not in str(error_of_store)


async def test_a_refused_connection_of_a_retrying_client_is_reported_as_refused() -> None:
    """The pauses of the driver between its attempts are longer than the timeout of a call."""
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        port = server_socket.getsockname()[1]
    client = Redis(port=port, retry=Retry(ConstantBackoff(60), 3))
    repository = RedisIdempotencyRepository(client, timeout=timedelta(seconds=2))

    with pytest.raises(StoreUnavailableError) as raised:
        await repository.ping()

    await client.aclose()
    assert f"connection refused (Error 111 connecting to localhost:{port}" in str(raised.value)
    assert "no answer" not in str(raised.value)
