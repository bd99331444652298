"""Every refusal of a Redis server has one meaning, in whatever form the driver tells it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from redis import exceptions as driver
from redis.asyncio import Redis

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
def test_a_refusal_that_passes_is_unavailable(error: driver.RedisError, reason: str) -> None:
    ours = translated("reserve", error)

    assert type(ours) is StoreUnavailableError
    assert reason in ours.reason


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
def test_a_refusal_that_stays_is_a_matter_of_settings(error: driver.RedisError, reason: str) -> None:
    ours = translated("reserve", error)

    assert type(ours) is StoreConfigurationError
    assert reason in ours.reason


@pytest.mark.scenario(104)
def test_arguments_that_a_server_repeats_are_not_shown() -> None:
    error = driver.ResponseError("unknown command 'EVALSHA', with args beginning with: 'secret-key' 'token'")

    ours: StoreError = translated("reserve", error)

    assert "EVALSHA" in str(ours)
    assert "secret-key" not in str(ours)


async def test_a_refused_connection_of_a_client_that_retries_by_itself_is_reported_as_refused() -> None:
    """The driver's own pauses between its attempts are longer than the limit of a call."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    client = Redis(port=port)
    repository = RedisIdempotencyRepository(client, timeout=timedelta(seconds=0.5))

    with pytest.raises(StoreUnavailableError) as refusal:
        await repository.ping()

    await client.aclose()
    assert f"connection refused (Error 111 connecting to localhost:{port}" in str(refusal.value)
    assert "no answer" not in str(refusal.value)
