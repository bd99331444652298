"""One request to DynamoDB, repeated where that helps, and never longer than its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.stores.dynamodb.errors import CONDITION, StrangeAnswerError, code_of, of_driver, of_service, passes

_RECONNECTIONS: Final = 2
"""Times a request is sent again after a lost connection; every call of the store can be repeated."""
_REQUEST_ID: Final = "x-amzn-requestid"
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 1.0

Action = Callable[..., Awaitable[dict[str, Any]]]
"""A method of the driver's client."""


class RefusedError(Exception):
    """The condition of a write did not hold; `item` is what is there, empty if nothing is."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        super().__init__(item)
        self.item = item


class Patience:
    """What stands between the tries of one call: pauses that grow, with full jitter, and an end to them."""

    def __init__(self) -> None:
        self.last: StoreUnavailableError | None = None
        """Why the last try came to nothing."""
        self._pause = _FIRST_PAUSE
        self._lost = 0

    async def after(self, error: StoreUnavailableError, *, lost: bool = False) -> None:
        """Wait before the next try.  Raises `error` where connections were lost too often."""
        self.last = error
        self._lost += lost
        if self._lost > _RECONNECTIONS:
            raise error
        await asyncio.sleep(random.uniform(0, self._pause))  # noqa: S311  # not for secrets
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


@asynccontextmanager
async def patient(operation: str, timeout: timedelta) -> AsyncIterator[Patience]:
    """Give what happens inside `timeout`.

    Raises:
        StoreUnavailableError: Time is over; it says why the last try failed.
    """
    loop, patience, seconds = asyncio.get_running_loop(), Patience(), timeout.total_seconds()
    try:
        with pace_of(loop).call_of_a_store(), Deadline(loop.time() + seconds):
            yield patience
    except TimeoutError as error:
        late = StoreUnavailableError(operation, f"no answer from DynamoDB within {seconds:g} s")
        raise patience.last or late from error


class Calls:
    """Requests about one table, each within `timeout`, pauses and repetitions included."""

    def __init__(self, table: str, timeout: timedelta, clock: ServerClock) -> None:
        self.table = table
        self.timeout = timeout
        self._clock = clock

    async def send(self, operation: str, action: Action, *, accepts: str = "", **arguments: Any) -> dict[str, Any]:
        """The answer to `action`, asked again after throttling, a fault of the service, or a lost connection.

        Empty for a refusal with the code `accepts`.

        Raises:
            RefusedError: The condition of a write does not hold.
            StoreUnavailableError: No answer in time, no connection, or a refusal that passes.
            StoreConfigurationError: A refusal that does not pass by waiting.
        """
        async with patient(operation, self.timeout) as patience:
            while True:
                try:
                    return await self._sent(action, arguments)
                except ClientError as error:
                    if code_of(error) == CONDITION:
                        raise RefusedError(error.response.get("Item", {})) from error
                    if accepts and code_of(error) == accepts:
                        return {}
                    ours = of_service(operation, error, self.table)
                    if not isinstance(ours, StoreUnavailableError):
                        raise ours from error
                    await patience.after(ours, lost=not passes(error))
                except (BotoCoreError, ResponseParserError, StrangeAnswerError) as error:
                    ours = of_driver(operation, error)
                    if not isinstance(ours, StoreUnavailableError):
                        raise ours from error
                    await patience.after(ours, lost=True)

    async def _sent(self, action: Action, arguments: Mapping[str, Any]) -> dict[str, Any]:
        sent = self._clock.tick()
        try:
            answer = await action(**arguments)
        except ClientError as error:
            self._hear(error.response, sent)
            raise
        self._hear(answer, sent)
        return answer

    def _hear(self, answer: Mapping[str, Any], sent: int) -> None:
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if _REQUEST_ID not in headers:
            raise StrangeAnswerError
        self._clock.heard(headers.get("date"), sent)
