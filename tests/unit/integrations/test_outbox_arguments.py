"""What an outbox of plain code accepts."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.config.sections import KafkaSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.sqlalchemy import Outbox


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


@pytest.mark.parametrize("given", [{}, "order_placed", OrderPlaced, None])
def test_only_events_are_published(given: Any) -> None:
    outbox = Outbox(Settings(), service="shop")
    refused = pytest.raises(TypeError, match=rf"takes an event, .*BaseEvent.*, not {type(given).__name__}")

    with Session(create_engine("sqlite://")) as session, outbox(session) as out, refused:
        out.publish(given)


@pytest.mark.parametrize("settings", [{}, None, KafkaSettings(), Settings])
def test_an_outbox_needs_settings(settings: Any) -> None:
    with pytest.raises(
        ApplicationError, match=r"an outbox needs the settings, as in Outbox\(load_settings\(\), service"
    ):
        Outbox(settings, service="shop")


@pytest.mark.parametrize("service", ["", " ", 3, None, b"shop"])
def test_an_outbox_needs_the_name_of_a_service(service: Any) -> None:
    with pytest.raises(ApplicationError, match=f"needs the name of the service that publishes, .*, not {service!r}"):
        Outbox(Settings(), service=service)
