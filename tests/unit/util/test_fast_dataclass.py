"""Frozen dataclasses that are made quickly: in all else as `dataclass` makes them."""

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


@pytest.mark.parametrize(("told", "named"), [((1,), {}), ((1, 3), {}), ((), {"x": 1, "name": "a"}), ((1, 3, "b"), {})])
def test_it_takes_what_the_other_takes_and_holds_the_same(told: tuple[Any, ...], named: dict[str, Any]) -> None:
    quickly, plainly = Point(*told, **named), Plain(*told, **named)

    assert [getattr(quickly, each.name) for each in fields(Point)] == [
        getattr(plainly, each.name) for each in fields(Plain)
    ]
    assert repr(quickly) == repr(plainly).replace("Plain", "Point")


@pytest.mark.parametrize(("told", "named"), [((), {}), ((1, 2, "c", 4), {}), ((1,), {"z": 1}), ((1,), {"x": 2})])
def test_it_refuses_what_the_other_refuses(told: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Plain(*told, **named)
    with pytest.raises(TypeError, match="__init__"):
        Point(*told, **named)


def test_what_is_given_by_name_alone_cannot_be_given_by_place() -> None:
    assert Named(x=1).x == 1
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[call-arg]


def test_it_is_as_frozen_equal_and_hashed_as_before() -> None:
    point = Point(1)

    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    assert point == Point(1, 2, "")
    assert hash(point) == hash(Point(1))
    assert point != Point(2)


def test_it_is_copied_replaced_and_pickled_as_before() -> None:
    point = Point(1, 5, "a")

    assert replace(point, y=6) == Point(1, 6, "a")
    assert copy.copy(point) == copy.deepcopy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point


def test_its_signature_reads_as_before() -> None:
    assert inspect.signature(Point).replace() == inspect.signature(Plain).replace()
    assert Point.__init__.__qualname__ == "Point.__init__"


def test_what_it_cannot_make_it_refuses_at_once() -> None:
    @dataclass(frozen=True, slots=True)
    class Made:
        parts: list[int] = field(default_factory=list)

    with pytest.raises(TypeError, match=r"Made\.parts is made by a factory"):
        quick(Made)


def test_no_check_is_passed_over() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        x: int

        def __post_init__(self) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="Checked has a __post_init__"):
        quick(Checked)


def test_nothing_that_is_only_for_the_making_is_dropped() -> None:
    @dataclass(frozen=True, slots=True)
    class Seeded:
        x: int
        seed: InitVar[int] = 0

    with pytest.raises(TypeError, match="Seeded takes what it has no field for"):
        quick(Seeded)


def test_fields_of_a_parent_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Child(Plain):
        z: int = 3

    with pytest.raises(TypeError, match=r"Child\.x has its slot elsewhere"):
        quick(Child)
