"""Check that the first parameter of a handler accepts every event for which the handler is registered."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent

_POSITIONAL: Final = {
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
}
_UNIONS: Final = {Union, types.UnionType}


def check_event_parameter(
    function: Callable[..., Any], events: Sequence[type[BaseEvent]], kind: str = "handler"
) -> None:
    """Check the first parameter of a handler of single events, or of its reconcile function.

    A missing annotation, or one that cannot be resolved yet, is accepted.

    Args:
        function: The handler or its reconcile function.
        events: The classes of events for which the handler is registered.
        kind: What the function is called in errors.

    Raises:
        ApplicationError: There is no such parameter, or its annotation excludes one of the events.
    """
    parameter = _first_parameter(function, kind)
    annotation = _annotation(function, parameter, events)
    for event in events:
        if not _accepts(annotation, event):
            wanted = " | ".join(each.__name__ for each in events)
            raise ApplicationError(
                f"{kind} {_described(function, parameter, annotation)}, but it is registered for {event.__name__}; the "
                f"first parameter takes the event: write {parameter.name}: {wanted}"
            )


def check_batch_parameter(function: Callable[..., Any], event: type[BaseEvent]) -> None:
    """Check that the first parameter of a batch handler accepts a list of events.

    Raises:
        ApplicationError: There is no such parameter, or its annotation excludes a list of these events.
    """
    parameter = _first_parameter(function)
    annotation = _annotation(function, parameter, [event])
    if not _accepts_list(annotation, event):
        raise ApplicationError(
            f"handler {_described(function, parameter, annotation)}, but it is registered for batches of "
            f"{event.__name__}; the first parameter takes the events: write {parameter.name}: list[{event.__name__}]"
        )


def _first_parameter(function: Callable[..., Any], kind: str = "handler") -> inspect.Parameter:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind not in _POSITIONAL:
        raise ApplicationError(
            f"{kind} {_name(function)} has no parameter for the event, which must be its first parameter"
        )
    return first


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter, events: Sequence[type[BaseEvent]]) -> Any:
    """Return the resolved annotation, or `Any` if it is missing or refers to a name that is not defined yet."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    inner = inspect.unwrap(getattr(function, "func", function))
    scope = getattr(inner, "__globals__", None) or getattr(type(inner).__call__, "__globals__", {})
    # An event class may be local to the function that creates the router.
    known = {event.__name__: event for event in events}
    described = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    try:
        return get_type_hints(described, scope, known, include_extras=True)[parameter.name]
    except (NameError, AttributeError):
        return Any


def _accepts(annotation: Any, event: type[BaseEvent]) -> bool:
    if isinstance(annotation, TypeVar):
        annotation = annotation.__bound__ or Any
    origin = get_origin(annotation)
    if origin in _UNIONS:
        return any(_accepts(each, event) for each in get_args(annotation))
    if origin is Annotated:
        return _accepts(get_args(annotation)[0], event)
    return _is_base(annotation if origin is None else origin, event)


def _accepts_list(annotation: Any, event: type[BaseEvent]) -> bool:
    origin = get_origin(annotation)
    if origin in _UNIONS:
        return any(_accepts_list(each, event) for each in get_args(annotation))
    if not _is_base(annotation if origin is None else origin, list):
        return False
    return all(_accepts(each, event) for each in get_args(annotation))


def _is_base(annotation: Any, kind: type) -> bool:
    if annotation is Any or getattr(annotation, "_is_protocol", False):
        return True  # type checkers verify protocols
    return isinstance(annotation, type) and issubclass(kind, annotation)


def _described(function: Callable[..., Any], parameter: inspect.Parameter, annotation: Any) -> str:
    if get_origin(annotation) is Annotated:  # usually FromDishka[…]
        annotation = get_args(annotation)[0]
    shown = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return f"{_name(function)} takes {parameter.name}: {shown}"


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]
