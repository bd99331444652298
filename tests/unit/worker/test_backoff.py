"""Delays between retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.worker.backoff import Backoff


@given(st.integers(-1, 10**9))
def test_a_delay_is_never_zero_and_never_exceeds_the_maximum(tries: int) -> None:
    pause = Backoff(initial=0.5, longest=30).pause(tries)

    assert 0.005 <= pause <= 30


def test_delays_double_up_to_the_maximum() -> None:
    backoff = Backoff(initial=1, longest=8)

    longest = [max(backoff.pause(tries) for _ in range(2_000)) for tries in range(1, 7)]

    assert [round(pause) for pause in longest] == [1, 2, 4, 8, 8, 8]


def test_delays_have_jitter_so_that_failures_are_not_retried_together() -> None:
    pauses = [Backoff(initial=8, longest=8).pause(1) for _ in range(2_000)]

    assert min(pauses) < 1
    assert max(pauses) > 7
