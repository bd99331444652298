"""Handler dependencies: validated with the container's graph and injected from a REQUEST scope per call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, get_type_hints

from dishka import AsyncContainer, FromComponent
from dishka.integrations.base import default_parse_dependency

from integr8s_idem._util.context_vars import CURRENT
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler_calls import (
    Batch,
    BatchCall,
    HandlerCall,
    HandlerFunction,
    RegisteredHandler,
    returned_by,
)
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.integrations.request_scope import scope_of_a_call
from integr8s_idem.integrations.transactions import Transactions

DEPENDENCIES_OF = "dependencies of "
"""Prefix of the names of handlers in the container's graph."""


def name_of_dependencies(function: HandlerFunction) -> str:
    """Return the name of a handler in the container's graph."""
    return f"{DEPENDENCIES_OF}{_definition(function).__qualname__}"


def _definition(function: HandlerFunction) -> Any:
    """Return what has the name and the annotations of `function`, which may be a partial or a callable object."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


class Dependencies:
    """The dependencies of a handler as one node of the container's graph, resolved by one call."""

    def __init__(self, function: HandlerFunction, parameters: dict[str, Any]) -> None:
        definition = _definition(function)
        self.key = type(name_of_dependencies(function), (dict,), {"__module__": definition.__module__})

        def make(**found: Any) -> Any:
            return self.key(found)

        make.__name__ = make.__qualname__ = definition.__qualname__
        make.__module__ = definition.__module__
        make.__annotations__ = {**parameters, "return": self.key}
        make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
                for name, hint in parameters.items()
            ]
        )
        self.make = make


def dependencies_of(function: HandlerFunction) -> Dependencies:
    """Read the `FromDishka[...]` parameters of a handler.

    Raises:
        ApplicationError: The handler has other parameters, or annotations that cannot be resolved.
    """
    hints = _hints_of(function)
    parameters: dict[str, Any] = {}
    plain: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        key = default_parse_dependency(parameter, hints.get(name, Any))
        if key is None:
            plain.append(name)
        else:
            hint = key.type_hint
            parameters[name] = Annotated[hint, FromComponent(key.component)] if key.component else hint
    if len(plain) != 1:
        raise ApplicationError(
            f"handler {_definition(function).__qualname__} must take its event and otherwise only FromDishka[...] "
            f"parameters; these are neither: {', '.join(plain[1:]) or '(there is no parameter for the event)'}"
        )
    return Dependencies(function, parameters)


def _hints_of(function: HandlerFunction) -> dict[str, Any]:
    definition = _definition(function)
    try:
        return get_type_hints(definition, include_extras=True)
    except NameError as error:
        raise ApplicationError(
            f'handler {definition.__qualname__}: its annotations use "{error.name}", which module '
            f"{definition.__module__} does not define at run time; import it there, not only under TYPE_CHECKING"
        ) from None


def context_of(call: HandlerCall | BatchCall) -> dict[Any, Any]:
    """Return the context for the REQUEST scope of a call."""
    if isinstance(call, BatchCall):
        return {Batch: call.batch}
    return {BaseEvent: call.event, Attempt: call.attempt, Outgoing: call.outgoing}


def invoker(container: AsyncContainer, dependencies: Mapping[HandlerFunction, Dependencies]) -> Invoke:
    """Return a function that calls handlers in a REQUEST scope of `container`."""

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        async with scope_of_a_call(container(context_of(call))) as request:
            return await _call(request, dependencies, handler, call)

    return invoke


def transactional_invoker(
    container: AsyncContainer, dependencies: Mapping[HandlerFunction, Dependencies], transactions: Transactions
) -> Invoke:
    """Return a function that calls handlers in a REQUEST scope which commits their writes and the outcome together."""

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, HandlerCall), (
            "batch handlers with a transaction are rejected when the dispatcher is made"
        )
        async with transactions.scope(container(context_of(call)), call) as scope:
            result = await _call(scope.request, dependencies, handler, call)
            await scope.write_outcome(result)
        return result

    return invoke


async def _call(
    request: AsyncContainer,
    dependencies: Mapping[HandlerFunction, Dependencies],
    handler: RegisteredHandler,
    call: HandlerCall | BatchCall,
) -> Any:
    token = CURRENT.set(request)
    try:
        found: dict[str, Any] = await request.get(dependencies[handler.function].key)
        await call.check_start()
        return returned_by(handler, await handler.function(call.argument, **found))
    finally:
        CURRENT.reset(token)
