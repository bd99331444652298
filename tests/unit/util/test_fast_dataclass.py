"""`quick` dataclasses behave like ordinary ones."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, InitVar, dataclass, field, fields, replace
from typing import Any

import pytest

from integr8s_idem._util.fast_dataclass import quick


@quick
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plain:
    x: int
    y: int = 2
    name: str = ""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    x: int
    y: object = None


@pytest.mark.parametrize(
    ("args", "options"), [((1,), {}), ((1, 3), {}), ((), {"x": 1, "name": "a"}), ((1, 3, "b"), {})]
)
def test_it_accepts_the_same_arguments_and_stores_the_same_values(
    args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    fast, plain = Point(*args, **options), Plain(*args, **options)

    assert [getattr(fast, each.name) for each in fields(Point)] == [getattr(plain, each.name) for each in fields(Plain)]
    assert repr(fast) == repr(plain).replace("Plain", "Point")


@pytest.mark.parametrize(("args", "options"), [((), {}), ((1, 2, "c", 4), {}), ((1,), {"z": 1}), ((1,), {"x": 2})])
def test_it_rejects_the_same_arguments(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Plain(*args, **options)
    with pytest.raises(TypeError, match="__init__"):
        Point(*args, **options)


def test_keyword_only_fields_cannot_be_positional() -> None:
    assert Named(x=1).x == 1
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[call-arg]


def test_it_remains_frozen_comparable_and_hashable() -> None:
    point = Point(1)

    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    assert point == Point(1, 2, "")
    assert hash(point) == hash(Point(1))
    assert point != Point(2)


def test_it_can_be_copied_replaced_and_pickled() -> None:
    point = Point(1, 5, "a")

    assert replace(point, y=6) == Point(1, 6, "a")
    assert copy.copy(point) == copy.deepcopy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point


def test_its_signature_is_unchanged() -> None:
    assert inspect.signature(Point).replace() == inspect.signature(Plain).replace()
    assert Point.__init__.__qualname__ == "Point.__init__"


def test_a_default_factory_is_rejected() -> None:
    @dataclass(frozen=True, slots=True)
    class Made:
        parts: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match=r"Made\.parts has a default factory"):
        quick(Made)


def test_a_post_init_method_is_rejected() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        x: int

        def __post_init__(self) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="Checked has a __post_init__"):
        quick(Checked)


def test_an_init_only_parameter_is_rejected() -> None:
    @dataclass(frozen=True, slots=True)
    class Seeded:
        x: int
        seed: InitVar[int] = 0

    with pytest.raises(TypeError, match="Seeded has parameters without a field"):
        quick(Seeded)


def test_inherited_fields_are_rejected() -> None:
    @dataclass(frozen=True, slots=True)
    class Child(Plain):
        z: int = 3

    with pytest.raises(TypeError, match=r"Child\.x is inherited"):
        quick(Child)
