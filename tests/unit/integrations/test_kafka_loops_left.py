"""Consumer loops that are left and entered again on the same consumer, without a broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import pytest

from integr8s_idem import IdempotencyManager
from integr8s_idem.integrations import aiokafka, confluent
from tests.support.conditions import eventually
from tests.support.fake_loop_consumers import FakeAiokafka, FakeConfluent, reserve_elsewhere
from tests.support.guarded import plain_manager


class HandlerError(Exception):
    """An error of the function."""


class Bench:
    """A consumer of six records, and the offsets that its loops have handled."""

    def __init__(self, consumer: Any, manager: IdempotencyManager | None = None) -> None:
        self.consumer = consumer
        self.manager = manager or plain_manager()
        self.handled: list[int] = []
        self.errors: dict[int, BaseException] = {}
        """Errors of the function by offset, each raised once."""
        self.stop = threading.Event()

    def handle(self, offset: int) -> None:
        if error := self.errors.pop(offset, None):
            raise error
        self.handled.append(offset)

    def confluent_loop(self, **options: Any) -> Any:
        return confluent.guarded(self.consumer, self.manager, stop=self.stop, **options)

    def aiokafka_loop(self, **options: Any) -> Any:
        return aiokafka.guarded(self.consumer, self.manager, **options)

    def consume(self, until: Callable[[int], bool] = lambda _: False) -> None:
        """Handle messages until the last one is handled, or `until` leaves the loop before it runs an offset."""
        for delivery in self.confluent_loop():
            if until(delivery.record.offset):
                break
            delivery.run(lambda message: self.handle(message.offset()))
            if delivery.record.offset == 5:
                break

    async def consume_async(self, until: Callable[[int], bool] = lambda _: False) -> None:
        async with aclosing(self.aiokafka_loop()) as deliveries:
            async for delivery in deliveries:
                if until(delivery.record.offset):
                    break
                await delivery.run(self.call)
                if delivery.record.offset == 5:
                    break

    async def call(self, record: Any) -> None:
        self.handle(record.offset)


@pytest.mark.parametrize("error", [HandlerError(), KeyboardInterrupt()], ids=repr)
def test_a_message_whose_error_leaves_a_loop_is_fetched_again_by_the_next_loop(error: BaseException) -> None:
    bench = Bench(FakeConfluent(6))
    bench.errors[2] = error

    with pytest.raises(type(error)):
        bench.consume()
    assert bench.consumer.commits == [2]
    bench.consume()

    assert bench.handled == [0, 1, 2, 3, 4, 5]
    assert bench.consumer.commits == [2, 6]


@pytest.mark.parametrize("error", [HandlerError(), asyncio.CancelledError()], ids=repr)
async def test_records_after_an_error_that_leaves_a_loop_are_fetched_again_by_the_next_loop(
    error: BaseException,
) -> None:
    bench = Bench(FakeAiokafka(6))
    bench.errors[1] = error

    with pytest.raises(type(error)):
        await bench.consume_async()
    assert bench.consumer.commits == [1]
    await bench.consume_async()

    assert bench.handled == [0, 1, 2, 3, 4, 5]
    assert bench.consumer.commits == [1, 6]


async def test_a_record_that_a_break_leaves_is_fetched_again_by_the_next_loop() -> None:
    by_thread, by_task = Bench(FakeConfluent(6)), Bench(FakeAiokafka(6))

    await asyncio.to_thread(by_thread.consume, lambda offset: offset == 1)
    await by_task.consume_async(lambda offset: offset == 1)
    await asyncio.to_thread(by_thread.consume)
    await by_task.consume_async()

    assert by_thread.handled == by_task.handled == [0, 1, 2, 3, 4, 5]
    assert by_thread.consumer.commits == by_task.consumer.commits == [1, 6]


async def test_records_that_a_break_after_the_run_leaves_are_not_handled_twice() -> None:
    by_thread, by_task = Bench(FakeConfluent(6)), Bench(FakeAiokafka(6))

    def leave_after_one() -> None:
        for delivery in by_thread.confluent_loop():
            delivery.run(lambda message: by_thread.handle(message.offset()))
            break

    await asyncio.to_thread(leave_after_one)
    async with aclosing(by_task.aiokafka_loop()) as deliveries:
        await (await anext(deliveries)).run(by_task.call)

    assert (by_thread.consumer.current_position, by_task.consumer.current_position) == (1, 1)
    assert by_thread.consumer.commits == by_task.consumer.commits == [1]


async def test_a_loop_closes_the_previous_one_of_its_consumer() -> None:
    by_thread, by_task = Bench(FakeConfluent(6)), Bench(FakeAiokafka(6))
    left: list[Any] = [by_thread.confluent_loop(), by_task.aiokafka_loop()]

    def leave() -> None:
        next(left[0]).run(lambda message: by_thread.handle(message.offset()))
        next(left[0])

    await asyncio.to_thread(leave)
    await (await anext(left[1])).run(by_task.call)
    await anext(left[1])
    await asyncio.to_thread(by_thread.consume)
    await by_task.consume_async()
    left[0].close()
    await left[1].aclose()

    assert by_thread.handled == by_task.handled == [0, 1, 2, 3, 4, 5]
    assert by_thread.consumer.commits == by_task.consumer.commits == [1, 6]
    assert (by_thread.consumer.current_position, by_task.consumer.current_position) == (6, 6)


async def test_a_generator_that_asyncio_closes_later_does_not_disturb_the_next_loop() -> None:
    bench = Bench(FakeAiokafka(6))
    bench.errors[1] = HandlerError()

    async def leave() -> None:
        async for delivery in bench.aiokafka_loop():
            await delivery.run(bench.call)

    with pytest.raises(HandlerError):
        await leave()
    await bench.consume_async()

    assert bench.handled == [0, 1, 2, 3, 4, 5]
    assert bench.consumer.commits == [1, 6]


@pytest.mark.parametrize("raised", [HandlerError(), KeyboardInterrupt()], ids=repr)
def test_a_loop_without_its_partition_or_consumer_ends_with_its_own_error(raised: BaseException) -> None:
    def revoke(consumer: FakeConfluent) -> None:
        consumer.is_assigned = False

    def leave(bench: Bench, lose: Callable[[Any], None]) -> None:
        with closing(bench.confluent_loop()) as deliveries:
            next(deliveries)
            lose(bench.consumer)
            raise raised

    for lose in revoke, FakeConfluent.close:
        bench = Bench(FakeConfluent(6))
        with pytest.raises(type(raised)):
            leave(bench, lose)
        assert bench.consumer.current_position == 1
        assert not bench.consumer.commits


def test_a_failed_seek_does_not_hide_the_error_of_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(FakeConfluent(6))

    def refuse(partition: Any) -> None:
        bench.consumer.is_assigned = False
        FakeConfluent.seek(bench.consumer, partition)

    bench.consumer.seek = refuse
    bench.errors[0] = HandlerError()
    with pytest.raises(HandlerError):
        bench.consume()

    assert "could not seek back to the message that is not processed" in caplog.text


async def test_records_of_a_revoked_partition_are_left_to_its_next_owner() -> None:
    bench = Bench(FakeAiokafka(6))

    async with aclosing(bench.aiokafka_loop()) as deliveries:
        await (await anext(deliveries)).run(bench.call)
        await anext(deliveries)
        bench.consumer.is_assigned = False

    assert bench.consumer.current_position == 3
    assert not bench.consumer.commits


def test_an_interrupt_while_a_message_is_in_progress_elsewhere_leaves_no_partition_paused() -> None:
    bench = Bench(FakeConfluent(6))
    asyncio.run(reserve_elsewhere(bench.manager))

    def interrupt() -> None:
        if bench.consumer.is_paused:
            raise KeyboardInterrupt

    bench.consumer.on_poll = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.consume()

    assert not bench.consumer.is_paused
    assert bench.consumer.current_position == 0


async def test_a_cancellation_while_a_record_is_in_progress_elsewhere_leaves_no_partition_paused() -> None:
    bench = Bench(FakeAiokafka(6))
    await reserve_elsewhere(bench.manager)

    consuming = asyncio.create_task(bench.consume_async())
    await eventually(lambda: bench.consumer.is_paused)
    consuming.cancel()
    await asyncio.wait({consuming})

    assert not bench.consumer.is_paused
    assert bench.consumer.current_position == 0
