"""The coalescer combines single requests into few calls and returns each caller its own answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.engine.coalescer import FEW, Coalescer
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.testing.virtual_time import run_virtual, virtual_time


class Backend:
    """Answers each request with its square, after a second."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception | None = None

    async def __call__(self, questions: list[int]) -> Sequence[int]:
        self.batches.append(questions)
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        return [question**2 for question in questions]


@virtual_time
async def test_a_single_request_is_sent_immediately() -> None:
    backend = Backend()

    assert await Coalescer(backend).ask(3) == 9

    assert asyncio.get_running_loop().time() == 1
    assert backend.batches == [[3]]


@virtual_time
async def test_requests_during_a_call_are_sent_together_in_order() -> None:
    backend = Backend()
    coalescer = Coalescer(backend)

    first = coalescer.ask(0)
    await asyncio.sleep(0.5)
    answers = await asyncio.gather(first, *(coalescer.ask(number) for number in range(1, FEW)))

    assert answers == [number**2 for number in range(FEW)]
    assert backend.batches == [[0], list(range(1, FEW))]


REQUESTER: ContextVar[int] = ContextVar("requester", default=0)


@virtual_time
async def test_a_call_for_many_runs_in_the_context_of_none_of_them() -> None:
    requesters: list[int] = []

    async def call(questions: list[int]) -> Sequence[int]:
        requesters.append(REQUESTER.get())
        return questions

    async def ask(number: int) -> int:
        REQUESTER.set(number)
        return await coalescer.answer(number)

    REQUESTER.set(-1)
    coalescer = Coalescer(call)
    await asyncio.gather(*(asyncio.create_task(ask(number)) for number in range(1, 3 * FEW)))

    assert len(requesters) > 1
    assert set(requesters) == {-1}


@virtual_time
async def test_half_of_many_requests_are_sent_in_each_call() -> None:
    backend = Backend()
    coalescer = Coalescer(backend)

    answers = await asyncio.gather(*(coalescer.ask(number) for number in range(100)))

    assert answers == [number**2 for number in range(100)]
    assert backend.batches == [list(range(50)), list(range(50, 100))]


@virtual_time
async def test_calls_of_repeated_requesters_stay_halves() -> None:
    backend = Backend()
    coalescer = Coalescer(backend)

    async def ask_ten_times(number: int) -> None:
        for _ in range(10):
            await coalescer.answer(number)

    await asyncio.gather(*map(ask_ten_times, range(64)))

    assert set(map(len, backend.batches)) == {32}


@virtual_time
async def test_few_requests_are_sent_together_and_many_in_halves() -> None:
    backend = Backend()
    coalescer = Coalescer(backend)

    for together in (100, FEW, 1, 40):
        await asyncio.gather(*(coalescer.ask(number) for number in range(together)))

    assert list(map(len, backend.batches)) == [50, 50, FEW, 1, 21, 19]


@virtual_time
async def test_no_call_is_larger_than_allowed() -> None:
    backend = Backend()
    coalescer = Coalescer(backend, max_batch=7)

    await asyncio.gather(*(coalescer.ask(number) for number in range(50)))

    assert max(map(len, backend.batches)) == 7
    assert sum(map(len, backend.batches)) == 50


@virtual_time
async def test_each_caller_gets_its_own_copy_of_an_error() -> None:
    backend = Backend()
    coalescer, backend.error = Coalescer(backend), StoreUnavailableError("reserve", "down")

    errors = await asyncio.gather(*(coalescer.ask(number) for number in range(3)), return_exceptions=True)

    assert {type(error) for error in errors} == {StoreUnavailableError}
    assert {str(error) for error in errors} == {str(backend.error)}
    assert len(set(map(id, errors))) == 3
    backend.error = None
    assert await coalescer.ask(2) == 4


class UncopyableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(one + other)


@virtual_time
async def test_an_error_that_cannot_be_copied_is_shared_by_all_callers() -> None:
    backend = Backend()
    coalescer, backend.error = Coalescer(backend), UncopyableError(1, 2)

    errors = await asyncio.gather(*(coalescer.ask(number) for number in range(3)), return_exceptions=True)

    assert errors == [backend.error] * 3


@pytest.mark.parametrize("answers", [0, 1, 3])
@virtual_time
async def test_a_wrong_number_of_answers_is_an_error_for_all_callers(answers: int) -> None:
    async def backend(questions: list[int]) -> Sequence[int]:
        return [0] * answers

    coalescer = Coalescer(backend)

    errors = await asyncio.gather(coalescer.ask(1), coalescer.ask(2), return_exceptions=True)

    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]


@virtual_time
async def test_the_answer_of_a_cancelled_caller_is_passed_to_abandoned() -> None:
    abandoned: list[tuple[int, int]] = []
    coalescer = Coalescer(Backend(), abandoned=lambda question, answer: abandoned.append((question, answer)))
    waiting = [asyncio.create_task(coalescer.answer(number)) for number in range(3)]
    await asyncio.sleep(0.5)

    waiting[1].cancel()
    await asyncio.wait(waiting)

    assert [task.result() for task in waiting if not task.cancelled()] == [0, 4]
    assert abandoned == [(1, 1)]


@virtual_time
async def test_waiting_until_idle_covers_all_requests() -> None:
    backend = Backend()
    coalescer = Coalescer(backend, max_batch=1)
    waiting = [coalescer.ask(number) for number in range(5)]

    await coalescer.wait_until_idle()

    assert all(answer.done() for answer in waiting)
    await coalescer.wait_until_idle()


