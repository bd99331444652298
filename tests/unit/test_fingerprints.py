"""The fast path computes the same fingerprints as canonical JSON, since stored fingerprints must stay valid."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)

from integr8s_idem.events import BaseEvent
from integr8s_idem.keys.fingerprints import (
    canonical_json,
    event_field_set,
    fingerprint,
    fingerprint_of,
    fingerprint_of_fields,
    given_fingerprint,
    payload_of,
    plain_names,
)
from integr8s_idem.records import is_other_payload


class Plain(BaseEvent):
    event_type: Literal["plain"] = "plain"
    zebra: str
    count: int
    paid: bool = False
    note: str | None = None
    Äther: int = 0


class PlainAscii(BaseEvent):
    event_type: Literal["plain_ascii"] = "plain_ascii"
    zebra: str
    count: int
    paid: bool = False
    note: str | None = None
    kind: Literal["a", "b"] = "a"


def slow_fingerprint(event: BaseEvent) -> bytes:
    return fingerprint_of_fields(event_field_set(type(event)), canonical_json(payload_of(event)))


class Loud(str):
    __slots__ = ()


@given(
    zebra=st.text(st.characters(codec="utf-8")) | st.just('\x00\x1f\u2028\U0001f600"\\/'),
    count=st.integers() | st.sampled_from([2**53, 2**53 - 1, -(2**53), 0]),
    paid=st.booleans(),
    note=st.none() | st.text(st.characters(codec="utf-8")),
)
def test_plain_payloads_have_the_same_fingerprint_on_the_fast_path(
    zebra: str, count: int, paid: bool, note: str | None
) -> None:
    event = PlainAscii(zebra=zebra, count=count, paid=paid, note=note)

    assert plain_names(PlainAscii) == (
        "aggregate_id",
        "count",
        "event_type",
        "event_version",
        "kind",
        "note",
        "paid",
        "zebra",
    )
    assert fingerprint_of(event) == slow_fingerprint(event)


def test_names_of_fields_are_escaped_on_the_fast_path() -> None:
    fields: dict[str, Any] = {'a"b': (str, ...), "c\\d": (int, ...), "e\tf": (bool, ...)}
    odd = create_model("Odd", __base__=BaseEvent, **fields)
    event = odd.model_validate({"event_type": "odd", 'a"b': "x", "c\\d": 1, "e\tf": True})

    assert 'a"b' in plain_names(odd)
    assert fingerprint_of(event) == slow_fingerprint(event)


def test_a_subclass_of_str_takes_the_slow_path() -> None:
    loud = PlainAscii.model_construct(**(PlainAscii(zebra="a", count=1).__dict__ | {"zebra": Loud("a")}))

    assert fingerprint_of(loud) == slow_fingerprint(loud) == slow_fingerprint(PlainAscii(zebra="a", count=1))


class Color(str, Enum):
    RED = "red"


class WithSerializer(BaseEvent):
    event_type: Literal["with_serializer"] = "with_serializer"
    name: str

    @field_serializer("name")
    def _shout(self, name: str) -> str:
        return name.upper()


class WithAnnotated(BaseEvent):
    event_type: Literal["with_annotated"] = "with_annotated"
    name: Annotated[str, PlainSerializer(lambda name: name + "!")]


class WithModelSerializer(BaseEvent):
    event_type: Literal["with_model"] = "with_model"
    name: str

    @model_serializer(mode="wrap")
    def _more(self, handler: Any) -> Any:
        return {**handler(self), "more": 1}


class WithComputed(BaseEvent):
    event_type: Literal["with_computed"] = "with_computed"
    name: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def length(self) -> int:
        return len(self.name)


class WithExtra(BaseEvent):
    model_config = ConfigDict(extra="allow")
    event_type: Literal["with_extra"] = "with_extra"
    name: str


class WithAlias(BaseEvent):
    model_config = ConfigDict(serialize_by_alias=True)
    event_type: Literal["with_alias"] = "with_alias"
    name: str = Field(serialization_alias="n")


class WithExclusion(BaseEvent):
    event_type: Literal["with_exclusion"] = "with_exclusion"
    name: str = Field(exclude=True)


class WithDump(BaseEvent):
    event_type: Literal["with_dump"] = "with_dump"
    name: str

    def model_dump(self, **how: Any) -> dict[str, Any]:
        return {**super().model_dump(**how), "dumped": True}


class WithMore(BaseEvent):
    event_type: Literal["with_more"] = "with_more"
    name: str
    when: datetime
    color: Color = Color.RED
    amount: float = 0.1


@pytest.mark.parametrize(
    "event",
    [
        Plain(zebra="ä", count=1),
        WithSerializer(name="a"),
        WithAnnotated(name="a"),
        WithModelSerializer(name="a"),
        WithComputed(name="a"),
        WithExtra.model_validate({"name": "a", "more": 2}),
        WithAlias(name="a"),
        WithExclusion(name="a"),
        WithDump(name="a"),
        WithMore(name="a", when=datetime(2026, 1, 1)),  # noqa: DTZ001  # events may have naive times
    ],
    ids=lambda event: type(event).__name__,
)
def test_classes_with_custom_serialization_take_the_slow_path(event: BaseEvent) -> None:
    assert plain_names(type(event)) == ()
    assert fingerprint_of(event) == slow_fingerprint(event)


class PlainAsciiLater(BaseEvent):
    """The same with an optional field more."""

    event_type: Literal["plain_ascii"] = "plain_ascii"
    zebra: str
    count: int
    paid: bool = False
    note: str | None = None
    kind: Literal["a", "b"] = "a"
    coupon: str | None = None


def test_a_new_optional_field_does_not_turn_a_redelivery_into_another_payload() -> None:
    earlier, later = PlainAscii(zebra="a", count=1), PlainAsciiLater(zebra="a", count=1)

    assert not is_other_payload(fingerprint_of(earlier), fingerprint_of(later))
    assert is_other_payload(fingerprint_of(later), fingerprint_of(PlainAsciiLater(zebra="b", count=1)))


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_bytes_from_callers_are_compared_whole(one: bytes, other: bytes) -> None:
    given_one, given_other = given_fingerprint(one), given_fingerprint(other)

    assert is_other_payload(given_one, given_other) == (one != other)
    assert given_fingerprint(given_one) == given_one, "the fingerprint of a record may be given again"


@given(st.binary(), st.builds(PlainAscii, zebra=st.text(), count=st.integers()))
def test_the_first_bit_says_whether_a_fingerprint_has_a_field_set(body: bytes, event: PlainAscii) -> None:
    assert fingerprint(body)[0] < 128 <= fingerprint_of(event)[0]
    assert len(fingerprint(body)) == len(fingerprint_of(event)) == 16


def test_a_given_event_is_compared_by_its_fields() -> None:
    event = PlainAscii(zebra="a", count=1)

    assert given_fingerprint(event) == fingerprint_of(event)
    assert given_fingerprint(fingerprint_of(event)) != fingerprint_of(event), "bytes are compared whole"


SET, OTHER_SET, LATER = b"\x80abc", b"\xffabc", b"\x7fabc"


@pytest.mark.parametrize(
    ("stored", "offered", "is_other"),
    [
        (None, LATER + b"1" * 12, False),
        (SET + b"1" * 12, None, False),
        (SET + b"1" * 12, SET + b"1" * 12, False),
        (SET + b"1" * 12, SET + b"2" * 12, True),
        (SET + b"1" * 12, OTHER_SET + b"2" * 12, False),
        (SET + b"1" * 12, LATER + b"2" * 12, False),
        (LATER + b"2" * 12, SET + b"1" * 12, False),
        (LATER + b"1" * 12, LATER + b"2" * 12, True),
        (LATER + b"1" * 12, b"\x00abc" + b"1" * 12, True),
    ],
)
def test_only_fingerprints_of_the_same_kind_are_compared(
    stored: bytes | None, offered: bytes | None, is_other: bool
) -> None:
    assert is_other_payload(stored, offered) is is_other
