"""Whether and when a worker process is started again."""

from __future__ import annotations

import signal

import pytest

from integr8s_idem.runtime.restarts import (
    BACKOFF,
    INVALID_INPUT,
    MOST_FAILED_STARTS,
    STEADY_SECONDS,
    Restarts,
    drained_status,
    ending,
    exit_status,
)


def pauses(
    *, was_ready: bool = True, lasted: float = 1.0, others_may_work: bool = False, times: int = 4
) -> list[object]:
    """Return the pause after each of several ends, counted in failures."""
    restarts = Restarts(pause=float)
    return [
        restarts.pause_after(1, was_ready=was_ready, lasted=lasted, others_may_work=others_may_work)
        for _ in range(times)
    ]


def test_pauses_grow_with_each_end_in_a_row() -> None:
    assert pauses() == [1, 2, 3, 4]


def test_pauses_double_up_to_a_maximum_with_jitter() -> None:
    limits = [1, 2, 4, 8, 16, 30, 30]

    for _ in range(50):
        restarts = Restarts()
        for limit in limits:
            pause = restarts.pause_after(-9, was_ready=True, lasted=1, others_may_work=True)
            assert pause is not None
            assert 0 < pause <= limit
    assert len({BACKOFF.pause(3) for _ in range(10)}) > 1


def test_a_process_that_lasted_long_is_restarted_without_earlier_pauses() -> None:
    restarts = Restarts(pause=float)
    for _ in range(3):
        restarts.pause_after(1, was_ready=True, lasted=1, others_may_work=True)

    assert restarts.pause_after(1, was_ready=True, lasted=STEADY_SECONDS, others_may_work=True) == 1
    assert restarts.pause_after(1, was_ready=True, lasted=1, others_may_work=True) == 2


def test_invalid_settings_are_not_tried_again() -> None:
    assert Restarts().pause_after(INVALID_INPUT, was_ready=False, lasted=1, others_may_work=True) is None


def test_an_exit_status_of_a_ready_process_does_not_mean_invalid_settings() -> None:
    """A handler can exit with any status."""
    assert Restarts().pause_after(INVALID_INPUT, was_ready=True, lasted=1, others_may_work=False) is not None


def test_processes_that_always_fail_before_they_are_ready_are_given_up() -> None:
    assert pauses(was_ready=False) == [1, 2, None, None]
    assert MOST_FAILED_STARTS == 3


def test_a_process_that_always_fails_is_restarted_while_others_may_work() -> None:
    assert pauses(was_ready=False, others_may_work=True, times=6) == [1, 2, 3, 4, 5, 6]


def test_a_start_that_succeeds_resets_the_failed_starts() -> None:
    restarts = Restarts(pause=float)

    found = [
        restarts.pause_after(1, was_ready=ready, lasted=1, others_may_work=False)
        for ready in (False, False, True, False, False)
    ]

    assert None not in found


@pytest.mark.parametrize(
    ("returncode", "status", "text"),
    [
        (0, 0, "exit status 0"),
        (2, 2, "exit status 2"),
        (-signal.SIGKILL, 137, "killed by SIGKILL"),
        (-signal.SIGRTMIN - 1, 163, "killed by signal 35"),
    ],
)
def test_the_end_of_a_process_is_reported_as_shells_do(returncode: int, status: int, text: str) -> None:
    assert exit_status(returncode) == status
    assert ending(returncode) == text


@pytest.mark.parametrize("returncode", [-signal.SIGTERM, -signal.SIGINT, 130])
def test_a_signal_that_reaches_a_process_outside_its_services_counts_as_drained(returncode: int) -> None:
    assert drained_status(returncode) == 0


def test_other_ends_of_a_process_that_was_asked_to_drain_are_its_exit_status() -> None:
    assert drained_status(-signal.SIGKILL) == 137
    assert drained_status(1) == 1
