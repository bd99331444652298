"""HTTP requests of several callers: no caller gets a response of another one, and nothing is raised."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cache
from random import Random
from typing import Any, Final

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, by_authorization
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import text

ALLOWED: Final = {200, 400, 401, 409, 413, 422}
_HEADERS: Final = ("authorization", "host", "idempotency-key")
_SAID: Final = (
    b"",
    b'""',
    b'"k"',
    b'"k',
    b"k",
    b'"\\""',
    b"Bearer a",
    b"Bearer b",
    b"a.example",
    b"A.example:80",
    b"\xff",
)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def asked(random: Random) -> Figures:
    """Send a few similar requests to an application."""
    logger = logging.getLogger("integr8s_idem.integrations")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return _runner().run(_asked(random))
    finally:
        logger.setLevel(level)


async def _application(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the caller and the request."""
    message = await receive()
    content = _expected_body(scope, message["body"])
    headers = [(b"content-length", b"%d" % len(content)), (b"Set-Cookie", b"session=1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _expected_body(scope: Any, body: bytes) -> bytes:
    return json.dumps([sorted(_identity(scope)), body.hex()]).encode()


def _identity(scope: Any) -> list[str]:
    caller = [f"{name!r}={value!r}" for name, value in scope["headers"] if name == b"authorization"]
    hosts = b",".join(value for name, value in scope["headers"] if name == b"host").strip().lower()
    return [
        *caller,
        f"host={hosts.removesuffix(b':80')!r}",
        scope["method"],
        scope["path"],
        repr(scope["query_string"]),
    ]


async def _asked(random: Random) -> Figures:
    manager = IdempotencyManager(IdempotencyConfig(), MemoryIdempotencyRepository(), scope="shop")
    identity = by_authorization(anonymous=random.choice(("refuse", "share")))
    guarded = IdempotencyKeyMiddleware(_application, manager, identity=identity, bare_keys=random.random() < 0.5)
    counted = Figures(requests=0)
    base = _request(random)
    for _ in range(4):
        scope = {**base, **({} if random.random() < 0.3 else _changes(random, base))}
        await _ask(guarded, scope, random.choice((b"", b"{}", random.randbytes(4))), counted)
    return counted


async def _ask(guarded: Any, scope: dict[str, Any], body: bytes, counted: Figures) -> None:
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await guarded({**scope, "state": {}}, receive, send)
    start = sent[0]
    counted["requests"] += 1
    assert start["status"] in ALLOWED, f"{start} for {scope}"
    if start["status"] == 200:
        received = b"".join(each.get("body", b"") for each in sent[1:])
        assert received == _expected_body(scope, body), f"{received!r} for {scope} {body!r}"
        if (b"idempotency-replayed", b"true") in start["headers"]:
            counted["replayed_responses"] += 1
            assert b"set-cookie" not in {name.lower() for name, _ in start["headers"]}


def _request(random: Random) -> dict[str, Any]:
    return {
        "type": "http",
        "method": random.choice(("POST", "PUT", "PATCH")),
        "path": "/" + text(random, 2),
        "query_string": random.choice((b"", b"a=1")),
        "headers": [
            (b"authorization", b"Bearer a"),
            (b"host", b"a.example"),
            (b"idempotency-key", b'"k"'),
        ],
    }


def _changes(random: Random, base: dict[str, Any]) -> dict[str, Any]:
    match random.randrange(4):
        case 0:
            return {"path": base["path"] + random.choice(("/", ":", "%", "x", "\n", "\u202e"))}
        case 1:
            return {"method": random.choice(("POST", "PUT", "PATCH"))}
        case 2:
            return {"headers": [*base["headers"], (random.choice(_HEADERS).encode(), _random_value(random))]}
    headers = list(base["headers"])
    at = random.randrange(len(headers))
    headers[at] = headers[at][0], _random_value(random)
    return {"headers": headers}


def _random_value(random: Random) -> bytes:
    return random.choice(_SAID) if random.random() < 0.7 else random.randbytes(random.randint(1, 20))
