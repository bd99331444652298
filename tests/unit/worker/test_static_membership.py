"""Ids of static members: unique among the workers that share settings, the same after a restart."""

from __future__ import annotations

import socket

import pytest
from aiokafka.errors import KafkaError, for_code
from pydantic import ValidationError

from integr8s_idem.config import KafkaSettings
from integr8s_idem.worker.static_membership import FencedInstanceIdError, instance_id, is_fenced


def test_each_service_and_each_process_of_a_host_has_an_id_of_its_own() -> None:
    ids = [instance_id("{hostname}", service, process) for service in ("billing", "audit") for process in (1, 2)]

    assert len(set(ids)) == 4
    assert ids == [
        instance_id("{hostname}", service, process) for service in ("billing", "audit") for process in (1, 2)
    ]


def test_an_id_contains_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "billing-0")

    assert instance_id("eu.{hostname}", "billing", 2) == "eu.billing-0.billing.2"


def test_an_id_has_only_characters_and_lengths_that_kafka_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h\u00f6st" * 100)

    found = instance_id("{hostname}", "billing \u2192 audit" * 50, 12)

    assert len(found) <= 249
    assert found.isascii()
    assert found.endswith(".12")


@pytest.mark.parametrize("text", ["", "{host}", "a b", "{hostname", "x" * 201])
def test_the_setting_accepts_no_other_placeholders_and_characters(text: str) -> None:
    with pytest.raises(ValidationError):
        KafkaSettings(group_instance_id=text)


def test_the_client_reports_that_it_was_fenced_by_name() -> None:
    error = for_code(82)()

    assert isinstance(error, FencedInstanceIdError)
    assert is_fenced(KafkaError(repr(error))), "this is how aiokafka wraps errors of JoinGroup"
    assert not is_fenced(KafkaError(repr(for_code(25)())))
    assert not is_fenced(ValueError("FencedInstanceIdError"))
