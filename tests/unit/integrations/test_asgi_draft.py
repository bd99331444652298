"""Conformance with draft-ietf-httpapi-idempotency-key-header, revision 06: one check per requirement of the server.

Section numbers refer to the draft, and for the syntax to RFC 8941.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.support.http_shop import Shop, problem_in, shop

Check = Callable[[], Awaitable[None]]
RULES: list[Rule] = []


@dataclass(frozen=True)
class Rule:
    section: str
    word: str
    """The requirement level: MUST, SHOULD or MAY."""
    statement: str
    check: Check


def rule(section: str, word: str, statement: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(section, word, statement, check))
        return check

    return register


async def sent(here: Shop, *values: str, body: bytes = b"{}", method: str = "POST") -> httpx.Response:
    headers = [("Idempotency-Key", value) for value in values]
    return await here.client.request(method, "/orders", content=body, headers=headers)


async def done_twice(here: Shop, first: str, again: str) -> None:
    """Check that both spellings are the same key."""
    assert (await sent(here, first)).status_code == 201
    assert (await sent(here, again)).headers["idempotency-replayed"] == "true"


@rule("2.1", "MUST", "the value is a String of a Structured Field Item")
async def _() -> None:
    for value in ('"8e03978e-40d5-43e8-bc93-6894a57f9324"', '"clkyoesmbgybucifusbbtdsbohtyuuwz"', '" "', '"?"'):
        async with shop() as here:
            await done_twice(here, value, value)


@rule("2.1", "MUST", "a Token, Integer, Boolean, Byte Sequence or List is rejected")
async def _() -> None:
    async with shop() as here:
        for value in ("token", "17", "1.5", "?1", ":YQ==:", '"a", "b"', '("a" "b")', "@1659578233"):
            problem_in(await sent(here, value), 400)
        assert not here.bodies


@rule("RFC 8941 3.3.3", "MUST", "a backslash may only escape a quote or a backslash")
async def _() -> None:
    async with shop() as here:
        await done_twice(here, r'"a\"b"', r'"a\"b"')
        await done_twice(here, r'"a\\b"', r'"a\\b"')
        for value in (r'"a\b"', '"a"b"', '"a\\"', '"'):
            problem_in(await sent(here, value), 400)


@rule("RFC 8941 4.2", "MUST", "spaces around the item are ignored, any other text after it is rejected")
async def _() -> None:
    async with shop() as here:
        await done_twice(here, '"a"', '  "a"  ')
        problem_in(await sent(here, '"a" x'), 400)


@rule("RFC 8941 4.2", "MUST", "several header lines are one field, which is not a valid Item")
async def _() -> None:
    async with shop() as here:
        problem_in(await sent(here, '"a"', '"b"'), 400)
        problem_in(await sent(here, '"a"', '"a"'), 400)


@rule("2.2", "MUST", "a key is not used with another payload")
async def _() -> None:
    async with shop() as here:
        await sent(here, '"a"', body=b'{"amount":1}')
        problem_in(await sent(here, '"a"', body=b'{"amount":2}'), 422)
        assert len(here.bodies) == 1


@rule("2.2", "RECOMMENDED", "UUIDs of any version and case are accepted, and different spellings are different keys")
async def _() -> None:
    async with shop() as here:
        await sent(here, '"018f3b1e-7c1a-7b4e-8a1b-0242ac120002"')
        await sent(here, '"018F3B1E-7C1A-7B4E-8A1B-0242AC120002"')
        assert len(here.bodies) == 2


@rule("2.3", "MAY", "keys expire after a configurable time")
async def _() -> None:
    async with shop(config={"default_ttl_seconds": 86_400}) as here:
        await sent(here, '"a"')
        [record] = [record async for record in here.store.scan("")]
        assert record.settled_at is not None
        assert record.expires_at is not None
        assert (record.expires_at - record.settled_at).total_seconds() == 86_400


@rule("2.4", "MAY", "requests are distinguished by a fingerprint of the whole payload")
async def _() -> None:
    async with shop() as here:
        await sent(here, '"a"', body=b'{"a":1,"b":2}')
        problem_in(await sent(here, '"a"', body=b'{"b":2,"a":1}'), 422)


@rule("2.6", "SHOULD", "the first request is processed and answered with its own status")
async def _() -> None:
    async with shop() as here:
        first = await sent(here, '"a"')
        assert (first.status_code, first.json()) == (201, {"order": 1})
        assert "idempotency-replayed" not in first.headers


@rule("2.6", "SHOULD", "a retry of a completed request gets its successful response")
async def _() -> None:
    async with shop() as here:
        first, again = await sent(here, '"a"'), await sent(here, '"a"')
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert len(here.bodies) == 1


@rule("2.6", "SHOULD", "a retry of a completed request gets its error response")
async def _() -> None:
    async def declined(request: Request) -> Response:
        return JSONResponse({"declined": True}, status_code=402)

    async with shop(declined) as here:
        first, again = await sent(here, '"a"'), await sent(here, '"a"')
        assert (first.status_code, again.status_code) == (402, 402)
        assert first.content == again.content
        assert len(here.bodies) == 1


@rule("2.6", "SHOULD", "a retry of a running request gets a conflict error")
async def _() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with shop(slow) as here:
        first = asyncio.create_task(sent(here, '"a"'))
        await started.wait()
        problem = problem_in(await sent(here, '"a"'), 409)
        assert problem["title"] == "A request is outstanding for this Idempotency-Key"
        go_on.set()
        assert (await first).text == "done"


@rule("2.7", "SHOULD", "a missing required key gets 400 and a link to the documentation")
async def _() -> None:
    async with shop(required=True) as here:
        assert problem_in(await sent(here), 400)["title"] == "Idempotency-Key is missing"
        assert not here.bodies


@rule("2.7", "SHOULD", "another payload gets 422 and a link to the documentation")
async def _() -> None:
    async with shop() as here:
        await sent(here, '"a"', body=b"1")
        assert problem_in(await sent(here, '"a"', body=b"2"), 422)["title"] == "Idempotency-Key is already used"


@rule("2.7", "MUST", "an unchanged invalid request gets the same error again")
async def _() -> None:
    async with shop(required=True) as here:
        await sent(here, '"a"', body=b"1")
        for _ in range(2):
            problem_in(await sent(here), 400)
            problem_in(await sent(here, '"a"', body=b"2"), 422)
        assert len(here.bodies) == 1


@rule("2.7", "MUST", "after 409 the same request may be retried unchanged")
async def _() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return PlainTextResponse("done")

    async with shop(slow) as here:
        first = asyncio.create_task(sent(here, '"a"'))
        await started.wait()
        assert (await sent(here, '"a"')).status_code == 409
        go_on.set()
        await first
        assert (await sent(here, '"a"')).text == "done"


@rule("2.7", "SHOULD", "a transient error is passed on unchanged, and a retry is processed")
async def _() -> None:
    for status in (401, 403, 429, 500, 502, 503, 504):
        statuses = [status, 201]

        async def answer(request: Request, left: list[int] = statuses) -> Response:
            return Response(status_code=left.pop(0))

        async with shop(answer) as here:
            assert [(await sent(here, '"a"')).status_code for _ in range(3)] == [status, 201, 201]
            assert len(here.bodies) == 2


@rule("1", "MUST", "idempotent methods are not guarded")
async def _() -> None:
    async with shop(required=True) as here:
        for method in ("GET", "PUT", "HEAD"):
            assert (await sent(here, method=method)).status_code == 201
            assert (await sent(here, "nonsense", method=method)).status_code == 201


@rule("5", "best practice", "a key is validated before it is used or looked up")
async def _() -> None:
    async with shop() as here:
        for value in ('"a\x7f"', '"ä"', '"' + "a" * 256 + '"', '""', "'a'"):
            headers: Any = [(b"Idempotency-Key", value.encode("latin-1"))]
            problem_in(await here.client.post("/orders", headers=headers), 400)
        assert not here.bodies
        assert not here.store.calls


@rule("5", "best practice", "the lookup key contains the client's key and its identity")
async def _() -> None:
    async with shop() as here:
        for caller in ("ada", "bob"):
            await here.order(headers={"Authorization": caller})
        assert len(here.bodies) == 2


@rule("5", "best practice", "no key matches another one, regardless of its characters")
async def _() -> None:
    async with shop(identity=lambda connection: connection.headers["x-user"]) as here:
        pairs = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("", "a"), ("-", "a"), ("*", "*"), ("a", "*")]
        for user, key in pairs:
            headers = {"X-User": user, "Idempotency-Key": f'"{key}"'}
            assert "idempotency-replayed" not in (await here.client.post("/orders", headers=headers)).headers
        assert len(here.bodies) == len(pairs)


@rule("RFC 9457 3.1", "MUST", "a problem contains the status of its response, and its type is a URI")
async def _() -> None:
    async with shop(required=True, max_request_bytes=10) as here:
        for response in (await sent(here), await sent(here, "x"), await sent(here, '"a"', body=b"x" * 11)):
            problem = problem_in(response, response.status_code)
            assert problem["type"].startswith("urn:integr8s-idem:")
            assert {type(value) for value in (problem["title"], problem["detail"])} == {str}


@pytest.mark.parametrize("draft_rule", RULES, ids=lambda each: f"{each.section} {each.word}: {each.statement}")
async def test_the_middleware_follows_the_draft(draft_rule: Rule) -> None:
    await draft_rule.check()
