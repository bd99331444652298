"""Tokens: random, and nobody else's, in no thread and no process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from integr8s_idem._util import tokens
from integr8s_idem._util.tokens import TOKEN_BYTES, new_token


def test_all_are_different_and_of_one_length() -> None:
    drawn = [new_token() for _ in range(5_000)]

    assert len(set(drawn)) == 5_000
    assert {len(token) for token in drawn} == {TOKEN_BYTES}
    assert {type(token) for token in drawn} == {bytes}


def test_threads_draw_no_token_twice() -> None:
    start = Barrier(8)

    def draw() -> list[bytes]:
        start.wait()
        return [new_token() for _ in range(3_000)]

    with ThreadPoolExecutor(8) as threads:
        drawn = [token for drawing in [threads.submit(draw) for _ in range(8)] for token in drawing.result()]

    assert len(set(drawn)) == len(drawn) == 24_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_a_fork_draws_none_that_its_parent_draws() -> None:
    new_token()  # what is drawn ahead is there
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"".join(new_token() for _ in range(300)))
        os._exit(0)
    os.close(writing)
    ours = {new_token() for _ in range(300)}
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)

    theirs = {told[place : place + TOKEN_BYTES] for place in range(0, len(told), TOKEN_BYTES)}
    assert len(theirs) == 300
    assert not ours & theirs


def test_the_operating_system_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    right = os.urandom

    def urandom(size: int) -> bytes:
        asked.append(size)
        return right(size)

    monkeypatch.setattr(tokens, "_drawn", iter(()))
    monkeypatch.setattr(os, "urandom", urandom)

    for _ in range(512):
        new_token()

    assert asked == [256 * TOKEN_BYTES] * 2
