"""How doctor examines and reports: statuses, forms, secrets, and checks that break."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from dishka import Provider, Scope, provide
from typer.testing import CliRunner

import integr8s_idem.doctor.examination as examination
from integr8s_idem import EventRouter, IdempotencyRepository, KeyStrategy
from integr8s_idem.cli.app import app
from integr8s_idem.config import KafkaSettings, MemoryStoreSettings, RedisStoreSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity, StoreWarning
from integr8s_idem.doctor import as_json, as_text, status_of
from integr8s_idem.doctor.broker_checks import broker_findings
from integr8s_idem.doctor.check_runner import findings_of
from integr8s_idem.doctor.clock_skew import skew_findings
from integr8s_idem.doctor.remedies import mistake_remedy, warning_remedy
from integr8s_idem.doctor.retry_topic_checks import retry_topic_findings
from integr8s_idem.doctor.store_checks import check_repository, check_store, is_too_old, refusal, try_operations
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.records import StoreHealth
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.worker.retention import BrokerFacts, Reading, TopicSettings
from integr8s_idem.worker.retry_topics import RetryTopics
from tests.support.doctor import codes, found_in
from tests.support.versions import OrderPlaced

AWAY = '[kafka]\nbootstrap_servers = "127.0.0.1:1"\n[store]\nurl = "redis://127.0.0.1:1/0"\n'
SECRET = "hunter2-hunter2"


def finding(severity: Severity, code: Code = Code.STORE_WARNING) -> Finding:
    return Finding(code, severity, "store", "it is so", "it loses that", "set this")


def typed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ([], 0),
        ([Severity.INFO], 0),
        ([Severity.INFO, Severity.WARNING], 1),
        ([Severity.ERROR, Severity.WARNING, Severity.INFO], 2),
    ],
)
def test_the_exit_status_is_that_of_the_worst_finding(severities: list[Severity], status: int) -> None:
    assert status_of([finding(severity) for severity in severities]) == status


def test_a_finding_is_one_line() -> None:
    result = Finding(Code.STORE_EVICTION, Severity.WARNING, "store", "it\ndrops", "runs again", "set it")

    assert as_text([result]) == "warning  store-eviction  store: it drops: runs again; set it"


def test_a_setting_is_followed_by_its_value() -> None:
    result = Finding(Code.SETTINGS_MISTAKE, Severity.ERROR, "kafka.client_id", "= 3 is not a string", "", "")

    assert as_text([result]) == "error    settings-mistake  kafka.client_id = 3 is not a string"


def test_passed_checks_are_listed_only_with_verbose() -> None:
    well = [finding(Severity.INFO, Code.STORE_SEEN)]

    assert as_text(well) == "no problems found"
    assert as_text(well, verbose=True).splitlines()[0].startswith("info     store-seen")


def test_json_output_is_a_list_of_objects() -> None:
    (result,) = json.loads(as_json([finding(Severity.WARNING)]))

    assert result == {
        "code": "store-warning",
        "severity": "warning",
        "where": "store",
        "what": "it is so",
        "cost": "it loses that",
        "remedy": "set this",
    }


async def test_a_failing_check_is_a_finding_and_does_not_hide_others() -> None:
    async def broken() -> list[Finding]:
        raise KeyError("size")

    async def well() -> list[Finding]:
        return [finding(Severity.WARNING)]

    found = await findings_of({"clocks": broken, "store": well})

    assert codes(found) == ["check-failed", "store-warning"]
    assert (found[0].where, found[0].severity) == ("clocks", Severity.ERROR)
    assert "KeyError: 'size'" in found[0].what


async def test_a_check_times_out() -> None:
    async def endless() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    found = await findings_of({"brokers": endless}, timeout=0.05)

    assert codes(found) == ["check-timeout"]


async def test_settings_that_contradict_each_other_are_found(tmp_path: Path) -> None:
    text = "[kafka]\nheartbeat_interval_seconds = 40\n[services.billing]\nhandler_timeout_seconds = 300\n"

    found = await found_in(text, tmp_path)

    assert codes(found) == ["settings-mistake", "settings-mistake"]
    assert [one.cost for one in found] == ["workers cannot start"] * 2
    assert [one.where for one in found] == [
        "kafka.heartbeat_interval_seconds",
        "services.billing.handler_timeout_seconds",
    ]


async def test_settings_that_lose_events_are_found(tmp_path: Path) -> None:
    text = AWAY + '[idempotency]\non_in_progress = "skip"\ndefault_ttl_seconds = 691_200\n'

    found = await found_in(text, tmp_path)

    assert codes(found) == ["store-unavailable", "broker-unavailable", "settings-warning"]
    assert found[2].where == "idempotency.on_in_progress"


async def test_findings_contain_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loud(settings: Settings, now: object) -> list[Finding]:
        raise ValueError(f"bad {SECRET} in redis://:other@cache")

    monkeypatch.setattr(examination, "check_store", loud)
    text = AWAY + f'password = "{SECRET}"\n'

    result = as_json(await found_in(text, tmp_path))

    assert "check-failed" in result
    assert SECRET not in result
    assert "other" not in result


async def test_a_broken_container_is_a_finding(tmp_path: Path) -> None:
    def container(settings: Settings) -> Any:
        raise RuntimeError("no billing without a bank")

    found = await found_in(AWAY, tmp_path, Platform(Service("billing", container=container)))

    (broken,) = [one for one in found if one.code is Code.APPLICATION_BROKEN]
    assert "RuntimeError: no billing without a bank" in broken.what
    assert "broker-unavailable" in codes(found)


def guarded_by(repository: type[MemoryIdempotencyRepository], *more: Service) -> Platform:
    """Return an application that provides the store of its service `billing`."""

    class OwnStore(Provider):
        @provide(scope=Scope.APP, override=True)
        def store(self) -> IdempotencyRepository:
            return repository()

    providers = [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(EventRouter()),
        OwnStore(),
    ]

    return Platform(Service("billing", providers=providers), *more)


async def test_a_store_of_the_application_is_checked_instead_of_the_configured_store(tmp_path: Path) -> None:
    found = await found_in(AWAY, tmp_path, guarded_by(MemoryIdempotencyRepository))

    assert "store-unavailable" not in codes(found)
    assert "store of service billing" in [one.where for one in found if one.code is Code.STORE_SEEN]


async def test_problems_of_a_store_of_the_application_are_found(tmp_path: Path) -> None:
    found = await found_in(AWAY, tmp_path, guarded_by(Forgetful))

    assert ("store of service billing", Code.STORE_FORGETS) in [(one.where, one.code) for one in found]


async def test_a_failing_store_of_the_application_is_a_finding(tmp_path: Path) -> None:
    class Broken(MemoryIdempotencyRepository):
        async def ping(self) -> StoreHealth:
            raise KeyError("latency")

    found = await found_in(AWAY, tmp_path, guarded_by(Broken))

    (broken,) = [one for one in found if one.code is Code.APPLICATION_BROKEN]
    assert broken.what == "Broken raises KeyError: 'latency'"


async def test_the_configured_store_is_checked_if_a_service_uses_it(tmp_path: Path) -> None:
    found = await found_in(AWAY, tmp_path, guarded_by(MemoryIdempotencyRepository, Service("audit", providers=GUARDED)))

    assert "store-unavailable" in codes(found)


GUARDED = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(EventRouter()),
]


@pytest.mark.parametrize("fields", [None, ["order_id"]])
async def test_keys_that_are_hashes_of_all_fields_are_found(fields: list[str] | None, tmp_path: Path) -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    hashing = IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.CONTENT_HASH, fields=fields)
    platform = Platform(Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), hashing]))

    found = [one for one in await found_in(AWAY, tmp_path, platform) if one.code is Code.KEY_FIELDS]

    assert [(one.severity, one.where) for one in found] == [(Severity.WARNING, "service billing")] * (fields is None)
    assert all("all fields of OrderPlaced" in one.what and "run again" in one.cost for one in found)


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_service_that_only_observes_and_one_that_cannot_are_found(guarded: bool, tmp_path: Path) -> None:
    settings = f'{AWAY}\n[services.billing]\nmode = "observe"\n'
    providers = GUARDED if guarded else [KafkaProvider(), DispatcherProvider(EventRouter())]

    found = await found_in(settings, tmp_path, Platform(Service("billing", providers=providers)))

    problems = [one.what for one in found if one.where == "services.billing.mode"]
    assert any("guards nothing" in what for what in problems)
    assert any("has no effect" in what for what in problems) is not guarded


class Forgetful(MemoryIdempotencyRepository):
    """A store that loses every record."""

    async def reserve(self, requests: Any) -> Any:
        verdicts = await super().reserve(requests)
        await self.delete([request.key for request in requests])
        return verdicts


async def test_a_store_that_loses_writes_is_found() -> None:
    settings = Settings(store=RedisStoreSettings())

    assert codes(await try_operations(MemoryIdempotencyRepository(), settings, time.time)) == []
    (only,) = await try_operations(Forgetful(), settings, time.time)

    assert only.code is Code.STORE_FORGETS
    assert "renew, complete, fail, release" in only.what


async def test_old_versions_and_other_warnings_of_a_store_are_found() -> None:
    class Old(MemoryIdempotencyRepository):
        async def ping(self) -> StoreHealth:
            return StoreHealth(kind="redis", version="6.0.20", latency=timedelta(0), warnings=("it is tired",))

    found = await check_repository(Old(), Settings(), time.time)

    assert [one.code for one in found] == [Code.STORE_SEEN, Code.STORE_VERSION, Code.STORE_WARNING]
    assert "6.0.20 is older than 6.2" in found[1].what


def test_brokers_without_known_topics_are_no_problem() -> None:
    found = broker_findings(KafkaSettings(), [], BrokerFacts())

    assert [one.code for one in found] == [Code.BROKER_SEEN, Code.TOPICS_UNKNOWN]
    assert codes(found) == []


async def test_a_memory_store_is_not_checked() -> None:
    assert await check_store(Settings(store=MemoryStoreSettings(kind="memory")), time.time) == []


@pytest.mark.parametrize(
    ("stores", "found"), [(100.0, False), (98.1, False), (102.9, False), (97.9, True), (103.1, True)]
)
def test_clocks_may_differ_by_two_seconds_and_the_round_trip(stores: float, found: bool) -> None:
    assert bool(skew_findings(stores, 100.0, 101.0)) is found


@pytest.mark.parametrize(
    ("kind", "version", "old"),
    [
        ("redis", "6.0.20", True),
        ("redis", "6.2.0", False),
        ("redis", "Valkey 8.0.1", False),
        ("postgresql", "14.11", True),
        ("postgresql", "18.1 (Debian)", False),
        ("sqlite", "3.9.2", True),
        ("mysql", "8.0.18", True),
        ("mysql", "8.0.19-log", False),
        ("mysql", "8.0.mysql_aurora.3", False),
        ("mysql", "10.5.23-MariaDB-1:10.5.23", True),
        ("mysql", "5.5.5-10.6.1-MariaDB", False),
        ("mysql", "11.4.2-MariaDB", False),
        ("redis-cluster", "7.0.15, 6.0.9", True),
        ("redis-cluster", "7.0.15, Valkey 8.0.1", False),
        ("dynamodb", "", False),
        ("other", "0.1", False),
        ("redis", "unknown", False),
    ],
)
def test_old_versions_are_detected(kind: str, version: str, old: bool) -> None:
    assert is_too_old(kind, version) is old


def test_warnings_of_a_store_can_be_copied_and_pickled() -> None:
    warning = StoreWarning(Code.STORE_EVICTION, "it drops", "runs again", "set it")

    for same in (warning, copy.copy(warning), pickle.loads(pickle.dumps(warning))):
        assert same == "it drops: runs again; set it"
        assert (same.code, same.what, same.cost, same.remedy) == (
            Code.STORE_EVICTION,
            "it drops",
            "runs again",
            "set it",
        )


def test_errors_exit_with_status_2() -> None:
    Path("settings.toml").write_text(AWAY)

    answer = typed()

    assert answer.exit_code == 2
    assert [line.split()[:2] for line in answer.stdout.splitlines()][:2] == [
        ["error", "store-unavailable"],
        ["error", "broker-unavailable"],
    ]


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["a:b", "c:d"], ["--settings"], ["nothing.there:platform"], ["billing"]]
)
def test_wrong_usage_exits_with_status_64(arguments: list[str]) -> None:
    answer = typed(*arguments)

    assert answer.exit_code == 64
    assert answer.stdout == ""


def test_permissions_are_printed_for_the_configured_user_and_prefix() -> None:
    Path("settings.toml").write_text(
        f'[store]\nusername = "billing"\npassword = "{SECRET}"\n[idempotency]\nkey_prefix = "shop"\n'
    )

    answer = typed("--acl")

    assert answer.exit_code == 0
    assert answer.stdout.startswith("ACL SETUSER billing on >PASSWORD resetchannels resetkeys ~shop:* -@all +evalsha ")
    assert SECRET not in answer.output


def test_grants_for_postgresql_quote_the_user() -> None:
    Path("settings.toml").write_text('[store]\nkind = "postgresql"\nusername = "Bill-ing"\n')

    assert typed("--acl").stdout.splitlines()[:3] == [
        "CREATE ROLE \"Bill-ing\" LOGIN PASSWORD 'PASSWORD';",
        'GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_records TO "Bill-ing";',
        'GRANT SELECT, UPDATE ON idempotency_store TO "Bill-ing";',
    ]


def test_statements_for_mysql_quote_user_and_database() -> None:
    Path("settings.toml").write_text(
        f'[store]\nkind = "mysql"\nurl = "mysql://db/sh-op"\nusername = "o\'clock"\npassword = "{SECRET}"\n'
    )

    answer = typed("--acl")

    assert answer.stdout.splitlines()[:3] == [
        "CREATE USER IF NOT EXISTS 'o''clock'@'%' IDENTIFIED BY 'PASSWORD';",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON `sh-op`.idempotency_records TO 'o''clock'@'%';",
        "GRANT SELECT, UPDATE ON `sh-op`.idempotency_store TO 'o''clock'@'%';",
    ]
    assert SECRET not in answer.output


@pytest.mark.parametrize(
    ("region", "arn"),
    [
        ('region = "eu-west-1"\n', "arn:aws:dynamodb:eu-west-1:*:table/idem"),
        ('region = "cn-north-1"\n', "arn:aws-cn:dynamodb:cn-north-1:*:table/idem"),
        ("", "arn:aws:dynamodb:*:*:table/idem"),
    ],
)
def test_the_policy_for_dynamodb_is_limited_to_the_table(region: str, arn: str) -> None:
    Path("settings.toml").write_text(f'[store]\nkind = "dynamodb"\ntable = "idem"\n{region}')

    result = json.loads(typed("--acl").stdout)

    assert [statement["Sid"] for statement in result["Statement"]] == ["Worker", "Migrate"]
    assert {statement["Resource"] for statement in result["Statement"]} == {arn}


def test_permissions_for_sentinels_and_redis_are_separate() -> None:
    Path("settings.toml").write_text(
        '[store]\nkind = "redis-sentinel"\nusername = "billing"\nsentinel_username = "asking"\nwait_replicas = 1\n'
    )

    _, at_redis, where, at_sentinels = typed("--acl").stdout.splitlines()

    assert at_redis.startswith("ACL SETUSER billing on >PASSWORD resetchannels resetkeys ~idempotency:* -@all ")
    assert at_redis.endswith(" +wait")
    assert "Sentinel" in where
    assert at_sentinels == "ACL SETUSER asking on >PASSWORD resetchannels resetkeys -@all +sentinel|masters"


def test_permissions_require_the_extra_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("settings.toml").write_text('[store]\nkind = "mysql"\n')
    monkeypatch.setitem(sys.modules, "integr8s_idem.stores.sql.access", None)
    monkeypatch.delattr("integr8s_idem.stores.sql.access", raising=False)

    answer = typed("--acl")

    assert answer.exit_code == 64
    assert 'a store of kind "mysql" needs integr8s_idem.stores.sql.access' in answer.stderr
    assert 'pip install "integr8s-idem[mysql]"' in answer.stderr


def test_permissions_are_printed_as_json() -> None:
    Path("settings.toml").write_text('[store]\nkind = "postgresql"\n')

    assert json.loads(typed("--acl", "--json").stdout) == typed("--acl").stdout.splitlines()


def test_a_policy_is_printed_unchanged_as_json() -> None:
    Path("settings.toml").write_text('[store]\nkind = "dynamodb"\n')

    assert "Statement" in json.loads(typed("--acl", "--json").stdout)


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (
            StoreConfigurationError("start", "the tables are not there; run: it", Code.SCHEMA_MISSING),
            "the tables are not there",
            "run: it",
        ),
        (StoreUnavailableError("ping", "no answer; or a late one"), "no answer", "or a late one"),
        (
            StoreUnavailableError("ping", "Redis is loading its data"),
            "Redis is loading its data",
            "wait until the problem passes, or resolve it on the server",
        ),
        (
            StoreUnavailableError("ping", "no connection to mysql: a; b"),
            "no connection to mysql: a; b",
            "start the server, or correct its address in [store]",
        ),
        (
            StoreConfigurationError("ping", "Redis answers: unknown command 'SENTINEL'"),
            "Redis answers: unknown command 'SENTINEL'",
            "set store.sentinels to the addresses of Sentinels, usually on port 26379",
        ),
    ],
)
def test_an_error_of_the_store_is_split_into_problem_and_remedy(error: StoreError, what: str, remedy: str) -> None:
    result = refusal(error, Settings())

    assert (result.what, result.remedy) == (what, remedy)


@pytest.mark.parametrize("code", [Code(code) for code in Code if code.value.startswith(("store-", "schema-"))])
def test_every_error_of_the_store_has_a_remedy(code: Code) -> None:
    assert refusal(StoreConfigurationError("start", "it is so", code), Settings()).remedy


@pytest.mark.parametrize(
    ("message", "remedy"), [("= 5 exceeds 3: why; lower it", "lower it"), ("must be text", "change kafka.client_id")]
)
def test_a_mistake_in_the_settings_is_split_into_problem_and_remedy(message: str, remedy: str) -> None:
    assert mistake_remedy("kafka.client_id", message)[1] == remedy


def test_a_warning_about_settings_is_split_into_problem_cost_and_remedy() -> None:
    message = "= 5 is less than 3: events run again; raise it"

    assert warning_remedy("kafka.client_id", message) == ("= 5 is less than 3", "events run again", "raise it")


def test_a_store_without_users_has_no_permissions() -> None:
    Path("settings.toml").write_text('[store]\nkind = "sqlite"\n')

    answer = typed("--acl")

    assert answer.exit_code == 64
    assert 'a store of kind "sqlite" has no users' in answer.stderr


RETRIES = RetryTopics("billing", ("1m", "1h"), ("orders",))


def retry_findings(retries: RetryTopics = RETRIES, **facts: Any) -> list[Finding]:
    return list(retry_topic_findings([Reading(("orders",), None, retries=retries)], BrokerFacts(**facts)))


def retry_topic_settings(tier: str, **changes: Any) -> TopicSettings:
    settings = {"retention_seconds": 86_400.0, "compacts": False, "deletes": True, "max_message_bytes": 1_048_588}
    return TopicSettings(name=f"orders.billing.retry.{tier}", **{**settings, **changes})


def test_doctor_names_the_retry_topics_and_what_a_rollback_would_strand() -> None:
    [found] = retry_findings()

    assert (found.code, found.severity, found.where) == (Code.RETRY_TOPICS_SEEN, Severity.INFO, "group billing")
    assert "orders.billing.retry.1m, orders.billing.retry.1h" in found.what
    assert found.remedy.startswith("before a rollback")


@pytest.mark.parametrize(("creates", "severity"), [(False, Severity.ERROR), (True, Severity.WARNING)])
def test_doctor_reports_a_missing_retry_topic(creates: bool, severity: Severity) -> None:
    _, found = retry_findings(missing=frozenset({"orders.billing.retry.1h"}), creates_topics=creates)

    assert (found.code, found.severity) == (Code.RETRY_TOPIC_MISSING, severity)
    assert found.where == "topic orders.billing.retry.1h"


@pytest.mark.parametrize("changes", [{"retention_seconds": 3_600.0}, {"compacts": True}])
def test_doctor_reports_a_retry_topic_that_loses_copies(changes: dict[str, Any]) -> None:
    topics = [retry_topic_settings("1m"), retry_topic_settings("1h", **changes)]

    _, found = retry_findings(topics={topic.name: topic for topic in topics})

    assert (found.code, found.severity) == (Code.RETRY_TOPIC_LOSES, Severity.ERROR)
    assert found.where == "topic orders.billing.retry.1h"


@pytest.mark.parametrize(("tiers", "severity"), [(("1m",), Severity.INFO), ((), Severity.WARNING)])
def test_doctor_reports_retry_topics_that_were_removed(tiers: tuple[str, ...], severity: Severity) -> None:
    existing = frozenset({"orders", "orders.billing.retry.1m", "orders.billing.retry.2h", "orders.other.retry.1m"})

    *_, found = retry_findings(RetryTopics("billing", tiers, ("orders",)), existing=existing)

    assert (found.code, found.severity) == (Code.RETRY_TOPIC_RETIRED, severity)
    assert found.where == "topic orders.billing.retry.2h"
