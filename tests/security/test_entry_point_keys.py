"""Entry points of a scope never share a key, for any input of callers, clients and producers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.integrations.asgi import key_of_request
from integr8s_idem.integrations.faststream_subscribers import key_of_message
from integr8s_idem.integrations.kafka_loops import work_of
from integr8s_idem.keys import EntryPoint, Key, KeySpace
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.support.http_shop import shop

pytestmark = pytest.mark.scenario(125)

PLAIN, HASHED = KeySpace("idempotency", "shop"), KeySpace("idempotency", "shop", hash_keys=True)

Named: TypeAlias = tuple[tuple[Any, ...], Key]
"""A request, and the key derived from it."""

# Parts of real keys, so that similar keys are generated, and characters that are escaped.
PIECES = (
    ":",
    ";",
    "%",
    "%3A",
    "#",
    "/",
    "http",
    "faststream",
    "kafka-loop",
    "http:",
    "s0",
    "1",
    "id",
    "a",
    "é",
    "\ud800",
)
text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
manager = IdempotencyManager(IdempotencyConfig(), MemoryIdempotencyRepository(), scope="shop")


def key_in_a_loop(given_key: str) -> Key:
    record: Any = SimpleNamespace(topic="orders", partition=0, offset=1, value=b"", headers=())
    return work_of(manager, record, lambda _: given_key, None, print).key


def named(kind: str, of: tuple[Any, ...]) -> Named:
    make: Any = {
        "caller": Key.of,
        "event": Key.of_event,
        "request": key_of_request,
        "message": key_of_message,
        "loop": key_in_a_loop,
    }
    return (kind, *of), make[kind](*of)


ENTRIES = st.one_of(
    st.tuples(text).map(lambda of: named("caller", of)),
    st.tuples(text, text, text, text).map(lambda of: named("event", of)),
    st.tuples(text, st.none() | text, text, text, text).map(lambda of: named("request", of)),
    st.tuples(text, text, text).map(lambda of: named("message", of)),
    st.tuples(text).map(lambda of: named("loop", of)),
)


def stepped(space: KeySpace, one: Named) -> Named:
    return ("step", *one[0]), space.step(space.full(one[1]), "name", 0)


@pytest.mark.parametrize("space", [PLAIN, HASHED], ids=["plain", "hashed"])
@given(st.lists(ENTRIES, min_size=2, max_size=20, unique_by=lambda one: one[0]), st.integers(0, 2))
def test_different_requests_have_different_keys(space: KeySpace, entries: list[Named], generation: int) -> None:
    asked = [*entries, *(stepped(space, one) for one in entries)]
    asked += [(("generation", *name), key.in_generation(generation + 1)) for name, key in entries]
    full_keys = [space.full(space.key(key)) for _, key in asked]
    assert len(set(full_keys)) == len(full_keys)


@pytest.mark.parametrize("space", [PLAIN, HASHED], ids=["plain", "hashed"])
@given(ENTRIES, st.sampled_from(["caller", "loop"]))
def test_a_written_out_key_of_another_entry_point_is_a_different_key(space: KeySpace, victim: Named, kind: str) -> None:
    """Keys of callers and headers are free text, and the format of keys is public."""
    full = space.full(space.key(victim[1]))
    tail = full.removeprefix(space.root)
    for given_key in (full, tail, tail.removeprefix(":"), tail.removeprefix(":").removeprefix("kafka-loop:")):
        for words in {given_key, unquote(given_key, errors="surrogatepass"), given_key.replace(":", "%3A", 1)} - {""}:
            forged = named(kind, (words,))
            if forged[0] != victim[0]:
                assert space.full(space.key(forged[1])) != full


@pytest.mark.parametrize("entry", EntryPoint)
def test_entry_point_names_are_escaped_in_the_key_of_a_caller(entry: EntryPoint) -> None:
    assert PLAIN.full(Key.of(f"{entry.value}:a:b")) == f"idempotency:shop::{entry.value}%3Aa:b"


async def test_a_key_of_the_application_does_not_block_a_request() -> None:
    async def answered(request: Request) -> Response:
        return PlainTextResponse("placed")

    async with shop(answered, identity=lambda _: "bob", share_hosts=True) as here:
        key = "http:bob:POST:/orders:k2"
        assert await here.manager.run(key, _charged) == "charged"
        response = await here.client.post("/orders", headers={"Idempotency-Key": '"k2"'})
        assert (response.status_code, response.text) == (200, "placed")


async def _charged() -> str:
    return "charged"
