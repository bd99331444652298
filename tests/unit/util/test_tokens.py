"""Tokens are unique across threads and processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from integr8s_idem._util import tokens
from integr8s_idem._util.tokens import TOKEN_BYTES, new_token


def test_tokens_are_unique_and_of_equal_length() -> None:
    drawn = [new_token() for _ in range(5_000)]

    assert len(set(drawn)) == 5_000
    assert {len(token) for token in drawn} == {TOKEN_BYTES}
    assert {type(token) for token in drawn} == {bytes}


def test_threads_never_get_the_same_token() -> None:
    start = Barrier(8)

    def draw() -> list[bytes]:
        start.wait()
        return [new_token() for _ in range(3_000)]

    with ThreadPoolExecutor(8) as threads:
        drawn = [token for drawing in [threads.submit(draw) for _ in range(8)] for token in drawing.result()]

    assert len(set(drawn)) == len(drawn) == 24_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_never_gets_a_token_of_its_parent() -> None:
    new_token()  # fills the batch
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"".join(new_token() for _ in range(300)))
        os._exit(0)
    os.close(writing)
    parent_tokens = {new_token() for _ in range(300)}
    with os.fdopen(reading, "rb") as pipe:
        received = pipe.read()
    os.waitpid(child, 0)

    child_tokens = {received[at : at + TOKEN_BYTES] for at in range(0, len(received), TOKEN_BYTES)}
    assert len(child_tokens) == 300
    assert not parent_tokens & child_tokens


def test_tokens_are_read_from_the_operating_system_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = os.urandom

    def urandom(size: int) -> bytes:
        sizes.append(size)
        return original(size)

    monkeypatch.setattr(tokens, "_drawn", iter(()))
    monkeypatch.setattr(os, "urandom", urandom)

    for _ in range(512):
        new_token()

    assert sizes == [256 * TOKEN_BYTES] * 2
