"""HTTP: a forged stored response results in a problem response, and raises nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from random import Random
from typing import Any

import h11
import pytest

from integr8s_idem.integrations.http_problems import Problems
from integr8s_idem.integrations.http_responses import MEDIA_TYPE, REPLAYED, Response, response_of
from integr8s_idem.records import Completed, StoredResult

pytestmark = pytest.mark.scenario(128)

FORGED = [
    b"",
    b"\n",
    b"1",
    b"null\nbody",
    b"{}\n",
    b"[200]\n",
    b"[200, null]\n",
    b"[200, 7]\n",
    b"[200, {}]\n",
    b'[200, "ab"]\n',
    b"[200, [7]]\n",
    b'[200, ["ab"]]\n',
    b"[200, [[7, 7]]]\n",
    b'[200, [["a", null]]]\n',
    b'[200, [["a", "b", "c"]]]\n',
    b'["200", []]\n',
    b"[true, []]\n",
    b"[200.5, []]\n",
    b"[0, []]\n",
    b"[100, []]\n",
    b"[999, []]\n",
    b"[-1, []]\n",
    b"[" + b"9" * 5_000 + b", []]\n",
    b"[NaN, []]\n",
    b"[204, []]\nbody",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe\n",
    b'[200, [["", "x"]]]\n',
    b'[200, [["a b", "x"]]]\n',
    b'[200, [["a:", "x"]]]\n',
    b'[200, [["x", "a\\r\\nset-cookie: b"]]]\n',
    b'[200, [["x\\r\\ny", "z"]]]\n',
    b'[200, [["x", "\\u0000"]]]\n',
    b'[200, [["x", "\\u20ac"]]]\n',
    b'[200, [["x", "\\ud800"]]]\n',
    b'[200, [["transfer-encoding", "chunked"]]]\nbody',
    b'[200, [["Connection", "upgrade"]]]\n',
    b'[200, [["content-length", "7"]]]\nbody',
    b'[200, [["content-length", "4"], ["content-length", "5"]]]\nbody',
    b'[200, [["content-length", "-4"]]]\nbody',
]


def completed(body: bytes, media_type: str = MEDIA_TYPE) -> Completed:
    return Completed(key="k", attempt=1, completed_at=datetime.now(UTC), result=StoredResult(body, media_type))


@pytest.mark.parametrize("body", FORGED, ids=lambda body: repr(body[:40]))
def test_a_forged_stored_response_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        response_of(StoredResult(body, MEDIA_TYPE))
    problem = Problems().for_outcome(completed(body))
    assert problem.status == 409
    assert b"cannot be read" in problem.body


def test_a_result_that_is_not_a_response_is_rejected() -> None:
    assert Problems().for_outcome(completed(b"[200, []]\n", "application/json")).status == 409


def _damaged(random: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(3):
            case 0:
                changed[at:at] = random.choice((b"[", b"]", b'"', b"{", b",", b"\n", b"null", b"7", b"\\r\\n", b"\xff"))
            case 1:
                del changed[at : at + random.randint(1, 8)]
            case 2 if at < len(changed):
                changed[at] = random.randrange(256)
    return bytes(changed)


def _send(response: Response) -> None:
    """Send a response like a server. Raises `LocalProtocolError` if it is invalid."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
    server.next_event()
    assert server.send(h11.Response(status_code=response.status, headers=response.headers))
    server.send(h11.Data(data=response.body))
    server.send(h11.EndOfMessage())


def test_responses_decoded_from_damaged_bytes_can_be_sent() -> None:
    random = Random(17)
    headers = [["content-length", "4"], ["content-type", "text/plain"], ["x-name", "Zo\u00eb"]]
    whole = json.dumps([201, headers]).encode() + b"\nbody"
    sent = 0
    for _ in range(5_000):
        try:
            response = response_of(StoredResult(_damaged(random, whole), MEDIA_TYPE))
        except ValueError:
            continue
        _send(response)
        assert response.headers[-1] == REPLAYED
        sent += 1
    assert sent > 100


def test_every_response_survives_storage() -> None:
    headers: Any = [(b"content-length", b"2"), (b"link", b"<a>"), (b"link", b""), (b"x", bytes(range(0x21, 0x7F)))]
    response = response_of(Response(201, headers, b"ok").stored(()))
    assert (response.status, response.headers, response.body) == (201, [*headers, REPLAYED], b"ok")
