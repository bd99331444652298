"""Forged or damaged stored responses: either the library's error, or a response that any server can send."""

from __future__ import annotations

import json
from random import Random
from typing import Final

import h11

from integr8s_idem.integrations.http_responses import MEDIA_TYPE, PER_CONNECTION, REPLAYED, Response, response_of
from integr8s_idem.records import StoredResult
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import damaged, text, value

_NAMES: Final = ("x", "link", "X-Name", "Transfer-Encoding", "connection")


def replayed(random: Random) -> Figures:
    """Decode a stored response."""
    stored = StoredResult(_body(random), MEDIA_TYPE if random.random() < 0.95 else text(random))
    try:
        response = response_of(stored)
    except ValueError:
        return Figures(refused_responses=1)
    assert response.headers[-1] == REPLAYED
    assert not PER_CONNECTION & {name.decode() for name, _ in response.headers}, response.headers
    send(response)
    return Figures(sent_responses=1)


def _body(random: Random) -> bytes:
    if random.random() < 0.3:
        head = [value(random, 1), value(random)] if random.random() < 0.7 else value(random)
        return json.dumps(head).encode() + b"\n" + random.randbytes(3)
    headers = [["content-length", "4"], ["content-type", "text/plain"], [random.choice(_NAMES), text(random)]]
    whole = json.dumps([random.choice((200, 201, 204, 410)), headers]).encode() + b"\nbody"
    return damaged(random, whole) if random.random() < 0.8 else whole


def send(response: Response) -> None:
    """Send a response like a server. Raises `LocalProtocolError` if it is invalid."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
    server.next_event()
    server.send(h11.Response(status_code=response.status, headers=response.headers))
    server.send(h11.Data(data=response.body))
    server.send(h11.EndOfMessage())
