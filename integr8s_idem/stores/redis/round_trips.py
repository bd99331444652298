"""Commands in one round trip to one server; the replicas that must have what they wrote; many servers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from hiredis import pack_command
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from integr8s_idem.stores.redis.errors import TooFewReplicasError
from integr8s_idem.stores.redis.scripts import LOADS, Command, Script, command_of

Asking = Command | Callable[[], Command]
"""A command, or what makes one: the next is made while the server is at the one before."""

Address = tuple[str, int]
"""Host and port of a server."""

_CANCEL_SECONDS: Final = 0.1
"""Between two cancellations of a round trip that goes on after one."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaWait:
    """How many replicas must have confirmed a write before it counts, and how long they may take."""

    replicas: int
    timeout: timedelta

    @property
    def command(self) -> Command:
        # WAIT takes 0 for ever.
        return ("WAIT", self.replicas, max(self.timeout // timedelta(milliseconds=1), 1))

    def check(self, confirmed: object) -> None:
        """Raises TooFewReplicasError or what the server refused with."""
        if isinstance(confirmed, ResponseError):
            raise confirmed
        if not isinstance(confirmed, int) or confirmed < self.replicas:
            raise TooFewReplicasError(self.replicas, confirmed, self.timeout)


async def send(client: Redis, commands: Sequence[Asking], wait: ReplicaWait | None = None) -> list[Any]:
    """The answer of each command, an error for one that the server refused.

    All go by one connection, and WAIT behind them: it speaks of what its own connection wrote.

    Raises:
        TooFewReplicasError: Something was executed, and fewer replicas than asked for confirmed it.
        RedisError: No answer.
    """
    answers = await _exchange(client.connection_pool, commands if wait is None else [*commands, wait.command])
    if wait is not None:
        confirmed = answers.pop()
        if not all(isinstance(answer, ResponseError) for answer in answers):
            wait.check(confirmed)
    return answers


async def _exchange(pool: Any, commands: Sequence[Asking]) -> list[Any]:
    """As the driver's own `execute_command` and pipelines, which take twice the time."""
    connection = await pool.get_connection()
    try:
        answers: list[Any] = await connection.retry.call_with_retry(
            lambda: _asked(connection, commands), lambda _: connection.disconnect()
        )
        return answers
    except BaseException:
        # What was asked and not read yet would be the answer to whoever has the connection next.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await pool.release(connection)


async def _asked(connection: Any, commands: Sequence[Asking]) -> list[Any]:
    for command in commands:
        if callable(command):
            await connection.send_packed_command(pack_command(command()))  # type: ignore[arg-type]  # of any length
            await asyncio.sleep(0)  # uvloop writes when it has its turn
        else:
            await connection.send_packed_command(pack_command(command))  # type: ignore[arg-type]  # of any length
    return [await _answer(connection) for _ in commands]


async def _answer(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def run(
    client: Redis, script: Script, keys: Sequence[str], args: Sequence[bytes | int], wait: ReplicaWait | None
) -> Any:
    """The answer of a script on one server, which is given the script if it does not know it."""
    return (await run_all(client, script, [command_of(script, keys, args)], wait))[0]


async def run_all(client: Redis, script: Script, commands: Sequence[Asking], wait: ReplicaWait | None) -> list[Any]:
    """The answers of several runs of a script, in one round trip unless the server does not know it."""
    answers: dict[int, Any] = {}
    asked: Sequence[int] = range(len(commands))
    for load in range(LOADS + 1):
        told = await send(client, [commands[place] for place in asked], wait)
        answers.update(zip(asked, told, strict=True))
        asked = [place for place in asked if isinstance(answers[place], NoScriptError)]
        if not asked or load == LOADS:
            break
        # It may be flushed again between loading and calling; nothing was executed.
        await client.script_load(script.text)
    for answer in answers.values():
        if isinstance(answer, ResponseError):
            raise answer
    return [answers[place] for place in range(len(commands))]


async def all_of(waiting: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, once all have ended; nothing of them goes on when this is cancelled.

    Raises:
        Exception: That of the first that failed.
    """
    if len(waiting) == 1:
        return [await waiting[0]]
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        await asyncio.wait(tasks)
    finally:
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                # More than once: the driver waits by asyncio.wait_for, which swallows some before Python 3.12.
                task.cancel()
            await asyncio.wait(pending, timeout=_CANCEL_SECONDS)
        # Looked at even where the cancellation is all that is told: an error that nobody has seen is logged.
        failed = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if failed:
        raise failed[0]
    return [task.result() for task in tasks]
