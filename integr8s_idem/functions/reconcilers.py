"""Reconcile functions of decorated functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from integr8s_idem.engine.results import refuse_call
from integr8s_idem.errors import ApplicationError
from integr8s_idem.functions.arguments import Arguments, function_of_arguments, missing_parameters
from integr8s_idem.functions.sync_bridge import is_async, named


def reconciler(
    reconcile: Callable[..., Any], signature: inspect.Signature, function: Callable[..., object]
) -> Callable[[Arguments], Any]:
    """Return a function that calls the reconcile function of `function` with the arguments of a call.

    Raises:
        ApplicationError: Only one of the two functions is async, or `reconcile` is not callable, or takes an argument
            that `function` does not have.
    """
    refuse_call(reconcile, "@idempotent(…, reconcile=find)")
    if is_async(reconcile) is not is_async(function):
        kind = "async def" if is_async(function) else "def"
        raise ApplicationError(
            f"the reconcile function {named(reconcile)} runs where {named(function)} runs: define it with {kind}, too"
        )
    _check_parameters(reconcile, signature, function)
    return function_of_arguments(reconcile, signature)


def _check_parameters(
    reconcile: Callable[..., Any], signature: inspect.Signature, function: Callable[..., object]
) -> None:
    """Check the parameters now: a call would only fail after a failure, when its answer matters."""
    if unknown := missing_parameters(reconcile, signature):
        raise ApplicationError(
            f"the reconcile function {named(reconcile)} takes {', '.join(unknown)}, but {named(function)} does not: it "
            f"receives the arguments that its parameters name, of {', '.join(signature.parameters)}"
        )
