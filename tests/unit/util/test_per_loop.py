"""Each event loop has one object of a kind, whoever asks between two of its questions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from integr8s_idem._util.per_loop import PerLoop


def test_each_loop_has_its_own_whichever_asked_last() -> None:
    names = PerLoop(lambda loop: f"made for {id(loop)}")
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        told = [names(loop) for loop in (first, second, first, first, second)]
    finally:
        first.close()
        second.close()

    assert told == [f"made for {id(loop)}" for loop in (first, second, first, first, second)]


def test_it_is_made_once() -> None:
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


def test_threads_with_loops_of_their_own_never_get_another_s() -> None:
    objects = PerLoop(lambda loop: [loop])

    def ask_often() -> bool:
        loop = asyncio.new_event_loop()
        try:
            return all(objects(loop)[0] is loop for _ in range(20_000))
        finally:
            loop.close()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: ask_often(), range(4)))
