"""Send commands to a server in one round trip, wait for replicas, and call several servers in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import NoScriptError, ResponseError

from integr8s_idem.stores.redis.direct_exchange import is_lost
from integr8s_idem.stores.redis.errors import TooFewReplicasError
from integr8s_idem.stores.redis.pools import QuickPool, ReadyConnection
from integr8s_idem.stores.redis.scripts import LOADS, Command, Script, pack

CommandSource = Command | Callable[[], Command]
"""A command, or a function that creates one while the server executes the previous command."""

Address = tuple[str, int]
"""Host and port of a server."""

_CANCEL_SECONDS: Final = 0.1
"""Pause before a round trip that ignored a cancellation is cancelled again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaWait:
    """The number of replicas that must confirm a write, and the limit for their confirmation."""

    replicas: int
    timeout: timedelta

    @property
    def command(self) -> Command:
        # For WAIT, 0 means no limit.
        return ("WAIT", self.replicas, max(self.timeout // timedelta(milliseconds=1), 1))

    def check(self, confirmed: object) -> None:
        """Raise `TooFewReplicasError` or the refusal of the server unless enough replicas confirmed."""
        if isinstance(confirmed, ResponseError):
            raise confirmed
        if not isinstance(confirmed, int) or confirmed < self.replicas:
            raise TooFewReplicasError(self.replicas, confirmed, self.timeout)


async def send(client: Redis, commands: Sequence[CommandSource], wait: ReplicaWait | None = None) -> list[Any]:
    """Send commands and return the answer of each, an error for one that the server refused.

    All commands use one connection, followed by WAIT, which covers the writes of its own connection.

    Raises:
        TooFewReplicasError: A command was executed, and too few replicas confirmed it.
        RedisError: No answer.
    """
    answers = await exchange(client.connection_pool, commands if wait is None else [*commands, wait.command])
    if wait is not None:
        confirmed = answers.pop()
        if not all(isinstance(answer, ResponseError) for answer in answers):
            wait.check(confirmed)
    return answers


async def exchange(pool: Any, commands: Sequence[CommandSource]) -> list[Any]:
    """Send commands over a connection of the pool; `execute_command` and pipelines of the driver take twice as long."""
    quick = pool if isinstance(pool, QuickPool) else None
    loop = asyncio.get_running_loop()
    ready = quick.take_ready(loop) if quick is not None else None
    if ready is None:
        ready = ReadyConnection(await pool.get_connection(), loop)
    try:
        try:
            return await _send_all(ready, commands)
        except Exception as error:  # noqa: BLE001  # raised again unless the driver retries it
            return await _retried(ready, commands, error)
    except BaseException:
        # The next user of the connection would read the answers that are still unread.
        await ready.detached().disconnect(nowait=True)
        raise
    finally:
        if quick is None or not quick.keep_ready(ready):
            await pool.release(ready.detached())


async def _retried(ready: ReadyConnection, commands: Sequence[CommandSource], failure: Exception) -> list[Any]:
    """Send commands again as often as the driver retries, after a first attempt that ended with `failure`."""
    failures = [failure]
    connection = ready.detached()

    async def attempt() -> list[Any]:
        if failures:
            raise failures.pop()
        return await _send_all(ready, commands)

    answers: list[Any] = await connection.retry.call_with_retry(attempt, lambda _: ready.detached().disconnect())
    return answers


def _send_all(ready: ReadyConnection, commands: Sequence[CommandSource]) -> Awaitable[list[Any]]:
    direct = ready.exchange
    if direct is None or not direct.is_usable:
        direct = ready.attached()
    packed = [pack(command) for command in commands if not callable(command)]
    if direct is None or len(packed) < len(commands):  # some are created while others are executed
        return _send_by_driver(ready.detached(), commands)
    return direct.request(b"".join(packed), len(packed))


async def _send_by_driver(connection: Any, commands: Sequence[CommandSource]) -> list[Any]:
    for command in commands:
        if is_lost(connection):
            # From Python 3.12 on, asyncio's transports raise a TypeError or AttributeError for the driver's call.
            raise LostConnectionError("the server has closed the connection")
        if callable(command):
            await connection.send_packed_command(pack(command()))
            await asyncio.sleep(0)  # lets uvloop write
        else:
            await connection.send_packed_command(pack(command))
    return [await _answer(connection) for _ in commands]


async def _answer(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def run_all(
    client: Redis, script: Script, commands: Sequence[CommandSource], wait: ReplicaWait | None
) -> list[Any]:
    """Run a script several times, in one round trip unless it must be loaded; return the answers."""
    answers: dict[int, Any] = {}
    pending: Sequence[int] = range(len(commands))
    for load in range(LOADS + 1):
        received = await send(client, [commands[index] for index in pending], wait)
        answers.update(zip(pending, received, strict=True))
        pending = [index for index in pending if isinstance(answers[index], NoScriptError)]
        if not pending or load == LOADS:
            break
        # Nothing was executed, so retrying is safe; the script may be flushed again before the next call.
        await client.script_load(script.text)
    for answer in answers.values():
        if isinstance(answer, ResponseError):
            raise answer
    return [answers[index] for index in range(len(commands))]


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines in parallel and return their results; on cancellation, cancel them and wait for their end.

    Raises:
        Exception: The first error, after all of them have ended.
    """
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks)
    finally:
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                # Repeated, since before Python 3.12 asyncio.wait_for in the driver swallows some cancellations.
                task.cancel()
            await asyncio.wait(pending, timeout=_CANCEL_SECONDS)
        # Retrieve errors even after a cancellation: asyncio logs errors that are never retrieved.
        failed = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if failed:
        raise failed[0]
    return [task.result() for task in tasks]
