"""Send requests to DynamoDB, with retries and a timeout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from integr8s_idem._util.deadlines import CallDeadline
from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.stores.dynamodb.errors import (
    CONDITION,
    ForeignResponseError,
    code_of,
    is_temporary,
    translate_driver_error,
    translate_refusal,
)

_MAX_RECONNECTIONS: Final = 2
"""Maximum number of retries after a lost connection; every request of the store is safe to retry."""
_REQUEST_ID: Final = "x-amzn-requestid"
_FIRST_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 1.0

Action = Callable[..., Awaitable[dict[str, Any]]]
"""A method of the driver's client."""


class ConditionFailedError(Exception):
    """The condition of a write failed; `item` is the existing item, or empty."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        super().__init__(item)
        self.item = item


class Backoff:
    """Exponential backoff with full jitter between the attempts of one call."""

    def __init__(self) -> None:
        self.last: StoreUnavailableError | None = None
        """Why the last attempt failed."""
        self._pause = _FIRST_PAUSE
        self._lost = 0

    async def after(self, error: StoreUnavailableError, *, lost: bool = False) -> None:
        """Wait before the next attempt, or raise `error` if connections were lost too often."""
        self.last = error
        self._lost += lost
        if self._lost > _MAX_RECONNECTIONS:
            raise error
        await asyncio.sleep(random.uniform(0, self._pause))  # noqa: S311  # not for secrets
        self._pause = min(2 * self._pause, _MAX_PAUSE)


@asynccontextmanager
async def retries(operation: str, timeout: timedelta) -> AsyncIterator[Backoff]:
    """Apply `timeout` to the attempts in the block.

    Raises:
        StoreUnavailableError: The timeout expired; the error is that of the last attempt.
    """
    loop, backoff, seconds = asyncio.get_running_loop(), Backoff(), timeout.total_seconds()
    try:
        with pace_of(loop).call_of_a_store(), CallDeadline(loop.time() + seconds):
            yield backoff
    except TimeoutError as error:
        late = StoreUnavailableError(operation, f"no answer from DynamoDB within {seconds:g} s")
        raise backoff.last or late from error


class Calls:
    """Sends requests for one table, each within `timeout`, including retries."""

    def __init__(self, table: str, timeout: timedelta, clock: ServerClock) -> None:
        self.table = table
        self.timeout = timeout
        self._clock = clock

    async def send(self, operation: str, action: Action, *, accepts: str = "", **arguments: Any) -> dict[str, Any]:
        """Return the response to `action`, with retries after throttling, service errors and lost connections.

        An error with the code `accepts` returns an empty response.

        Raises:
            ConditionFailedError: The condition of a write failed.
            StoreUnavailableError: A timeout, a failed connection, or another temporary error.
            StoreConfigurationError: A permanent error.
        """
        async with retries(operation, self.timeout) as backoff:
            while True:
                try:
                    return await self._send_once(action, arguments)
                except ClientError as error:
                    if code_of(error) == CONDITION:
                        raise ConditionFailedError(error.response.get("Item", {})) from error
                    if accepts and code_of(error) == accepts:
                        return {}
                    translated = translate_refusal(operation, error, self.table)
                    if not isinstance(translated, StoreUnavailableError):
                        raise translated from error
                    await backoff.after(translated, lost=not is_temporary(error))
                except (BotoCoreError, ResponseParserError, ForeignResponseError) as error:
                    translated = translate_driver_error(operation, error)
                    if not isinstance(translated, StoreUnavailableError):
                        raise translated from error
                    await backoff.after(translated, lost=True)

    async def _send_once(self, action: Action, arguments: Mapping[str, Any]) -> dict[str, Any]:
        sent = self._clock.tick()
        try:
            response = await action(**arguments)
        except ClientError as error:
            self._observe_date(error.response, sent)
            raise
        self._observe_date(response, sent)
        return response

    def _observe_date(self, response: Mapping[str, Any], sent: int) -> None:
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if _REQUEST_ID not in headers:
            raise ForeignResponseError
        self._clock.observe(headers.get("date"), sent)
