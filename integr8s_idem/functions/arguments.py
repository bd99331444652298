"""The arguments of a call, and the functions that are called with some of them: of keys, fingerprints, reconciling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

from integr8s_idem.errors import InvalidKeyError


class Arguments:
    """The arguments of one call, as passed and by parameter name with defaults.

    `injected`: a framework injects further arguments into the function, so required ones may be missing.
    """

    def __init__(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, injected: bool = False
    ) -> None:
        bound = (signature.bind_partial if injected else signature.bind)(*args, **kwargs)
        bound.apply_defaults()
        self.args, self.kwargs, self.named = args, kwargs, bound.arguments


_VARIABLE: Final = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
_POSITIONAL: Final = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}


def function_of_arguments(make: Callable[..., Any], signature: inspect.Signature) -> Callable[[Arguments], Any]:
    """Return `make` adapted to a call of a function with this signature.

    Its parameters receive the arguments that they name, and keep their defaults if there is no such argument.  Its
    `**kwargs` are all others, by name; its `*args` are the others as passed.  If it has no signature, or requires a
    parameter that the function does not have, it receives all arguments as passed.

    Raises:
        InvalidKeyError: Its parameters name some arguments, but would receive others.
    """
    wanted = _parameters(make)
    if wanted is None:
        return lambda call: make(*call.args, **call.kwargs)
    if missing := missing_parameters(make, signature):
        _check_places(wanted, missing, signature)
        return _as_passed(make, [each for each in wanted if not _keeps_default(each, signature)])
    return _Named(make, wanted, signature)


def missing_parameters(make: Callable[..., Any], signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that `make` requires and a function with this signature does not have."""
    return [
        each.name
        for each in _parameters(make) or ()
        if each.kind not in _VARIABLE and each.default is each.empty and each.name not in signature.parameters
    ]


def takes_no_argument(make: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether `make` receives none of the arguments of a function with this signature."""
    wanted = _parameters(make)
    return wanted is not None and all(_keeps_default(each, signature) for each in wanted)


def _parameters(make: Callable[..., Any]) -> Sequence[Parameter] | None:
    try:
        return list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _keeps_default(parameter: Parameter, signature: inspect.Signature) -> bool:
    return parameter.default is not parameter.empty and parameter.name not in signature.parameters


def _check_places(wanted: Sequence[Parameter], missing: Sequence[str], signature: inspect.Signature) -> None:
    """Check the places of the parameters, which decide about arguments as passed."""
    names = list(signature.parameters)
    for place, each in enumerate(wanted):
        if each.kind in _POSITIONAL and each.name in names and names.index(each.name) != place:
            raise InvalidKeyError(
                f"a function takes {', '.join(missing)}, which is not among the arguments, and {each.name} in another "
                f"place: use the names {', '.join(names)}"
            )


def _as_passed(make: Callable[..., Any], parameters: Sequence[Parameter]) -> Callable[[Arguments], Any]:
    accepted = inspect.Signature(parameters)

    def make_of_call(call: Arguments) -> Any:
        accepted.bind(*call.args, **call.kwargs)  # an argument must not replace a default
        return make(*call.args, **call.kwargs)

    return make_of_call


class _Named:
    """A function that is called with the arguments that its parameters name."""

    def __init__(self, make: Callable[..., Any], wanted: Sequence[Parameter], signature: inspect.Signature) -> None:
        self._make = make
        self._wanted = wanted
        self._names = {each.name for each in wanted if each.kind not in _VARIABLE}
        kinds = {each.kind for each in wanted}
        self._takes_positional = Parameter.VAR_POSITIONAL in kinds
        self._takes_named = Parameter.VAR_KEYWORD in kinds
        of_function = signature.parameters.values()
        self._positional = [each.name for each in of_function if each.kind in _POSITIONAL]
        variable = {each.kind: each.name for each in of_function if each.kind in _VARIABLE}
        self._others = variable.get(Parameter.VAR_POSITIONAL, "")
        self._others_by_name = variable.get(Parameter.VAR_KEYWORD, "")

    def __call__(self, call: Arguments) -> Any:
        named = self._by_name(call)
        positional: list[Any] = []
        by_name: dict[str, Any] = {}
        for each in self._wanted:
            if each.kind in _POSITIONAL:
                positional.append(_value_of(each, named))
            elif each.kind is each.KEYWORD_ONLY:
                by_name[each.name] = _value_of(each, named)
        if self._takes_positional:
            positional.extend(self._rest(call))
            by_name.update((name, value) for name, value in call.kwargs.items() if name not in self._names)
        elif self._takes_named:
            by_name.update((name, value) for name, value in named.items() if name not in self._names)
        return self._make(*positional, **by_name)

    def _by_name(self, call: Arguments) -> Mapping[str, Any]:
        """Return the arguments by name, those in `**kwargs` of the function like the others."""
        if not self._others_by_name or self._others_by_name in self._names:
            return call.named
        named = dict(call.named)
        return {**named.pop(self._others_by_name, {}), **named}

    def _rest(self, call: Arguments) -> Iterator[Any]:
        """Return the positional arguments that no parameter names, as passed."""
        for place, value in enumerate(call.args):
            name = self._positional[place] if place < len(self._positional) else self._others
            if name not in self._names:
                yield value


def _value_of(parameter: Parameter, named: Mapping[str, Any]) -> Any:
    if parameter.default is parameter.empty:
        return named[parameter.name]
    return named.get(parameter.name, parameter.default)
