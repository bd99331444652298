"""`integr8s-idem keys` gives the same answers on Redis and on SQLite."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from redis import Redis

from integr8s_idem import IdempotencyManager
from integr8s_idem.cli.keys_format import RESULT_PREVIEW
from integr8s_idem.engine.steps import Steps
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import IdempotencyStatus, Reserved
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql.schema import VERSION
from tests.support.keys_desk import LONG, TRACE, Desk, event
from tests.support.shop import OrderPlaced

APP = ("--app", "tests.support.shop:platform")


@pytest.fixture(params=["redis", "sqlite"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    if request.param == "sqlite":
        return Desk(tmp_path, f'kind = "sqlite"\npath = "{tmp_path / "idem.db"}"')
    return Desk(tmp_path, f'kind = "redis"\nurl = "{request.getfixturevalue("redis_url")}"')


def spoil(url: str, key: str) -> None:
    with Redis.from_url(url) as client:
        client.set(key, b"no record", ex=3600)


# List and show.


def test_every_record_is_listed_with_its_state(desk: Desk) -> None:
    desk.fill()

    found = {one["label"]: one for one in desk.json_lines("list")}

    assert {label: (one["status"], one["lease"]) for label, one in found.items()} == {
        "order_placed:1": ("completed", None),
        "order_placed:2": ("failed", None),
        "held": ("processing", "held"),
        "lapsed": ("processing", "lapsed"),
        "released": ("processing", "released"),
    }
    assert found["order_placed:2"]["error"] == "no such account"
    assert found["order_placed:1"]["result"] == {"content_type": "application/json", "bytes": len(LONG.body)}
    assert found["order_placed:1"]["trace_id"] == TRACE.trace_id.hex()
    assert found["held"]["owner"] == "billing@host-7"
    assert 290 < found["held"]["lease_left_seconds"] <= 300


@pytest.mark.parametrize(
    ("filters", "labels"),
    [
        (("--status", "failed"), ["order_placed:2"]),
        (("--status", "processing", "--lease-ended"), ["lapsed", "released"]),
        (("--event-type", "order_placed"), ["order_placed:1", "order_placed:2"]),
        (("--owner", "billing@host-8"), ["released"]),
        (("--service", "billing", "--newer-than", "1h", "--status", "completed"), ["order_placed:1"]),
        (("--service", "audit"), []),
        (("--older-than", "1h"), []),
    ],
)
def test_records_are_listed_by_filter(desk: Desk, filters: tuple[str, ...], labels: list[str]) -> None:
    desk.fill()

    assert sorted(one["label"] for one in desk.json_lines("list", *filters)) == labels


def test_a_list_in_a_pipe_has_one_line_per_record_and_a_summary_on_stderr(desk: Desk) -> None:
    desk.fill()

    answer = desk.typed("list")

    lines = [line.split("\t") for line in answer.stdout.splitlines()]
    assert Counter(line[0] for line in lines) == {"processing": 3, "completed": 1, "failed": 1}
    assert all(len(line) == 5 and line[-1].startswith("idempotency:billing:") for line in lines)
    assert answer.stderr == "5 records (billing: 1 completed, 1 failed, 3 processing)\n"
    assert len(desk.typed("list", "--limit", "2").stdout.splitlines()) == 2


def test_show_prints_the_whole_record(desk: Desk) -> None:
    desk.fill()

    (shown,) = desk.json_lines("show", "order_placed:1")
    missing = desk.typed("show", "nothing")

    assert shown["result"]["text"] == LONG.body.decode()
    assert LONG.body.decode() in desk.typed("show", "1").stdout
    assert missing.exit_code == 1
    assert "no record" in missing.stderr


def test_internal_entries_of_the_store_are_not_listed(desk: Desk) -> None:
    desk.fill()
    desk.do(lambda store: store.ping())

    assert len(desk.json_lines("list")) == 5


# Explain.


@pytest.mark.parametrize("name", ["1", "order_placed:1", "billing:charge:order_placed:id:1", None])
def test_a_record_is_explained_by_any_of_its_names(desk: Desk, name: str | None) -> None:
    desk.fill()
    full = desk.manage(_full_key)

    answer = desk.explained(name or full)

    (one,) = answer["records"]
    assert one["key"] == full
    assert (one["status"], one["attempt"], one["service"]) == ("completed", 1, "billing")
    assert (one["trace_id"], one["span_id"]) == (TRACE.trace_id.hex(), TRACE.span_id.hex())
    assert one["result"]["text"] == LONG.body.decode()[:RESULT_PREVIEW]
    assert one["next_delivery"].startswith("would not be handled, but answered with the stored result")
    assert answer["read_as"].startswith("a full key" if name is None else "an event's id")


async def _full_key(manager: IdempotencyManager) -> str:
    return manager.space.full(event("1"))


def test_the_explanation_describes_the_state_of_a_record(desk: Desk) -> None:
    desk.fill()

    completed = desk.typed("explain", "1").stdout
    failed = desk.typed("explain", "2").stdout
    held = desk.typed("explain", "held").stdout
    lapsed = desk.typed("explain", "lapsed").stdout

    assert "handled        yes, by billing (handler charge)" in completed
    assert "attempts       1 of at most 3" in completed
    assert f"trace          {TRACE.trace_id.hex()}\n" in completed
    assert f"span           {TRACE.span_id.hex()}\n" in completed
    assert "1,000 bytes of application/json" in completed
    assert "(use --result to show all)" in completed
    assert "(use --result to show all)" not in desk.typed("explain", "1", "--result").stdout
    assert "error          no such account" in failed
    assert "dead letter    in order_placed.dlq" in failed
    assert "not yet: in progress at billing@host-7" in held
    assert "would wait at most 30 s" in held
    assert "the owner crashed or stalled" in lapsed
    assert "taken over and handled, as attempt 2" in lapsed


def test_an_unknown_event_would_be_handled(desk: Desk) -> None:
    desk.fill()

    answer = desk.explained("idempotency:billing:charge:order_placed:id:9")

    assert desk.explained("other:order:1", "--as", "key")["absent"] == []
    assert answer["records"] == []
    assert [one["next_delivery"] for one in answer["absent"]] == ["would be handled, as attempt 1 of at most 3"]
    assert "never seen, or its record has expired" in " ".join(desk.explained("9")["notes"])


def test_with_the_application_every_handler_is_explained(desk: Desk) -> None:
    desk.fill()

    found, missing = desk.explained("1", *APP), desk.explained("order_placed:9", *APP)

    assert [one["label"] for one in found["records"]] == ["order_placed:1"]
    assert [(one["service"], one["handler"], one["event_type"]) for one in missing["absent"]] == [
        ("billing", "charge", "order_placed")
    ]
    assert desk.explained("held", *APP)["records"][0]["status"] == "processing"


def test_a_hashed_key_is_found_only_with_the_application(tmp_path: Path, redis_url: str) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"', "[idempotency]\nhash_keys = true\n")
    desk.take(event("1"))

    assert desk.explained("1")["records"] == []
    assert "keys are hashed" in desk.explained("1")["notes"][0]
    assert desk.explained("1", *APP)["records"][0]["owner"] == "billing@host-7"


def test_generations_and_steps_are_listed_with_their_unit(desk: Desk) -> None:
    resolved = KeyResolver().resolve("charge", OrderPlaced(event_id="1", order_id="1"))

    async def fulfil(manager: IdempotencyManager) -> None:
        async def work() -> str:
            steps: Steps = manager.steps()
            await steps.run("reserve", _reserve)
            return "done"

        await manager.run(resolved.key, work)
        await manager.run(resolved.key.in_generation(2), work)

    desk.manage(fulfil)

    answer = desk.explained("order_placed:1")

    assert sorted(one["generation"] for one in answer["records"]) == [0, 2]
    first = next(one for one in answer["records"] if one["generation"] == 0)
    assert list(first["generations"]) == ["2"]
    assert [step["name"] for step in first["steps"].values()] == ["reserve"]
    assert "step 0" in desk.typed("explain", "1").stdout


async def _reserve() -> str:
    return "r-1"


@pytest.mark.parametrize("arguments", [(), APP], ids=["all keys", "application"])
@pytest.mark.parametrize("name", ["1;2", "order_placed:1;2"])
def test_an_id_that_ends_like_a_generation_is_found(desk: Desk, name: str, arguments: tuple[str, ...]) -> None:
    desk.take(event("1;2"))
    desk.take(event("1"))

    assert [one["label"] for one in desk.explained(name, *arguments)["records"]] == ["order_placed:1;2"]


def test_a_corrupt_record_is_listed_and_explained(tmp_path: Path, redis_url: str) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"')
    desk.fill()
    spoil(redis_url, "idempotency:billing::broken")

    (listed,) = desk.json_lines("list", "--status", "corrupt")
    explained = desk.explained("broken")

    assert (listed["label"], listed["reason"]) == ("broken", "it was written by another program")
    assert len(desk.json_lines("list")) == 6
    assert explained["records"][0]["next_delivery"] == "would not be handled: CorruptRecordError"
    assert desk.explained("idempotency:billing::broken")["records"][0]["status"] == "corrupt"


# Release.


def test_release_ends_the_leases_of_an_owner_and_keeps_attempts(desk: Desk) -> None:
    desk.take("a", lease=timedelta(seconds=100))
    desk.take("b", lease=timedelta(seconds=100))
    desk.take("c", lease=timedelta(seconds=100), owner="billing@host-9")

    answer = desk.changing("release", "--owner", "billing@host-7", "--yes", "--json")

    assert json.loads(answer.stdout)["released"] == 2
    leases = {one["label"]: (one["lease"], one["attempt"]) for one in desk.json_lines("list")}
    assert leases == {"a": ("released", 1), "b": ("released", 1), "c": ("held", 1)}
    assert desk.take("a").attempt == 2
    begun, ended = desk.audited()
    store = begun["asked"].pop("store")
    assert (begun["command"], begun["asked"]) == ("keys release", {"owner": ["billing@host-7"], "force": False})
    assert store["kind"] in {"redis", "sqlite"}
    assert store["url" if store["kind"] == "redis" else "path"]
    assert ended["counts"]["records"] == 2


def test_recently_renewed_leases_are_released_only_with_force(desk: Desk) -> None:
    desk.take("a")

    skipped = desk.changing("release", "a", "--yes")
    assert (skipped.exit_code, skipped.stdout) == (0, "released: 0 records\n")
    assert "skipped: 1 renewed recently: the owner seems to be alive" in skipped.stderr

    assert json.loads(desk.changing("release", "a", "--yes", "--force", "--json").stdout)["released"] == 1
    assert desk.json_lines("list")[0]["lease"] == "released"


def test_release_requires_a_key_or_an_owner(desk: Desk) -> None:
    answer = desk.changing("release", "--service", "billing", "--yes")

    assert answer.exit_code == 2
    assert "KEY or --owner" in answer.stderr
    assert desk.audited() == []


def test_names_of_hashed_keys_are_hashed_in_the_audit_file(tmp_path: Path, redis_url: str) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"', "[idempotency]\nhash_keys = true\n")

    desk.changing("release", "anna@example.org", "--yes")

    assert desk.audited()[0]["asked"]["keys"] == [Key.of("anna@example.org").digest]
    assert "anna" not in desk.audit.read_text()


# Purge.


@pytest.mark.parametrize(
    ("chosen", "remaining"),
    [
        (("--status", "failed"), ["held", "lapsed", "order_placed:1", "released"]),
        (("order_placed:1",), ["held", "lapsed", "order_placed:2", "released"]),
        (("--service", "billing"), ["held"]),
        (("--all", "--in-progress"), []),
        (("--lease-ended",), ["held", "order_placed:1", "order_placed:2"]),
        (("held",), ["held", "lapsed", "order_placed:1", "order_placed:2", "released"]),
        (("held", "--in-progress"), ["lapsed", "order_placed:1", "order_placed:2", "released"]),
    ],
)
def test_only_selected_records_are_purged(desk: Desk, chosen: tuple[str, ...], remaining: list[str]) -> None:
    desk.fill()

    answer = desk.changing("purge", *chosen, "--yes", "--json")

    assert desk.labels() == remaining
    assert json.loads(answer.stdout)["purged"] == 5 - len(remaining)
    assert [line["says"] for line in desk.audited()] == ["begun", "ended"]
    assert desk.audited()[1]["counts"]["records"] == 5 - len(remaining)


@pytest.mark.parametrize("command", [("purge", "--all"), ("release", "held")])
def test_tables_of_a_newer_version_are_not_changed(tmp_path: Path, command: tuple[str, ...]) -> None:
    desk = Desk(tmp_path, f'kind = "sqlite"\npath = "{tmp_path / "idem.db"}"')
    desk.fill()
    with closing(sqlite3.connect(tmp_path / "idem.db", isolation_level=None)) as file:
        file.execute("UPDATE idempotency_store SET version = ?", [VERSION + 1])

    answers = [desk.changing(*command, *yes) for yes in ((), ("--yes",))]

    assert [answer.exit_code for answer in answers] == [1, 1]
    assert all("a newer integr8s-idem migrated it" in answer.output for answer in answers)
    assert len(desk.json_lines("list")) == 5


def test_names_without_a_record_are_reported_and_the_others_purged(desk: Desk) -> None:
    desk.fill()

    scripted = desk.changing("purge", "order_placed:1", "order_placed:7", "--yes", "--json")
    read = desk.changing("purge", "order_placed:2", "order_placed:1", "lapsed", "--status", "failed", "--yes")
    shown = desk.typed("show", "lapsed", "order_placed:7")

    assert (scripted.exit_code, json.loads(scripted.stdout)["unmatched"]) == (0, ["order_placed:7"])
    assert (read.exit_code, read.stdout) == (0, "purged: 1 record (billing: 1 failed)\n")
    skipped, missing = read.stderr.splitlines()
    assert skipped == "skipped: 1 named, but excluded by the filter"
    assert missing.startswith("no record found for order_placed:1: never seen, expired or mistyped;")
    assert (shown.exit_code, "no record found for order_placed:7: " in shown.stderr) == (0, True)


def test_records_are_purged_in_batches(desk: Desk) -> None:
    async def fill(manager: IdempotencyManager) -> None:
        verdicts = (await manager.acquire_batch([f"k{n}" for n in range(1_203)])).values()
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert await manager.confirm_batch(reserved) == [True] * 1_203

    desk.manage(fill)

    assert json.loads(desk.changing("purge", "--status", "completed", "--yes", "--json").stdout)["purged"] == 1_203
    assert desk.labels() == []


def test_steps_are_purged_with_their_unit(desk: Desk) -> None:
    async def fulfil(manager: IdempotencyManager) -> None:
        async def work() -> None:
            await manager.steps().run("reserve", _reserve)

        await manager.run("order:1", work)
        await manager.run("order:11", work)

    desk.manage(fulfil)

    assert json.loads(desk.changing("purge", "order:1", "--yes", "--json").stdout)["purged"] == 2
    assert [label for label in desk.labels() if not label.startswith("order:11")] == []
    assert len(desk.labels()) == 2


async def _leave_steps(manager: IdempotencyManager) -> None:
    """Leave a completed, a failed and a running unit, each with a completed step."""

    async def fail() -> None:
        await manager.steps().run("reserve", _reserve)
        raise ValueError("no such account")

    async def complete() -> None:
        await manager.steps().run("reserve", _reserve)

    await manager.run("completed", complete)
    for _ in range(3):
        with pytest.raises(ValueError, match="no such account"):
            await manager.run("failed", fail)


@pytest.mark.parametrize("hashed", ["", "[idempotency]\nhash_keys = true\n"], ids=["plain keys", "hashed keys"])
def test_steps_are_purged_with_a_unit_that_matches_the_filter(tmp_path: Path, redis_url: str, hashed: str) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"', hashed)
    desk.manage(_leave_steps)

    assert json.loads(desk.changing("purge", "--status", "failed", "--yes", "--json").stdout)["purged"] == 2
    assert Counter(one["status"] for one in desk.json_lines("list")) == {"completed": 2}
    assert json.loads(desk.changing("purge", "--service", "billing", "--yes", "--json").stdout)["purged"] == 2
    assert desk.labels() == []


@pytest.mark.parametrize("selected", [("--service", "billing"), ("--all",), ("held",)])
@pytest.mark.parametrize("hashed", ["", "[idempotency]\nhash_keys = true\n"], ids=["plain keys", "hashed keys"])
def test_steps_of_a_held_unit_are_kept(tmp_path: Path, redis_url: str, hashed: str, selected: tuple[str, ...]) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"', hashed)

    async def hold(manager: IdempotencyManager) -> list[int]:
        async def work() -> list[int]:
            await manager.steps().run("reserve", _reserve)
            name = [manager.space.full(manager.space.key("held"))] if selected == ("held",) else list(selected)
            # Commands run in a thread, since they start an event loop.
            kept = await asyncio.to_thread(desk.changing, "purge", *name, "--yes", "--json")
            labels = await asyncio.to_thread(desk.labels)
            purged = await asyncio.to_thread(desk.changing, "purge", *name, "--in-progress", "--yes", "--json")
            return [json.loads(kept.stdout)["purged"], len(labels), json.loads(purged.stdout)["purged"]]

        return await manager.run("held", work)

    assert desk.manage(hold) == [0, 2, 2]


def test_a_step_whose_unit_is_gone_is_purged_if_it_matches(desk: Desk) -> None:
    async def orphan(manager: IdempotencyManager) -> None:
        await _leave_steps(manager)
        await manager.repository.delete([manager.space.full(manager.space.key("completed"))])

    desk.manage(orphan)

    assert json.loads(desk.changing("purge", "--older-than", "1h", "--yes", "--json").stdout)["purged"] == 0
    assert json.loads(desk.changing("purge", "--status", "completed", "--yes", "--json").stdout)["purged"] == 1
    assert desk.labels() == ["failed", "failed (step in place 0)"]


@pytest.mark.parametrize("how", ["by its name", "by its full key"])
def test_steps_with_hashed_keys_are_purged_with_their_unit(desk: Desk, how: str) -> None:
    name = "order:" + "1" * 222

    async def fulfil(manager: IdempotencyManager) -> str:
        async def work() -> None:
            await manager.steps().run("reserve", _reserve)

        await manager.run(name, work)
        return manager.space.full(manager.space.key(name))

    full = desk.manage(fulfil)
    assert "#" not in full
    assert len([label for label in desk.labels() if label.startswith("#")]) == 1

    desk.changing("purge", name if how == "by its name" else full, "--yes")

    assert desk.labels() == []


def test_corrupt_records_are_purged_by_name_or_by_status(tmp_path: Path, redis_url: str) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"')
    for name in ("one", "two", "three"):
        spoil(redis_url, f"idempotency:billing::{name}")

    skipped = desk.changing("purge", "--service", "billing", "--yes", "--json")
    by_name = desk.changing("purge", "one", "--yes", "--json")
    rest = desk.changing("purge", "--status", "corrupt", "--yes", "--json")

    counts = [json.loads(answer.stdout)["purged"] for answer in (skipped, by_name, rest)]
    assert counts == [0, 1, 2]


def test_purging_everything_requires_all_and_confirmation(desk: Desk) -> None:
    desk.fill()

    bare, unconfirmed = desk.changing("purge", "--yes"), desk.changing("purge", "--all")

    assert (bare.exit_code, unconfirmed.exit_code) == (2, 2)
    assert "name the records to purge" in bare.stderr
    question = "Delete 4 records (billing: 1 completed, 1 failed, 2 processing)?"
    assert f"no terminal to ask for confirmation. {question}" in unconfirmed.stderr
    assert len(desk.labels()) == 5
    assert desk.audited() == []


def test_records_that_change_in_the_meantime_are_skipped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner reserves the key again between the scan and the deletion."""
    desk.take("lapsed", lease=timedelta(milliseconds=1))
    kind = type(desk.do(_itself))
    forget = kind.forget  # type: ignore[attr-defined]

    async def late(store: IdempotencyRepository, seen: object) -> object:
        settings = IdempotencyManager(None, store, scope="billing")
        await settings.reserve("lapsed")
        return await forget(store, seen)

    monkeypatch.setattr(kind, "forget", late)

    answer = desk.changing("purge", "lapsed", "--yes", "--json")

    assert json.loads(answer.stdout) == {
        "purged": 0,
        "by": [],
        "skipped": {"changed in the meantime": 1},
        "unmatched": [],
    }
    record = desk.record("lapsed")
    assert record is not None
    assert (record.status, record.attempt) == (IdempotencyStatus.PROCESSING, 2)


