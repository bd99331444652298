"""Static members of consumer groups, which keep their partitions while they restart.

aiokafka sends the id of an instance when it joins a group, and does not leave the group when it is closed.  It does
not implement the other half: that a member ends when another one has joined with its id.  Its heartbeats and commits do
not contain the id, so the broker answers that it does not know the member, and aiokafka joins anew, with the same id.
Two workers with one id would take it from each other at every heartbeat.

Here, a member that was replaced joins again under its earlier member id.  The broker then answers either that the id of
its instance belongs to another member, which ends this one, or that its session has expired, and aiokafka joins anew.
"""

from __future__ import annotations

import re
import socket
from typing import Any, Final

from aiokafka.errors import BrokerResponseError, KafkaError, kafka_errors

from integr8s_idem.worker.kafka_protocols import Consumer

_FENCED: Final = 82
_NEW_MEMBER: Final = ""
_MOST_CHARACTERS: Final = 249
_INVALID: Final = re.compile(r"[^A-Za-z0-9._-]")


class FencedInstanceIdError(BrokerResponseError):
    """The response of a broker to a member whose instance id belongs to another member."""

    errno = _FENCED
    message = "FENCED_INSTANCE_ID"
    description = "Another member has joined with the same group_instance_id."


# aiokafka reports responses that it does not know without their code.
kafka_errors.setdefault(_FENCED, FencedInstanceIdError)


def instance_id(template: str, service: str, process: int) -> str:
    """Return the id of one worker, unique among the services and processes that share the settings.

    Args:
        template: The setting `group_instance_id`; `{hostname}` in it is the name of the host.
        service: Name of the service.
        process: Number of the process among those of its supervisor, from 1.
    """
    host = template.replace("{hostname}", socket.gethostname())
    suffix = _INVALID.sub("-", f".{service}.{process}")[-_MOST_CHARACTERS // 2 :]
    return _INVALID.sub("-", host)[: _MOST_CHARACTERS - len(suffix)] + suffix


def is_fenced(error: BaseException) -> bool:
    """Return whether `error` of the client says that another member has taken the id."""
    # aiokafka wraps the error in another one, whose text is its representation.
    return isinstance(error, KafkaError) and "FencedInstanceId" in f"{error!r}"


class StaticMembership:
    """The membership of one client in its group."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer: Any = consumer
        self._member_id = _NEW_MEMBER
        """The last id that the broker gave it."""

    def joined(self) -> None:
        """Note that the client has joined its group."""
        self._member_id = self._coordinator.member_id

    def rejoins(self) -> None:
        """Let the client, which is about to join again, do so as the member that it was."""
        if self._coordinator.member_id == _NEW_MEMBER:
            self._coordinator.member_id = self._member_id

    def fenced(self) -> None:
        """Keep the client, whose id was taken, from taking it back before it is closed."""
        if self._coordinator.member_id == _NEW_MEMBER:
            self._coordinator.member_id = self._member_id or "fenced"

    @property
    def _coordinator(self) -> Any:
        return self._consumer._coordinator  # noqa: SLF001  # nothing else has the id of the member