def test_a_coalescer_survives_its_event_loop() -> None:
    coalescer = Coalescer(Backend())

    async def leave_it_hanging() -> None:
        coalescer.ask(1)

    async def ask() -> int:
        return await coalescer.ask(3)

    run_virtual(leave_it_hanging())

    assert run_virtual(ask()) == 9


@given(seed=st.integers(0, 2**32), callers=st.integers(1, 40), most=st.integers(1, 10))
def test_in_any_interleaving_each_answer_reaches_its_caller_or_abandoned(seed: int, callers: int, most: int) -> None:
    chance = random.Random(seed)
    answered: dict[int, int] = {}
    abandoned: dict[int, int] = {}

    async def backend(questions: list[int]) -> Sequence[int]:
        assert len(questions) <= most
        await asyncio.sleep(chance.choice([0, 0, 1, 2]))
        return [question**2 for question in questions]

    async def main() -> None:
        coalescer = Coalescer(backend, max_batch=most, abandoned=abandoned.__setitem__)

        async def caller(number: int) -> None:
            await asyncio.sleep(chance.choice([0, 0, 1, 2, 3]))
            answered[number] = await coalescer.answer(number)

        tasks = [asyncio.create_task(caller(number)) for number in range(callers)]
        for task in chance.sample(tasks, callers // 3):
            await asyncio.sleep(chance.choice([0, 0, 1]))
            task.cancel()
        await asyncio.wait(tasks)
        await coalescer.wait_until_idle()

    run_virtual(main())

    assert not set(answered) & set(abandoned)
    assert all(answer == number**2 for number, answer in (answered | abandoned).items())
    assert len(answered) >= callers - callers // 3


async def send_single_request(coalescer: Coalescer[int, int]) -> None:
    """Send a single request; after it, the next requester makes the call itself."""
    await coalescer.answer(0)


@virtual_time
async def test_a_single_request_is_sent_by_its_caller_and_its_error_raised_unchanged() -> None:
    backend, senders = Backend(), list[asyncio.Task[None] | None]()

    async def call(questions: list[int]) -> Sequence[int]:
        senders.append(asyncio.current_task())
        return await backend(questions)

    coalescer = Coalescer(call)
    await send_single_request(coalescer)
    assert await coalescer.answer(3) == 9
    backend.error = StoreUnavailableError("reserve", "down")
    with pytest.raises(StoreUnavailableError) as raised:
        await coalescer.answer(4)

    assert senders[1:] == [asyncio.current_task()] * 2
    assert raised.value is backend.error


@virtual_time
async def test_requests_during_a_single_request_are_sent_together_after_it() -> None:
    backend = Backend()
    coalescer = Coalescer(backend)
    await send_single_request(coalescer)

    answers = await asyncio.gather(*(coalescer.answer(number) for number in range(1, 6)))
    more = await asyncio.gather(*(coalescer.answer(number) for number in range(6, 9)))

    assert answers + more == [number**2 for number in range(1, 9)]
    assert backend.batches == [[0], [1], [2, 3, 4, 5], [6, 7, 8]]


@virtual_time
async def test_a_single_request_is_repeated_and_abandoned_if_its_caller_is_cancelled() -> None:
    backend, abandoned = Backend(), list[tuple[int, int]]()
    coalescer = Coalescer(backend, abandoned=lambda question, answer: abandoned.append((question, answer)))
    await send_single_request(coalescer)
    asking = asyncio.create_task(coalescer.answer(3))
    await asyncio.sleep(0.5)
    beside = asyncio.create_task(coalescer.answer(4))
    await asyncio.sleep(0)

    asking.cancel()
    settled = asyncio.create_task(coalescer.wait_until_idle())
    await asyncio.wait({asking, beside})
    await settled

    assert asking.cancelled()
    assert beside.result() == 16
    assert abandoned == [(3, 9)]
    assert backend.batches == [[0], [3], [4, 3]]


@virtual_time
async def test_waiting_until_idle_covers_a_single_request_and_later_ones() -> None:
    coalescer = Coalescer(Backend())
    await send_single_request(coalescer)
    first = asyncio.create_task(coalescer.answer(1))
    await asyncio.sleep(0.5)
    second = coalescer.ask(2)

    await asyncio.gather(coalescer.wait_until_idle(), coalescer.wait_until_idle())

    assert first.done()
    assert second.done()


@virtual_time
async def test_too_many_answers_to_a_single_request_are_an_error() -> None:
    answers = [[0], [0, 0]]

    async def backend(questions: list[int]) -> Sequence[int]:
        return answers.pop(0)

    coalescer = Coalescer(backend)
    await send_single_request(coalescer)

    with pytest.raises(RuntimeError, match="2 answers to 1 requests"):
        await coalescer.answer(1)


@virtual_time
async def test_a_cancelled_wait_for_the_end_does_not_affect_requests() -> None:
    coalescer = Coalescer(Backend())
    await coalescer.answer(2)
    first = asyncio.ensure_future(coalescer.answer(3))  # a call of its own
    await asyncio.sleep(0.2)
    ends = [asyncio.ensure_future(coalescer.wait_until_idle()) for _ in range(2)]
    await asyncio.sleep(0.2)
    second = asyncio.ensure_future(coalescer.answer(4))

    ends[0].cancel()

    assert list(await asyncio.gather(first, second)) == [9, 16]
    await ends[1]
    assert ends[0].cancelled()
