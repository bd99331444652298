"""Create the containers of services, and explain their errors in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dishka import STRICT_VALIDATION, AsyncContainer, ValidationSettings, make_async_container
from dishka.exception_base import DishkaError
from dishka.exceptions import CycleDependenciesError, NoContextValueError, NoFactoryError

from integr8s_idem._util.escaping import shown
from integr8s_idem.config import Settings
from integr8s_idem.config.message_text import text_of
from integr8s_idem.errors import ApplicationError, IdempotencyError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.integrations.dishka import EventContextProvider, ServiceName, TelemetryProvider
from integr8s_idem.integrations.handler_injection import DEPENDENCIES_OF
from integr8s_idem.runtime.service import Service
from integr8s_idem.worker.publisher import EventPublisher

NOT_CREATED: Final = "cannot be created"
NO_DISPATCHER: Final = "does not provide a dispatcher"

_LONGEST_REASON: Final = 2_000
_SESSION: Final = "Add a provider of {} with scope REQUEST that commits after its yield"
_STORE: Final = "Add IdempotencyProvider()"
_KNOWN_PACKAGES: Final = {"integr8s_idem", "sqlalchemy"}
_REMEDIES: Final[Mapping[str, str]] = {
    "AsyncConnection": _SESSION.format("AsyncConnection"),
    "AsyncSession": _SESSION.format("AsyncSession"),
    "Attempt": "Add EventContextProvider()",
    "BaseEvent": "Add EventContextProvider()",
    "Batch": "Add EventContextProvider()",
    "EventDispatcher": "Add IdempotentDispatcherProvider(router) or DispatcherProvider(router)",
    "EventPublisher": "Add KafkaProvider()",
    "IdempotencyConfig": _STORE,
    "IdempotencyManager": _STORE,
    "IdempotencyRepository": _STORE,
    "Observer": "Add TelemetryProvider()",
    "Outgoing": "Add EventContextProvider()",
    "ServiceName": 'Add ServiceName: ServiceName("{service}") to the context of make_async_container',
    "Settings": "Add Settings: settings to the context of make_async_container",
}
"""How to provide a missing type of this library or of SQLAlchemy, by its name."""


def make_container(service: Service, settings: Settings) -> AsyncContainer:
    """Create the container of `service` from its providers or with its factory.

    Raises:
        ApplicationError: The container cannot be created, or the factory returns something else.
    """
    container = build(service, settings)
    if not isinstance(container, AsyncContainer):
        raise not_a_container(service.name, container)
    return container


def build(service: Service, settings: Settings) -> Any:
    """Create the container like `make_container`, without checking the type that the factory returns."""
    if service.container is not None:
        _check_signature(service, settings)
        with explained(service.name, NOT_CREATED):
            return service.container(settings, *service.overrides)
    with explained(service.name, NOT_CREATED):
        return _container_of_providers(service, settings)


def _container_of_providers(service: Service, settings: Settings) -> AsyncContainer:
    providers = service.providers(settings) if callable(service.providers) else service.providers
    assert providers is not None, "a service without providers has a factory"
    context = {type(settings): settings, Settings: settings, ServiceName: ServiceName(service.name)}
    return make_async_container(
        TelemetryProvider(group_id=service.group_id),
        EventContextProvider(),
        *providers,
        *service.overrides,
        context=context,
        # Providers of a test need not be marked with `override=True`.
        validation_settings=ValidationSettings() if service.overrides else STRICT_VALIDATION,
    )


async def get_dispatcher(container: AsyncContainer, service: str) -> EventDispatcher:
    """Get the dispatcher of `service` from its container.

    Raises:
        ApplicationError: The container does not have one, or fails to create it.
    """
    with explained(service, NO_DISPATCHER):
        return await container.get(EventDispatcher)


async def get_publisher(container: AsyncContainer, service: str) -> EventPublisher:
    """Get the publisher of `service` from its container.

    Raises:
        ApplicationError: The container does not have one, or fails to create it.
    """
    with explained(service, "does not provide a publisher"):
        return await container.get(EventPublisher)


def not_a_container(service: str, found: object) -> ApplicationError:
    """Return the error for a factory that returns `found`."""
    if inspect.iscoroutine(found):
        found.close()  # avoids a warning that it was never awaited
    return ApplicationError(
        f"the factory of service {service} returns {_described(found)}, not a container; return "
        "make_async_container(…) from a plain def"
    )


def _described(found: object) -> str:
    return "None" if found is None else f"an object of type {type(found).__name__}"


@contextmanager
def explained(service: str, what: str) -> Iterator[None]:
    """Convert any error of a container to an `ApplicationError` of one sentence that names `service`.

    Only errors of the application's code are kept as its cause; the others need no traceback.
    """
    prefix = f"the container of service {service} {what}"
    try:
        yield
    except ApplicationError as error:
        raise ApplicationError(f"{prefix}: {error.reason}") from error.__cause__
    except IdempotencyError:
        raise  # not about the container: for example, the store refuses the connection
    except DishkaError as error:
        raise ApplicationError(f"{prefix}: {_sentence_of(error, service)}") from None
    except Exception as error:
        reason = shown(text_of(error), _LONGEST_REASON)
        raise ApplicationError(f"{prefix}: {type(error).__name__}: {reason}{_raised_in(error)}") from error


def _check_signature(service: Service, settings: Settings) -> None:
    assert service.container is not None
    try:
        signature = inspect.signature(service.container)
    except ValueError:  # some functions of extension modules have no signature
        return
    try:
        signature.bind(settings, *service.overrides)
    except TypeError as error:
        name = getattr(service.container, "__qualname__", type(service.container).__name__)
        overrides, parameters = "", "settings: Settings"
        if service.overrides:
            overrides = " and the providers that override its own"
            parameters += ", *overrides: Provider"
        raise ApplicationError(
            f"the container of service {service.name} {NOT_CREATED}: its factory is called with the "
            f"settings{overrides}, "
            f"but {name}({', '.join(map(str, signature.parameters.values()))}) does not accept them ({error}). "
            f"Write: def {name.rpartition('.')[2]}({parameters}) -> AsyncContainer"
        ) from None


def _sentence_of(error: DishkaError, service: str) -> str:
    if isinstance(error, NoFactoryError):
        missing = error.requested.type_hint
        return f"nothing provides {_name(missing)}{_way(error.path)}. {_remedy(missing, service)}{_hints(error)}"
    if isinstance(error, NoContextValueError):
        return f"{_one_line(error)}. Add it to context={{…}} of make_async_container"
    if isinstance(error, CycleDependenciesError):
        names = [_name(each.provides.type_hint) for each in error.path]
        return f"its providers depend on each other: {' → '.join([*names, names[0]])}. Break the cycle"
    return f"{_one_line(error)} Change its providers"


def _way(path: Sequence[Any]) -> str:
    """Describe which provider or handler requests the missing type, and the path of dependencies to it."""
    if not path:
        return ""
    way = [_name(each.provides.type_hint).removeprefix(DEPENDENCIES_OF) for each in path]
    is_handler = _name(path[-1].provides.type_hint).startswith(DEPENDENCIES_OF)
    asking = f"handler {way[-1]}" if is_handler else _name(path[-1].source)
    return f", which {asking} asks for" + (f" ({' → '.join(way)})" if len(way) > 1 else "")


def _remedy(missing: Any, service: str) -> str:
    is_known = getattr(missing, "__module__", "").partition(".")[0] in _KNOWN_PACKAGES
    known = _REMEDIES.get(_name(missing)) if is_known else None
    return known.replace("{service}", service) if known else f"Add a provider of {_name(missing)}"


def _hints(error: NoFactoryError) -> str:
    _, _, hints = text_of(error).partition(" Hint:")
    return f". Hints of Dishka: {' '.join(hints.split())}" if hints else ""


def _name(kind: Any) -> str:
    found = str(getattr(kind, "__qualname__", None) or getattr(kind, "__name__", None) or kind)
    return found.rpartition("<locals>.")[2]


def _one_line(error: BaseException) -> str:
    return shown(" ".join(text_of(error).split()), _LONGEST_REASON)


def _raised_in(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" (raised in {trace.tb_frame.f_code.co_qualname}, {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
