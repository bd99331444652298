"""Keys of different entry points of a scope, derived from hostile input, never collide."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import unquote

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.integrations.asgi import key_of_request
from integr8s_idem.integrations.faststream_subscribers import key_of_message
from integr8s_idem.integrations.kafka_loops import work_of
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import text

_manager = IdempotencyManager(IdempotencyConfig(), MemoryIdempotencyRepository(), scope="shop")


def _of_loop(made: str) -> Key:
    record: Any = SimpleNamespace(topic="orders", partition=0, offset=1, value=b"", headers=())
    return work_of(_manager, record, lambda _: made, None, print).key


MAKERS: Final[dict[str, tuple[int, Callable[..., Key]]]] = {
    "caller": (1, Key.of),
    "event": (4, Key.of_event),
    "request": (5, key_of_request),
    "message": (3, key_of_message),
    "loop": (1, _of_loop),
}


def distinct(random: Random) -> Figures:
    """Derive keys of all entry points from the same parts, and use the text of a key where free text is allowed."""
    parts = [text(random) or "x" for _ in range(5)]
    parts += [random.choice(("http", "faststream", "kafka-loop")), ":".join(parts[:2])]
    space = KeySpace("idempotency", "shop", hash_keys=random.random() < 0.1)
    seen: dict[str, tuple[str, ...]] = {}

    def take(kind: str, given: tuple[str, ...]) -> str:
        full = space.full(space.key(MAKERS[kind][1](*given)))
        assert seen.setdefault(full, (kind, *given)) == (kind, *given), f"{(kind, *given)!a} and {seen[full]!a}"
        return full

    for kind, (count, _) in MAKERS.items():
        full = take(kind, tuple(random.choice(parts) for _ in range(count)))
        tail = full.removeprefix(space.root)
        for made in (
            tail,
            tail.lstrip(":"),
            unquote(tail.lstrip(":")),
            tail.lstrip(":").removeprefix("kafka-loop:"),
        ):
            take(random.choice(("caller", "loop")), (made or "x",))
    return Figures(entry_keys=len(seen))
