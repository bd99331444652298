"""What `EventPublisher` says of an event that no broker has received."""

from __future__ import annotations

import socket

import pytest

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import PublishError
from integr8s_idem.worker.publisher import EventPublisher


async def test_without_a_connection_the_error_says_that_nothing_was_sent() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{nobody.getsockname()[1]}"
        publisher = EventPublisher(KafkaSettings(bootstrap_servers=servers, request_timeout_seconds=1))
        with pytest.raises(PublishError) as caught:
            await publisher.send("orders", b"1", b"{}", [])
        await publisher.close()

    text = str(caught.value)
    assert text.startswith("an event for topic orders was not sent, because there was no connection to a broker: Kafka")
    assert text.count("KafkaConnectionError") == 1
    assert "may have arrived" not in text
    assert not caught.value.may_have_arrived


def test_an_event_that_was_sent_may_have_arrived() -> None:
    assert "It may have arrived" in str(PublishError("orders", "TimeoutError"))
