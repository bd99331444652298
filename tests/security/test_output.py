"""Commands escape hostile records in Redis and dead letters in Kafka, and the HTTP middleware escapes logged paths."""

from __future__ import annotations

import ast
import asyncio
import logging
import sys
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from integr8s_idem.telemetry import Signal
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.packaging.repository import ROOT
from tests.security_fuzz.output import must_be_harmless
from tests.support.dead_letters import Dlq, dead_letter_of, post
from tests.support.http_shop import KEY, shop
from tests.support.kafka.broker import Kafka
from tests.support.keys_desk import Desk
from tests.support.terminal import Terminal
from tests.support.workers import kafka_settings

pytestmark = pytest.mark.scenario(133)

EVIL = "\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\u2028\x08"


@pytest.fixture
def desk(redis_url: str, tmp_path: Path) -> Desk:
    """Create hostile records: names, types and bytes written by another program."""
    with redis.Redis.from_url(redis_url) as client:
        for number, name in enumerate((EVIL, f"billing:{EVIL}", f"billing::{EVIL}x")):
            client.set(f"idempotency:{name}{number}", EVIL)
        client.hset(f"idempotency:{EVIL}hash", EVIL, EVIL)
    return Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"')


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--json"),
        ("show", EVIL),
        ("explain", EVIL),
        ("explain", f"billing:{EVIL}1", "--json"),
        ("release", EVIL, "--yes"),
        ("purge", EVIL, "--yes"),
    ],
    ids=lambda words: words[0],
)
def test_records_with_hostile_names_are_shown_escaped(desk: Desk, words: tuple[str, ...]) -> None:
    change = words[0] in ("release", "purge")
    answer = desk.changing(*words) if change else desk.typed(*words)
    assert answer.stdout + answer.stderr
    must_be_harmless(answer.stdout + answer.stderr)


def test_the_list_escapes_hostile_names_on_a_terminal_too(desk: Desk) -> None:
    with Terminal("keys", "list", folder=desk.folder) as terminal:
        assert terminal.wait() == 0
    assert r"\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\u2028\x08" in terminal.said
    must_be_harmless(terminal.said, allowed="\n\t\r")


def test_commands_print_only_through_the_output_module() -> None:
    """`cli/output.py` escapes control characters."""
    by_themselves = [
        f"{file.name}:{node.lineno}"
        for file in (ROOT / "integr8s_idem" / "cli").glob("*.py")
        if file.name != "output.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.echo", "click.echo", "print", "Console"}
    ]
    # This one only measures the width of a table.
    assert [each.partition(":")[0] for each in by_themselves] == ["top_table.py"]


async def test_a_worker_with_hostile_metrics_is_shown_escaped(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    PrometheusObserver(EVIL, registry).count(Signal.HANDLED, "order_placed")
    page = generate_latest(registry)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + page)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        top = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "integr8s_idem", "top", f"{host}:{port}", "--once"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await top.communicate()
    assert r"\x1b[2J" in said.decode()
    must_be_harmless(said.decode())


async def test_dead_letters_with_hostile_headers_are_shown_escaped(
    kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    source, settings = f"{topic_prefix}order_placed", kafka_settings(kafka, topic_prefix)
    await kafka.create_topics({source: 1, f"{source}.dlq": 1})
    more = [(name, EVIL.encode()) for name in ("trace", f"x{EVIL}")]
    await post(
        settings, [dead_letter_of(1, topic=source, error=EVIL, service=EVIL, reason=EVIL, filling=EVIL, more=more)]
    )
    file = tmp_path / "settings.toml"
    lines = [
        *("[kafka]", f'bootstrap_servers = "{kafka.bootstrap}"', f'topic_prefix = "{topic_prefix}"'),
        *("[store]", 'kind = "redis"', f'url = "{redis_url}"'),
    ]
    file.write_text("\n".join(lines))
    dlq = Dlq(file)
    for words in (
        ("list",),
        ("list", "--json"),
        ("list", "--summary"),
        ("show", f"{source}.dlq:0:0"),
        ("show", f"{source}.dlq:0:0", "--payload"),
        ("replay", "--dry-run"),
        ("replay", "--yes"),
        ("replay", "--yes", "--to", f"{topic_prefix}{EVIL}"),
    ):
        said = await dlq.typed(*words)
        assert said.out + said.err
        must_be_harmless(said.out + said.err)


async def test_the_http_middleware_escapes_logged_paths(caplog: pytest.LogCaptureFixture) -> None:
    async def streamed(request: Request) -> Response:
        return StreamingResponse(iter([b"a", b"b"]))

    async with shop(streamed) as here:
        path = "/orders/%1B%5B2J%0AERROR%20forged/refund"
        assert (await here.client.post(path, headers=KEY)).status_code == 200
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(logged) == 1
    assert r"/orders/\x1b[2J\nERROR forged/refund" in logged[0]
    must_be_harmless(logged[0], allowed="")
