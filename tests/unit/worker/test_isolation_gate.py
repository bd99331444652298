"""The isolation gate: one suspect event at a time runs alone, and other events get their share of the time."""

from __future__ import annotations

import asyncio
import random

import pytest

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.isolation_gate import IsolationGate

SHARE = 0.5
LONGEST = 30.0


def now() -> float:
    return asyncio.get_running_loop().time()


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def run_handler(
    isolation: IsolationGate, seconds: float, log: list[tuple[str, float]], name: str = "handler"
) -> None:
    await isolation.wait_until_open(unless=never())
    isolation.enter()
    log.append((f"{name} starts", now()))
    await asyncio.sleep(seconds)
    log.append((f"{name} ends", now()))
    isolation.leave()


async def run_suspect(
    isolation: IsolationGate, seconds: float, log: list[tuple[str, float]], name: str = "suspect", share: float = SHARE
) -> bool:
    async with isolation.turn(share, LONGEST, unless=never()) as turn:
        assert turn is not None
        log.append((f"{name} starts", now()))
        await asyncio.sleep(seconds)
        log.append((f"{name} ends", now()))
        return turn.is_alone


@virtual_time
async def test_a_suspect_waits_for_running_handlers_and_blocks_new_ones() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()
    first = asyncio.create_task(run_handler(isolation, 5, log, "first"))
    await asyncio.sleep(1)
    alone = asyncio.create_task(run_suspect(isolation, 2, log))
    await asyncio.sleep(1)
    second = asyncio.create_task(run_handler(isolation, 1, log, "second"))
    await asyncio.gather(first, alone, second)

    assert alone.result()
    assert log == [
        ("first starts", 0),
        ("first ends", 5),
        ("suspect starts", 5),
        ("suspect ends", 7),
        ("second starts", 7),
        ("second ends", 8),
    ]


@virtual_time
async def test_other_handlers_get_their_share_of_the_time_between_two_turns() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()

    ends = await asyncio.gather(*(run_suspect(isolation, 3, log, share=0.25) for _ in range(3)))

    assert ends == [True] * 3
    assert [at for what, at in log if what == "suspect starts"] == [0, 12, 24]
    assert not isolation.is_closed


@virtual_time
async def test_with_a_share_of_one_suspects_run_one_after_another() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()

    await asyncio.gather(*(run_suspect(isolation, 3, log, share=1) for _ in range(3)))

    assert [at for what, at in log if what == "suspect starts"] == [0, 3, 6]


@virtual_time
async def test_a_turn_ends_at_its_maximum_even_if_its_handler_runs_on() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()
    alone = asyncio.create_task(run_suspect(isolation, 100, log))
    await asyncio.sleep(1)
    other = asyncio.create_task(run_handler(isolation, 1, log))
    await asyncio.gather(alone, other)

    assert ("handler starts", LONGEST) in log
    assert ("suspect ends", 100) in log


@virtual_time
async def test_while_a_suspect_outlives_its_turn_other_suspects_run_with_the_others() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()
    first = asyncio.create_task(run_suspect(isolation, 200, log, "first"))
    await asyncio.sleep(LONGEST + 1)
    second = asyncio.create_task(run_suspect(isolation, 1, log, "second"))
    await asyncio.sleep(LONGEST + 1)  # the pause after its turn is over
    opened_at = now() if not isolation.is_closed else None
    is_alone = await second
    await first
    third = await run_suspect(isolation, 1, log, "third")

    assert not is_alone
    assert opened_at == pytest.approx(2 * LONGEST + 2)
    assert third, "once that has ended, the next is alone again"


@virtual_time
async def test_a_suspect_that_cannot_run_alone_in_time_does_not_block_the_others() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()
    long = asyncio.create_task(run_handler(isolation, 500, log, "long"))
    await asyncio.sleep(1)
    denied = asyncio.create_task(run_suspect(isolation, 1, log))
    await asyncio.sleep(1)
    other = asyncio.create_task(run_handler(isolation, 1, log, "other"))
    await asyncio.gather(denied, other)

    assert not denied.result()
    assert dict(log)["other starts"] == 1 + LONGEST
    long.cancel()


@pytest.mark.parametrize("moment", ["queued", "resting", "waiting for others"])
@pytest.mark.parametrize("how", ["released", "cancelled"])
@virtual_time
async def test_a_suspect_that_is_released_or_cancelled_opens_the_gate(moment: str, how: str) -> None:
    isolation, log, closing = IsolationGate(), list[tuple[str, float]](), never()
    busy: list[asyncio.Task[object]] = []
    if moment == "waiting for others":
        busy.append(asyncio.create_task(run_handler(isolation, 10, log)))
    else:
        busy.append(asyncio.create_task(run_suspect(isolation, 10, log, "first")))
    await asyncio.sleep(1 if moment != "resting" else 12)

    async def one() -> bool:
        async with isolation.turn(SHARE, LONGEST, unless=closing) as turn:
            return turn is None

    leaving = asyncio.create_task(one())
    await asyncio.sleep(1)
    if how == "released":
        closing.set_result(None)
        assert await leaving
    else:
        leaving.cancel()
        await asyncio.wait({leaving})
    await asyncio.gather(*busy)

    assert not isolation.is_closed
    assert await run_suspect(isolation, 1, log, "last"), "the next has its turn"


@virtual_time
async def test_any_suspect_may_be_the_first_to_run() -> None:
    """A suspect that crashes the process must not always run after the same others, which then rerun each time."""
    firsts = set()
    for seed in range(30):
        random.seed(seed)
        isolation, log = IsolationGate(), list[tuple[str, float]]()
        await asyncio.gather(*(run_suspect(isolation, 1, log, str(number), share=1) for number in range(4)))
        firsts.add(log[0][0])

    assert firsts == {"0 starts", "1 starts", "2 starts", "3 starts"}


@virtual_time
async def test_callbacks_run_when_handlers_may_start_again() -> None:
    isolation, log = IsolationGate(), list[tuple[str, float]]()
    opened = list[float]()
    isolation.when_opened.append(lambda: opened.append(now()))

    await run_suspect(isolation, 2, log)

    await asyncio.sleep(1)
    assert opened == [2]
