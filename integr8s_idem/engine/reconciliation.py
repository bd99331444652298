"""Ask a reconcile function before a run that may repeat an effect."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from integr8s_idem.engine.active_runs import check_start, run_of
from integr8s_idem.engine.leases import LateStartError
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, OutcomeUnknownError
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from integr8s_idem.telemetry import Observer, Phase, Signal, conventions

logger = logging.getLogger(__name__)

T = TypeVar("T")

Question: TypeAlias = Callable[[Attempt], Awaitable[Answer]]
"""Calls a reconcile function for an attempt."""

_NAMES: Final = {Done: "done", NotDone: "not_done", Unknown: "unknown"}
"""Names of answers in metrics, spans and logs."""


def may_follow_an_effect(attempt: Attempt) -> bool:
    """Whether an earlier run of the work may have had its effect, as far as `attempt` shows.

    A higher number may follow a crash, a timeout or an error after the effect: the record does not say which.  A replay
    follows a run that failed.  Without a reservation, which has a fence, nobody knows about earlier runs.
    """
    return attempt.number > 1 or attempt.generation > 0 or attempt.fence == 0


async def ask(
    question: Question, attempt: Attempt, observer: Observer, event_type: str = "", name: str = ""
) -> Done | None:
    """Return `Done` if an earlier attempt has had its effect, or `None` if the work is to be run.

    Args:
        question: Calls the reconcile function.
        name: Name of the handler or function.

    Raises:
        OutcomeUnknownError: The answer is `Unknown`.
        ApplicationError: The answer is none of the three.
        Exception: Any error of the reconcile function.
    """
    try:
        with observer.phase(Phase.RECONCILE, event_type, attempt=attempt.number, handler=name) as span:
            answer = await question(attempt)
            said = _name_of(answer, name)
            span.annotate(conventions.ANSWER, said)
    except LateStartError:
        raise  # it was not called
    except Exception:
        observer.count(Signal.RECONCILED, event_type, reason="failed")
        raise
    observer.count(Signal.RECONCILED, event_type, reason=said)
    logger.info("%s: its reconcile function answered %s, before attempt %d", attempt.label, said, attempt.number)
    if isinstance(answer, Unknown):
        raise OutcomeUnknownError(answer.retry_after, answer.reason)
    return answer if isinstance(answer, Done) else None


def reconciled(
    function: Callable[[Attempt], Awaitable[T]],
    question: Question,
    observer: Observer,
    name: str,
) -> Callable[[Attempt], Awaitable[T]]:
    """Return `function`, preceded by `question` if an earlier run may have had its effect."""

    async def reconcile_or_run(attempt: Attempt) -> Any:
        if may_follow_an_effect(attempt):
            done = await ask(question, attempt, observer, name=name)
            if done is not None:
                return done.result
            check_start(run_of(attempt))
        return await function(attempt)

    return reconcile_or_run


def awaitable_answer(reconcile: Callable[[], object], returned: Awaitable[Answer]) -> Awaitable[Answer]:
    """Return what `reconcile` has returned, if it can be awaited.

    Raises:
        ApplicationError: It cannot.
    """
    if inspect.isawaitable(returned):
        return returned
    raise ApplicationError(
        f"the reconcile function {getattr(reconcile, '__qualname__', repr(reconcile))} is not an async function: it "
        f"returned {type(returned).__name__}, which cannot be awaited. Write it as async def"
    )


def _name_of(answer: object, name: str) -> str:
    for kind, said in _NAMES.items():
        if isinstance(answer, kind):
            return said
    if inspect.iscoroutine(answer):
        answer.close()  # avoids Python's warning that it was never awaited
    raise ApplicationError(
        f"the reconcile function of {name} returned {type(answer).__name__}: return Done(result), NotDone() or "
        "Unknown(retry_after=…)"
    )
