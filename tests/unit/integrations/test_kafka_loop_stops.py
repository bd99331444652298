"""Stops of confluent-kafka loops that wait, without a broker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from integr8s_idem import IdempotencyManager
from integr8s_idem.errors import InProgressError
from integr8s_idem.integrations import confluent
from integr8s_idem.integrations.kafka_loops import LONGEST_PAUSE
from tests.support.conditions import eventually
from tests.support.fake_loop_consumers import FakeConfluent, reserve_elsewhere
from tests.support.guarded import plain_manager


class Stopped:
    """A loop in a thread, which ends because `stop` is set."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self.consumer: Any = FakeConfluent(2)
        self.manager = manager
        self.stop = threading.Event()
        self.errors: list[Exception] = []
        self.thread = threading.Thread(target=self._consume, daemon=True)
        self.thread.start()

    def _consume(self) -> None:
        for delivery in confluent.guarded(self.consumer, self.manager, stop=self.stop):
            try:
                delivery.run(self._fail)
            except Exception as error:  # noqa: BLE001  # the loop continues after errors
                self.errors.append(error)

    def _fail(self, message: Any) -> None:
        raise OSError

    async def ended(self) -> None:
        """Set `stop`, and return once the loop has ended; fail if it waits much longer than it should."""
        self.stop.set()
        await eventually(lambda: not self.thread.is_alive(), within=20, state=lambda: self.errors)


async def test_stop_ends_a_loop_whose_message_is_in_progress_elsewhere() -> None:
    manager = plain_manager()
    await reserve_elsewhere(manager)
    loop = Stopped(manager)
    await eventually(lambda: loop.consumer.is_paused)

    await loop.ended()

    assert [type(error) for error in loop.errors] == [InProgressError]
    assert loop.consumer.current_position == 0
    assert not loop.consumer.commits


async def test_stop_ends_a_loop_that_pauses_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.confluent.pause_after", lambda _: LONGEST_PAUSE)
    loop = Stopped(plain_manager())
    await eventually(lambda: loop.errors)

    await loop.ended()

    assert [type(error) for error in loop.errors] == [OSError]
    assert loop.consumer.current_position == 0
    assert not loop.consumer.commits
