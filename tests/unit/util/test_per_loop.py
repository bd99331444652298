"""Each event loop has its own object."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from integr8s_idem._util.per_loop import PerLoop


def test_each_loop_gets_its_own_object_in_any_order() -> None:
    names = PerLoop(lambda loop: f"made for {id(loop)}")
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        found = [names(loop) for loop in (first, second, first, first, second)]
    finally:
        first.close()
        second.close()

    assert found == [f"made for {id(loop)}" for loop in (first, second, first, first, second)]


def test_the_object_is_created_once() -> None:
    made: list[object] = []

    def make(loop: object) -> object:
        made.append(loop)
        return object()

    objects = PerLoop(make)
    loops = [asyncio.new_event_loop() for _ in range(3)]
    try:
        found = {id(objects(loop)) for _ in range(4) for loop in loops}
    finally:
        for loop in loops:
            loop.close()

    assert (made, len(found)) == (loops, 3)


def test_threads_never_get_the_object_of_another_loop() -> None:
    objects = PerLoop(lambda loop: [loop])

    def ask_often() -> bool:
        loop = asyncio.new_event_loop()
        try:
            return all(objects(loop)[0] is loop for _ in range(20_000))
        finally:
            loop.close()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: ask_often(), range(4)))
