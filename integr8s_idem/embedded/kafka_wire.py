"""The part of Kafka's protocol that is answered here and not by the emulator: groups, and where the broker is.

Requests and answers are the classes of aiokafka, in versions both sides know.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from aiokafka.protocol import admin, commit, coordination, group, metadata

from integr8s_idem.embedded.consumer_groups import Groups

PRODUCE = 0
FETCH = 1
METADATA = 3
OFFSET_COMMIT = 8
FIND_COORDINATOR = 10
JOIN_GROUP = 11
HEARTBEAT = 12
LEAVE_GROUP = 13
SYNC_GROUP = 14
API_VERSIONS = 18

NODE = 1
"""Id of the emulator's only broker."""

_SPOKEN: dict[int, dict[int, Any]] = {
    METADATA: {cls.API_VERSION: cls for cls in metadata.MetadataRequest._CLASSES},  # noqa: SLF001
    OFFSET_COMMIT: {2: commit.OffsetCommitRequest_v2, 3: commit.OffsetCommitRequest_v3},
    FIND_COORDINATOR: {0: coordination.FindCoordinatorRequest_v0, 1: coordination.FindCoordinatorRequest_v1},
    JOIN_GROUP: {0: group.JoinGroupRequest_v0, 1: group.JoinGroupRequest_v1, 2: group.JoinGroupRequest_v2},
    HEARTBEAT: {0: group.HeartbeatRequest_v0, 1: group.HeartbeatRequest_v1},
    LEAVE_GROUP: {0: group.LeaveGroupRequest_v0, 1: group.LeaveGroupRequest_v1},
    SYNC_GROUP: {0: group.SyncGroupRequest_v0, 1: group.SyncGroupRequest_v1},
}
"""Requests that are served or rewritten here, by API and version: those without compact fields."""

# Forwarded almost unchanged; limited to versions without compact fields as well.
_NEWEST = {PRODUCE: 8, FETCH: 11}

# Newer group protocols are hidden, so that clients use the classic protocol.
_HIDDEN_FROM = 60

# The emulator waits the full time of an empty fetch, even if records arrive in the meantime.
_LONGEST_FETCH_WAIT_MS = 50

_HEADER = struct.Struct(">hhi")
_FETCH_START = struct.Struct(">ii")
_ERROR_CODE = struct.Struct(">h")


@dataclass(frozen=True, slots=True)
class Request:
    """A request: `frame` is the whole request, `body` starts after the header."""

    api: int
    version: int
    correlation: int
    client: str
    body: bytes
    frame: bytes

    @classmethod
    def read(cls, frame: bytes) -> Request:
        api, version, correlation = _HEADER.unpack_from(frame)
        (length,) = _ERROR_CODE.unpack_from(frame, _HEADER.size)
        start = _HEADER.size + 2
        end = start + max(length, 0)
        return cls(api, version, correlation, frame[start:end].decode(), frame[end:], frame)

    @property
    def wants_answer(self) -> bool:
        """Whether the client expects a response.  The emulator responds even to produce requests with acks=0."""
        if self.api != PRODUCE:
            return True
        offset = 0
        if self.version >= 3:  # preceded by the transactional id
            offset = 2 + max(_ERROR_CODE.unpack_from(self.body)[0], 0)
        return bool(_ERROR_CODE.unpack_from(self.body, offset)[0] != 0)

    @property
    def for_emulator(self) -> bytes:
        """The frame to forward: fetches get a shorter wait."""
        if self.api != FETCH:
            return self.frame
        start = len(self.frame) - len(self.body)
        replica, wait = _FETCH_START.unpack_from(self.frame, start)
        patched = _FETCH_START.pack(replica, min(wait, _LONGEST_FETCH_WAIT_MS))
        return self.frame[:start] + patched + self.frame[start + _FETCH_START.size :]

    def decode(self) -> Any:
        return _SPOKEN[self.api][self.version].decode(self.body)

    def answer(self, **fields: Any) -> bytes:
        """Return the frame of a response, without fields that this version lacks."""
        response = _SPOKEN[self.api][self.version].RESPONSE_TYPE
        known = {name: fields.get(name, 0) for name in response.SCHEMA.names}
        encoded: bytes = response(**known).encode()
        return struct.pack(">i", self.correlation) + encoded


