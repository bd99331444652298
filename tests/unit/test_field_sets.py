"""The name of a set of fields changes with the names of fields, however deep, and with nothing else."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, computed_field, create_model
from typing_extensions import TypedDict

from integr8s_idem.events import BaseEvent
from integr8s_idem.keys.field_sets import annotation_at, field_set_of, field_set_of_parts, field_set_of_value
from integr8s_idem.keys.fingerprints import VOLATILE_FIELDS, event_field_set


def _model(name: str = "Line", **fields: Any) -> type[BaseModel]:
    model: type[BaseModel] = create_model(name, **fields)
    return model


def _dataclass(*names: str) -> type:
    return dataclass(type("Line", (), {"__annotations__": dict.fromkeys(names, int)}))


def _named_tuple(*names: str) -> type:
    return collections.namedtuple("Line", names)


def _typed_dict(*names: str) -> type:
    return TypedDict("Line", dict.fromkeys(names, int))  # type: ignore[operator,no-any-return]  # dynamic


def _fields(*names: str) -> type[BaseModel]:
    fields: dict[str, Any] = dict.fromkeys(names, (int, 0))
    return _model("Line", **fields)


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda line: line,
    "optional": lambda line: line | None,
    "list": lambda line: list[line],  # type: ignore[valid-type]
    "tuple": lambda line: tuple[line, ...],  # type: ignore[valid-type]
    "pair": lambda line: tuple[int, line],  # type: ignore[valid-type]
    "dict": lambda line: dict[str, line],  # type: ignore[valid-type]
    "union": lambda line: int | str | line,
    "annotated": lambda line: Annotated[line, Field(description="of the order")],
    "nested": lambda line: list[dict[str, line | None]],  # type: ignore[valid-type]
    "root model": lambda line: RootModel[line],  # type: ignore[valid-type]
    "field of a model": lambda line: _model("Page", line=(line, ...)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", [_fields, _dataclass, _named_tuple, _typed_dict])
def test_a_field_of_a_nested_class_is_part_of_the_set(place: Callable[[Any], Any], kind: Callable[..., type]) -> None:
    def of_order(*names: str) -> bytes:
        return field_set_of(_model("Order", lines=(place(kind(*names)), ...)))

    assert of_order("sku") == of_order("sku")
    assert of_order("sku") != of_order("sku", "coupon")
    assert of_order("sku") != of_order("ean")


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True), unique=True, max_size=6), st.randoms())
def test_the_order_of_fields_does_not_matter_but_their_names_do(names: list[str], random: Any) -> None:
    shuffled = random.sample(names, len(names))

    assert field_set_of(_fields(*names)) == field_set_of(_fields(*shuffled))
    assert field_set_of(_fields(*names)) != field_set_of(_fields(*names, "additional"))
    assert field_set_of(_fields(*names))[0] >= 128


def test_types_and_defaults_do_not_matter() -> None:
    assert field_set_of(_model(sku=(int, ...))) == field_set_of(_model(sku=(str | None, None)))


class Node(BaseModel):
    children: list[Node] = []


class LaterNode(BaseModel):
    children: list[LaterNode] = []
    note: str = ""


class Tree(BaseModel):
    left: Node
    right: Node


class LaterTree(BaseModel):
    left: LaterNode
    right: LaterNode


def test_a_class_that_contains_itself_has_a_set() -> None:
    assert field_set_of(Tree) == field_set_of(Tree) != field_set_of(LaterTree)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class LaterDog(Dog):
    tag: str = ""


def test_members_of_a_discriminated_union_are_part_of_the_set() -> None:
    def with_pet(*members: type[BaseModel]) -> bytes:
        pet: Any = Union[members]  # noqa: UP007  # of a variable number of members
        return field_set_of(_model(pet=(Annotated[pet, Field(discriminator="kind")], ...)))

    assert with_pet(Cat, Dog) != with_pet(Cat, LaterDog)


class WithTotal(BaseModel):
    price: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        return self.price


def test_only_what_is_dumped_is_part_of_the_set() -> None:
    price = field_set_of(_model(price=(int, 0)))

    assert field_set_of(_model(price=(int, 0), hidden=(int, Field(0, exclude=True)))) == price
    assert field_set_of(WithTotal) != price
    assert field_set_of(_model(price=(int, Field(0, serialization_alias="cost")))) != price


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"


def test_fields_that_differ_between_deliveries_are_not_part_of_the_set() -> None:
    assert event_field_set(Placed) == field_set_of(Placed, VOLATILE_FIELDS) != field_set_of(Placed)


def test_a_set_has_the_same_name_in_every_process() -> None:
    code = f"from {__name__} import Tree, field_set_of; print(field_set_of(Tree).hex())"
    found = {subprocess.check_output([sys.executable, "-c", code], text=True).strip() for _ in range(2)}

    assert found == {field_set_of(Tree).hex()}


def test_types_that_pydantic_does_not_know_have_no_fields() -> None:
    class Unknown: ...

    assert field_set_of(Unknown) == field_set_of(int)
    assert field_set_of_value(Unknown()) is None
    assert field_set_of_value({"a": 1}) is None
    assert field_set_of_value(Dog()) == field_set_of(Dog)


def test_parts_are_named_and_have_the_fields_of_their_annotations() -> None:
    base = field_set_of_parts({"order": Dog, "note": Any})

    assert base == field_set_of_parts({"note": Any, "order": Dog})
    assert base != field_set_of_parts({"order": LaterDog, "note": Any})
    assert base != field_set_of_parts({"order": Dog})
    assert base != field_set_of_parts({"order": Dog, "remark": Any})


class Item(NamedTuple):
    pet: Dog


@dataclass
class Order:
    owner: Tree | None
    item: Item


@pytest.mark.parametrize(
    ("annotation", "path", "found"),
    [
        (Order, [], Order),
        (Order, ["owner"], Tree | None),
        (Order, ["owner", "left"], Node),
        (Order, ["item", "pet"], Dog),
        (Order | None, ["item"], Item),
        (Order | int, ["item"], Any),
        (Order, ["missing"], Any),
        (Order, ["missing", "deeper"], Any),
        (Any, ["order"], Any),
        ("Unresolved", ["order"], Any),
    ],
)
def test_the_annotation_of_a_dotted_field_is_found(annotation: Any, path: list[str], found: Any) -> None:
    assert annotation_at(annotation, path) == found