async def _itself(store: IdempotencyRepository) -> IdempotencyRepository:
    return store


# Stores that cannot be read.


def test_reading_does_not_create_a_file(tmp_path: Path) -> None:
    desk = Desk(tmp_path, f'kind = "sqlite"\npath = "{tmp_path / "none.db"}"')

    for command in (("list",), ("show", "x"), ("explain", "x")):
        answer = desk.typed(*command)
        assert answer.exit_code == 2
        assert "there are no records yet" in answer.stderr
    assert not (tmp_path / "none.db").exists()


def test_a_memory_store_is_refused(tmp_path: Path) -> None:
    answer = Desk(tmp_path, 'kind = "memory"').typed("list")

    assert answer.exit_code == 2
    assert "exist only in the process that created them" in answer.stderr


def test_an_unavailable_store_is_reported_without_a_traceback(tmp_path: Path) -> None:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "unix://{tmp_path / "nobody.sock"}"\ntimeout_seconds = 0.3')

    answer = desk.changing("purge", "--all", "--yes")

    assert answer.exit_code == 1
    assert "StoreUnavailableError" in answer.stderr
    assert answer.exception is None or isinstance(answer.exception, SystemExit)


INVALID = (("explain", " "), ("explain", "x", "--as", "poem"), ("list", "--status", "done"))


@pytest.mark.parametrize("arguments", INVALID)
def test_invalid_arguments_are_refused(desk: Desk, arguments: tuple[str, ...]) -> None:
    desk.fill()

    assert desk.typed(*arguments).exit_code == 2


@pytest.mark.parametrize("name", ["idempotency:billing:\udcff", "order\udcff"])
@pytest.mark.parametrize("command", ["show", "explain", "release --yes", "purge --yes"])
def test_names_that_are_not_utf8_are_refused(desk: Desk, command: str, name: str) -> None:
    desk.fill()  # also creates the tables

    answer = desk.typed(*command.split(), name, *(["--audit-file", str(desk.audit)] if "--yes" in command else []))

    assert (answer.exit_code, answer.stdout) == (2, "")
    assert answer.stderr.startswith('ApplicationError: invalid name "')
    assert '\\udcff": it is not valid UTF-8; copy it from `keys list`' in answer.stderr
    assert desk.audited() == []
