"""Answers to guarded requests: the response of the application, a stored response, or a problem."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple

from integr8s_idem._util.escaping import printable
from integr8s_idem.config import OnInProgress
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Discarded, Executed, HandlerFailed, Outcome
from integr8s_idem.errors import InProgressError, LeaseLostError, ResultNotStoredError, StoreError
from integr8s_idem.integrations.http_exchange import Exchange, NoOutcomeError
from integr8s_idem.integrations.http_problems import Problems
from integr8s_idem.integrations.http_responses import Response
from integr8s_idem.records import Completed, Pending
from integr8s_idem.telemetry.log_fields import logging_with

logger = logging.getLogger(__name__)

_REJECTION_RETRIES: Final = 3
_REJECTION_RETRY_SECONDS: Final = 0.005
"""Pause between retries; the record of a rejected request expires after a millisecond of the store's clock."""


class Answers(NamedTuple):
    """Answers the guarded requests of one application."""

    problems: Problems
    wait: timedelta | None
    """How long a retry waits for the first request; not at all if `None`."""

    async def answer(self, exchange: Exchange) -> None:
        """Run the application for a new key, and answer the request.

        Raises:
            Exception: Any error of the application.
        """
        manager, work = exchange.manager, exchange.work
        execute = partial(manager.executor.execute, work, exchange.run)
        policy = OnInProgress.RAISE if self.wait is None else OnInProgress.WAIT
        try:
            for _ in range(_REJECTION_RETRIES):
                outcome: Outcome[object] = await execute()
                if isinstance(outcome, Pending):
                    outcome = await manager.settled(
                        work, outcome, execute, on_in_progress=policy, wait_timeout=self.wait
                    )
                if isinstance(outcome, Executed) or not _was_rejected(outcome, manager):
                    break
                await asyncio.sleep(_REJECTION_RETRY_SECONDS)
        except InProgressError as error:
            await self.problems.in_progress(error).send(exchange.send)
        except ResultNotStoredError as error:
            # The work is done and the client gets its response, so there is no reason to retry.
            with logging_with(service=manager.scope, attempt=getattr(error, "attempt", 0)):
                logger.error("%s", error)
            await exchange.send_held_back()
        except (StoreError, LeaseLostError) as error:
            with logging_with(service=manager.scope, attempt=getattr(error, "attempt", 0)):
                logger.error("%s", error)
            if not exchange.has_started:
                await self.problems.unavailable(error).send(exchange.send)
        else:
            if isinstance(outcome, Executed):
                _warn_of_stream(exchange, outcome.attempt)
                await exchange.send_held_back()
            else:
                await self._end(exchange, outcome)

    async def _end(self, exchange: Exchange, outcome: Outcome[object]) -> None:
        """Answer a request that was not processed successfully now."""
        match outcome:
            case HandlerFailed(error=NoOutcomeError()):
                await exchange.send_held_back()
            case HandlerFailed():
                if exchange.status is not None and exchange.status >= 500:
                    await exchange.send_held_back()  # the application has answered, and then raised
                raise outcome.error
            case _:
                await self._problem_of(outcome, exchange.manager).send(exchange.send)

    def _problem_of(self, outcome: Outcome[object], manager: IdempotencyManager) -> Response:
        assert not isinstance(outcome, Executed | HandlerFailed | Discarded)
        return self.problems.in_progress() if _was_rejected(outcome, manager) else self.problems.for_outcome(outcome)


def _warn_of_stream(exchange: Exchange, attempt: int) -> None:
    if exchange.streams:
        with logging_with(service=exchange.manager.scope, attempt=attempt):
            logger.warning(
                "the response to %s %s was not stored, so a retry runs again: %s",
                exchange.scope["method"],
                printable(exchange.scope["path"]),
                printable(exchange.streams),
            )


def _was_rejected(outcome: Outcome[object], manager: IdempotencyManager) -> bool:
    """Whether another request with this key has just been rejected, so that its record is about to expire."""
    # If responses are stored, only such a record has neither a response nor the mark of a dropped one.
    is_bare = isinstance(outcome, Completed) and outcome.result is None and not outcome.result_dropped
    return is_bare and manager.config.enable_result_caching
