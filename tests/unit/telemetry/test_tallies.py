"""Numbers that several threads add to, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Event, Thread

from integr8s_idem.telemetry.tallies import Tallies

THREADS = 4
TIMES = 20_000


def count(tallies: Tallies[str, str], times: int = 1) -> None:
    counts = tallies.here.counts.setdefault("orders", {})
    for _ in range(times):
        counts["handled"] = counts.get("handled", 0) + 1


def in_threads(work: Callable[[], None], threads: int = THREADS) -> list[Thread]:
    """Run `work` in several threads that start simultaneously."""
    all_there = Barrier(threads)

    def begin() -> None:
        all_there.wait()
        work()

    running = [Thread(target=begin) for _ in range(threads)]
    for thread in running:
        thread.start()
    return running


def test_no_count_of_any_thread_is_lost() -> None:
    tallies: Tallies[str, str] = Tallies()

    for thread in in_threads(lambda: count(tallies, TIMES)):
        thread.join()
    count(tallies)

    assert tallies.totals().counts == {"orders": {"handled": THREADS * TIMES + 1}}


def test_totals_never_decrease() -> None:
    tallies: Tallies[str, str] = Tallies()
    seen = [0]

    running = in_threads(lambda: count(tallies, TIMES))
    while any(thread.is_alive() for thread in running):
        seen.append(tallies.totals().counts.get("orders", {}).get("handled", 0))
        Thread(target=count, args=(tallies, 0)).start()
    seen.append(tallies.totals().counts["orders"]["handled"])

    assert seen == sorted(seen)
    assert seen[-1] == THREADS * TIMES


def test_durations_of_several_threads_are_added() -> None:
    tallies: Tallies[str, str] = Tallies()

    def took_a_second() -> None:
        tallies.here.times["orders"] = {"handle": [1, 0, 1.0]}

    for thread in in_threads(took_a_second, threads=3):
        thread.join()
    tallies.here.times["orders"] = {"handle": [0, 1, 90.0]}

    assert tallies.totals().times == {"orders": {"handle": [3, 1, 93.0]}}


def test_cells_of_ended_threads_are_merged() -> None:
    tallies: Tallies[str, str] = Tallies()

    for _ in range(50):
        thread = Thread(target=count, args=(tallies,))
        thread.start()
        thread.join()

    assert tallies.totals().counts == {"orders": {"handled": 50}}
    assert len(tallies._threads) <= 2


def test_totals_are_a_copy() -> None:
    tallies: Tallies[str, str] = Tallies()
    count(tallies)
    tallies.here.times["orders"] = {"handle": [1, 1.0]}

    totals = tallies.totals()
    count(tallies)
    tallies.here.times["orders"]["handle"][0] += 1

    assert totals.counts == {"orders": {"handled": 1}}
    assert totals.times == {"orders": {"handle": [1, 1.0]}}


def test_a_running_thread_keeps_its_cells_when_others_start() -> None:
    tallies: Tallies[str, str] = Tallies()
    counted, go_on = Event(), Event()

    def work() -> None:
        count(tallies)
        counted.set()
        go_on.wait()
        count(tallies)

    running = Thread(target=work)
    running.start()
    counted.wait()
    count(tallies)
    go_on.set()
    running.join()

    assert tallies.totals().counts == {"orders": {"handled": 3}}