class Coordinator:
    """Serves the requests of consumer groups."""

    def __init__(self, groups: Groups, host: str, port: int) -> None:
        self._groups = groups
        self._host = host
        self._port = port
        self._answers: dict[int, Callable[[Request], Awaitable[bytes | None]]] = {
            FIND_COORDINATOR: self._find_coordinator,
            JOIN_GROUP: self._join,
            SYNC_GROUP: self._sync,
            HEARTBEAT: self._heartbeat,
            LEAVE_GROUP: self._leave,
            OFFSET_COMMIT: self._refuse_commit,
        }

    async def answer(self, request: Request) -> bytes | None:
        """Return the frame of the response, or `None` if the emulator must serve the request."""
        answers = self._answers.get(request.api)
        return await answers(request) if answers else None

    def rewrite(self, request: Request, frame: bytes) -> bytes:
        """Replace the address and the API versions in a response of the emulator."""
        if request.api == METADATA:
            return self._rewrite_metadata(request, frame)
        if request.api == API_VERSIONS and request.version <= 2:
            return _rewrite_versions(request, frame)
        return frame

    async def _find_coordinator(self, request: Request) -> bytes:
        return request.answer(coordinator_id=NODE, host=self._host, port=self._port, error_message=None)

    async def _join(self, request: Request) -> bytes:
        asked = request.decode()
        session = asked.session_timeout / 1000
        joined = await self._groups[asked.group].join(
            asked.member_id,
            request.client,
            asked.group_protocols,
            session_seconds=session,
            rebalance_seconds=asked.rebalance_timeout / 1000 if request.version else session,
        )
        return request.answer(
            error_code=joined.error,
            generation_id=joined.generation,
            group_protocol=joined.protocol,
            leader_id=joined.leader,
            member_id=joined.member,
            members=list(joined.members),
        )

    async def _sync(self, request: Request) -> bytes:
        asked = request.decode()
        synced = await self._groups[asked.group].sync(asked.member_id, asked.generation_id, asked.group_assignment)
        return request.answer(error_code=synced.error, member_assignment=synced.assignment)

    async def _heartbeat(self, request: Request) -> bytes:
        asked = request.decode()
        return request.answer(error_code=self._groups[asked.group].check(asked.member_id, asked.generation_id))

    async def _leave(self, request: Request) -> bytes:
        asked = request.decode()
        return request.answer(error_code=self._groups[asked.group].leave(asked.member_id))

    async def _refuse_commit(self, request: Request) -> bytes | None:
        """Return `None`, so that the emulator stores the commit, unless the member is no longer in the group."""
        asked = request.decode()
        error = self._groups[asked.consumer_group].check_commit(asked.consumer_id, asked.consumer_group_generation_id)
        if not error:
            return None
        refused = [(topic, [(part[0], error) for part in partitions]) for topic, partitions in asked.topics]
        return request.answer(topics=refused)

    def _rewrite_metadata(self, request: Request, frame: bytes) -> bytes:
        response = _SPOKEN[METADATA][request.version].RESPONSE_TYPE.decode(BytesIO(frame[4:]))
        response.brokers = [(node, self._host, self._port, *rest) for node, _, _, *rest in response.brokers]
        response.controller_id = NODE  # the emulator reports none, which breaks aiokafka's admin client
        encoded: bytes = response.encode()
        return frame[:4] + encoded


def _rewrite_versions(request: Request, frame: bytes) -> bytes:
    shapes: tuple[Any, ...] = (admin.ApiVersionResponse_v0, admin.ApiVersionResponse_v1, admin.ApiVersionResponse_v2)
    response = shapes[request.version].decode(BytesIO(frame[4:]))
    response.api_versions = [
        (api, min(_SPOKEN[api]), max(_SPOKEN[api])) if api in _SPOKEN else (api, low, _NEWEST.get(api, high))
        for api, low, high in response.api_versions
        if api < _HIDDEN_FROM
    ]
    encoded: bytes = response.encode()
    return frame[:4] + encoded
