"""Records of released versions are read by the current code, and the current code writes nothing else.

If a test here fails after a change of the code, workers of the previous minor version could not work beside this one,
or not after a rollback: see "Formats of records" in CONTRIBUTING.md.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from integr8s_idem.records import (
    Completed,
    Completion,
    Failed,
    Failure,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    Scheduled,
    StoredResult,
)
from integr8s_idem.stores import PurgeSupport
from tests.golden import record as recorder
from tests.golden.files import (
    CURRENT,
    described,
    differences,
    path_of,
    previous_version,
    read,
    trace_text,
    versions,
    write_new,
    written_by_this_version,
)
from tests.golden.scenarios import (
    BY_FIELDS,
    LEASE,
    PREFIX,
    RETENTION,
    SCENARIOS,
    WHOLE,
    key_of,
    keys_and_fingerprints,
)
from tests.golden.stores import KINDS, MESSAGES, Raw, RawSql, RawStore, new_table, raw_redis, raw_sql
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer, bundled_binary

SQL: Final = ("postgresql", "mysql", "sqlite")

ADVICE: Final = (
    "The previous minor version has never written such a record.  If it can read it nevertheless (test that with its "
    "own code), list the scenario in READABLE with the reason.  Otherwise only read the new form now, and write it "
    "from the next minor version on: see CONTRIBUTING.md, Formats of records."
)

SCHEDULED_IN_0_2: Final = "0.2 answers InProgress until it is due: decision 77 and its tests in 0.2"
READABLE: Final[dict[str, str]] = {"scheduled": SCHEDULED_IN_0_2, "scheduled_after_a_lapse": SCHEDULED_IN_0_2}
"""Scenarios whose records have another form than in the previous minor version, which reads them, and why it can."""


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer(binary=bundled_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def postgresql_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def mysql_server() -> Iterator[MariadbServer]:
    if why := missing_programs():
        pytest.skip(why)
    with MariadbServer() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=versions())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RawStore]:
    """An empty store of each kind."""
    if kind == "redis":
        client = request.getfixturevalue("redis_server").client()
        yield await raw_redis(client)
        await client.aclose()
    elif kind == "dynamodb":
        request.getfixturevalue("aws")
        async with new_table(request.getfixturevalue("dynamodb")) as found:
            yield found
    else:
        is_file = kind == "sqlite"
        url = (
            f"sqlite+aiosqlite:///{tmp_path / 'idem.db'}" if is_file else request.getfixturevalue(f"{kind}_server").url
        )
        async with raw_sql(url) as found:
            yield found


@pytest.fixture
async def golden(store: RawStore, kind: str, version: str) -> dict[str, Any]:
    """The records of a version, which the store contains."""
    found = read(version, kind)
    await store.load(found["raw"])
    return found


def request_of(key: str, fingerprint: bytes | None = None) -> ReserveRequest:
    return ReserveRequest(key=key, token=b"stranger" * 2, lease=LEASE, retention=RETENTION, fingerprint=fingerprint)


def holders(golden: dict[str, Any], *states: str) -> dict[str, Reserved]:
    """Return the reservations under which the records in these states were written, by scenario."""
    return {
        name: Reserved(
            key=one["record"]["key"],
            token=bytes.fromhex(one["token"]),
            attempt=one["record"]["attempt"],
            fence=one["record"]["fence"],
            lease=LEASE,
        )
        for name, one in golden["records"].items()
        if SCENARIOS[name].state in states
    }


async def test_every_record_is_read_as_its_version_read_it(store: RawStore, golden: dict[str, Any]) -> None:
    names = list(golden["records"])
    found = await store.repository.get([golden["records"][name]["record"]["key"] for name in names])

    for name, record in zip(names, found, strict=True):
        if SCENARIOS[name].state == "deleted":
            assert record is None, name
        else:
            assert record is not None, name
            assert described(record) == golden["records"][name]["record"], name
    assert (await store.repository.ping()).identity == golden["identity"]


@pytest.mark.scenario(140)
async def test_every_record_gets_the_verdict_of_its_state(store: RawStore, golden: dict[str, Any]) -> None:
    names = list(golden["records"])
    verdicts = await store.repository.reserve([request_of(golden["records"][name]["record"]["key"]) for name in names])

    for name, verdict in zip(names, verdicts, strict=True):
        record, state = golden["records"][name]["record"], SCENARIOS[name].state
        if state == "running":
            assert isinstance(verdict, InProgress), name
            assert (verdict.attempt, verdict.owner) == (record["attempt"], record["owner"]), name
            assert timedelta(days=1) < verdict.retry_after <= LEASE, name
        elif state == "scheduled":
            assert isinstance(verdict, Scheduled), name
            assert (verdict.attempt, verdict.owner) == (record["attempt"], record["owner"]), name
            assert timedelta(days=1) < verdict.retry_after <= LEASE, name
        elif state == "completed":
            result = record["result"] and StoredResult(bytes.fromhex(record["result"][1]), record["result"][0])
            assert isinstance(verdict, Completed), name
            assert (verdict.result, verdict.result_dropped) == (result, record["result_dropped"]), name
            assert verdict.completed_at == datetime.fromisoformat(record["settled_at"]), name
        elif state == "failed":
            assert isinstance(verdict, Failed), name
            assert (verdict.error, verdict.attempt) == (record["error"], record["attempt"]), name
        elif state == "deleted":
            assert isinstance(verdict, Reserved), name
            assert (verdict.attempt, verdict.previous) == (1, Previous.NONE), name
            assert verdict.fence > record["fence"], name
        else:
            _check_takeover(name, verdict, record, lapsed=state == "lapsed")
        if isinstance(verdict, Completed | Failed):
            assert trace_text(verdict.trace) == record["trace"], name


def _check_takeover(name: str, verdict: object, record: dict[str, Any], *, lapsed: bool) -> None:
    assert isinstance(verdict, Reserved), name
    assert verdict.previous is (Previous.LAPSED if lapsed else Previous.RELEASED), name
    assert (verdict.attempt, verdict.lapsed) == (record["attempt"] + 1, record["lapsed"] + lapsed), name
    assert verdict.lapsed_alone == record["lapsed_alone"] + (lapsed and record["alone"]), name
    assert verdict.fence > record["fence"], name
    assert trace_text(verdict.trace) == record["trace"], name


async def test_what_a_later_version_adds_is_ignored(store: RawStore, golden: dict[str, Any]) -> None:
    await store.extend()

    await test_every_record_is_read_as_its_version_read_it(store, golden)
    await test_every_record_gets_the_verdict_of_its_state(store, golden)
    done = [Completion(reservation=one, ttl=RETENTION) for one in holders(golden, "running").values()]
    assert await store.repository.complete(done) == [True] * len(done)


async def test_payloads_are_compared_with_those_of_the_records(store: RawStore, golden: dict[str, Any]) -> None:
    stored = {
        one["record"]["key"]: bytes.fromhex(one["record"]["fingerprint"])
        for one in golden["records"].values()
        if one["record"].get("fingerprint")
    }
    assert {WHOLE, BY_FIELDS} <= set(stored.values())

    verdicts = await store.repository.reserve(
        [request_of(key, one[:15] + bytes((one[15] ^ 1,))) for key, one in stored.items()]
    )

    assert [type(verdict) for verdict in verdicts] == [KeyReused] * len(stored)


@pytest.mark.scenario(140)
@pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
async def test_the_holders_of_records_continue(store: RawStore, golden: dict[str, Any], verb: str) -> None:
    """A worker of this version continues with what one of an earlier version reserved, such as after a restart."""
    held = list(holders(golden, "running", "lapsed").values())
    repository = store.repository
    if verb == "complete":
        written = await repository.complete([Completion(reservation=one, ttl=RETENTION) for one in held])
    elif verb == "fail":
        written = await repository.fail([Failure(reservation=one, ttl=RETENTION, error="late") for one in held])
    elif verb == "renew":
        written = await repository.renew(held, LEASE)
    else:
        written = await repository.release(held)

    assert written == [True] * len(held)
    expected = {"complete": Completed, "fail": Failed, "renew": InProgress, "release": Reserved}[verb]
    verdicts = await repository.reserve([request_of(one.key) for one in held])
    assert [type(verdict) for verdict in verdicts] == [expected] * len(held)


async def test_a_repeated_outcome_is_recognized(store: RawStore, golden: dict[str, Any]) -> None:
    completed, failed = holders(golden, "completed").values(), holders(golden, "failed").values()

    again = await store.repository.complete([Completion(reservation=one, ttl=RETENTION) for one in completed])
    failed_again = await store.repository.fail([Failure(reservation=one, ttl=RETENTION, error="x") for one in failed])

    assert again == [True] * len(completed)
    assert failed_again == [True] * len(failed)


async def test_operators_see_and_change_every_record(store: RawStore, golden: dict[str, Any]) -> None:
    repository = store.repository
    if isinstance(repository, PurgeSupport):
        assert (await repository.purge(1_000)) == 0
    pages = [page async for page in repository.survey(PREFIX)]
    seen = {record.key: record for page in pages for record in page.found}
    assert seen.keys() == {key_of(name) for name in golden["records"] if SCENARIOS[name].state != "deleted"}

    running = [seen[one.key] for one in holders(golden, "running").values()]
    assert await repository.count_active(PREFIX) == len(running)
    assert await repository.end_leases(running) == [True] * len(running)
    rest = [record for record in seen.values() if record not in running]
    assert await repository.forget(rest) == [True] * len(rest)
    assert await repository.delete([record.key for record in running]) == len(running)


@pytest.mark.parametrize("kind", SQL, indirect=True)
async def test_the_messages_of_an_outbox_are_published(store: RawStore, golden: dict[str, Any]) -> None:
    assert isinstance(store, RawSql)
    found = await store.messages()

    assert sorted((one.event_id, one.key, one.value, list(one.headers)) for one in found) == sorted(
        (one.event_id, one.key, one.value, list(one.headers)) for one in MESSAGES
    )


@pytest.mark.scenario(140)
async def test_this_version_writes_only_what_the_previous_minor_version_reads(store: RawStore, kind: str) -> None:
    written = await written_by_this_version(store)

    found = differences(previous_version(), kind, store, written["raw"])

    unexpected = [one for one in found if one.partition(":")[0] not in READABLE]
    assert not unexpected, "\n".join([*unexpected, ADVICE])


def test_this_version_makes_the_same_keys_and_fingerprints_as_the_earlier_ones(version: str) -> None:
    """Otherwise redeliveries of what another version handled would run again, or be taken for reused keys."""
    assert keys_and_fingerprints() == read(version, "keys")["keys"]


async def test_golden_records_are_never_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_new(kind="redis", content={})
    assert await recorder.main() == 1


def test_the_current_minor_version_has_all_golden_records() -> None:
    missing = [kind for kind in ("keys", "kafka", *KINDS) if not path_of(CURRENT, kind).exists()]

    assert not missing, "run `python -m tests.golden.record`, and commit the files"


def scheduled(store: RawStore, golden: dict[str, Any], state: str) -> Raw:
    """Return the records in `state` as a later version writes them for scheduled work."""
    raw: Raw = copy.deepcopy(golden["raw"])
    keys = {key_of(name) for name in golden["records"] if SCENARIOS[name].state == state}
    raw["records"] = {key: store.scheduled(record) for key, record in raw["records"].items() if key in keys}
    return raw


@pytest.mark.scenario(140)
async def test_scheduled_work_of_any_version_waits_for_its_time(store: RawStore, golden: dict[str, Any]) -> None:
    raw = scheduled(store, golden, "running")
    await store.repository.delete([one["record"]["key"] for one in golden["records"].values()])
    await store.load(raw)
    former = list(holders(golden, "running").values())

    for _ in range(2):
        verdicts = await store.repository.reserve([request_of(one.key) for one in former])
        assert [type(verdict) for verdict in verdicts] == [Scheduled] * len(former)
        assert all(timedelta(days=1) < verdict.retry_after <= LEASE for verdict in verdicts)
        # The former owner has given it up.
        assert await store.repository.renew(former, LEASE) == [False] * len(former)
        done = [Completion(reservation=one, ttl=RETENTION) for one in former]
        assert await store.repository.complete(done) == [False] * len(former)
        assert await store.repository.release(former) == [False] * len(former)
    records = await store.repository.get([one.key for one in former])
    expected = [one["record"] for name, one in golden["records"].items() if SCENARIOS[name].state == "running"]
    assert [described(record) for record in records] == expected
    assert await store.repository.end_leases(records) == [True] * len(former)


async def test_scheduled_work_whose_time_has_come_is_taken_over_like_released_work(
    store: RawStore, golden: dict[str, Any]
) -> None:
    """It counts as an attempt, but not as a crash."""
    raw = scheduled(store, golden, "lapsed")
    await store.repository.delete([one["record"]["key"] for one in golden["records"].values()])
    await store.load(raw)
    names = [name for name in golden["records"] if SCENARIOS[name].state == "lapsed"]

    verdicts = await store.repository.reserve([request_of(key_of(name)) for name in names])

    for name, verdict in zip(names, verdicts, strict=True):
        _check_takeover(name, verdict, golden["records"][name]["record"], lapsed=False)
