"""Check the store: availability, version, health, permissions and clock."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, TypeVar

from integr8s_idem.config import MemoryStoreSettings, Settings, SqliteStoreSettings
from integr8s_idem.diagnostics import Code, Finding, Severity, StoreWarning
from integr8s_idem.doctor.clock_skew import skew_findings
from integr8s_idem.doctor.remedies import store_remedy
from integr8s_idem.doctor.sqlite_file import check_missing_file, is_missing
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.records import Completion, Failure, Reserved, ReserveRequest, StoreHealth
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import SqlSettings, as_it_is, open_store
from integr8s_idem.stores.outbox import Backlog

T = TypeVar("T")

STORE: Final = "store"
OUTBOX: Final = "outbox"
_LEASE: Final = timedelta(seconds=30)
_TTL: Final = timedelta(minutes=1)
_SCAN_SECONDS: Final = 2.0
"""How long to scan the store: a missing permission shows on the first page."""
_OLDEST: Final[Mapping[str, tuple[int, ...]]] = {
    "redis": (6, 2),
    "redis-cluster": (6, 2),
    "postgresql": (15,),
    "mysql": (8, 0, 19),
    "mariadb": (10, 6),
    "sqlite": (3, 35),
}
_MARIADB_PREFIX: Final = "5.5.5-"
"""Prefix of the version of some MariaDB servers, for old clients."""
_CREATED_AT_START: Final = (Code.SCHEMA_MISSING, Code.SCHEMA_OLDER)

_COST: Final[Mapping[Code, str]] = {
    Code.SCHEMA_MISSING: "workers cannot start",
    Code.SCHEMA_OLDER: "workers cannot start",
    Code.SCHEMA_NEWER: "workers of this version cannot start",
    Code.SCHEMA_OTHER: "workers cannot start",
    Code.STORE_PERMISSION: "workers stop at the first event that needs it",
    Code.STORE_CREDENTIALS: "workers cannot start",
    Code.STORE_REFUSED: "workers cannot start",
}
_OUTBOX_COST: Final = "workers with transactional handlers cannot start, and their events are not published"
_OLD_EVENT: Final = timedelta(minutes=1)
"""Age of an event in the outbox that is reported."""
_PAUSED: Final = "workers wait and handle no events"


async def check_store(settings: Settings, now: Callable[[], float]) -> list[Finding]:
    """Check the store.  Writes three records that expire after a minute, and deletes them.

    Args:
        settings: The settings.
        now: This machine's clock, in seconds since 1970.
    """
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        return []  # covered by the warnings about settings
    if isinstance(store, SqliteStoreSettings) and await is_missing(settings):
        return [await check_missing_file(store)]
    try:
        with as_it_is():
            async with open_store(store, key_prefix=settings.idempotency.key_prefix) as repository:
                found = await check_repository(repository, settings, now)
                return [_without_worker_settings(finding) for finding in found]
    except StoreError as error:
        return [refusal(error, settings)]


async def check_repository(
    repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]
) -> list[Finding]:
    """Check an open store, as `check_store` does."""
    try:
        health = await repository.ping()
        found = [*_health_findings(health), *await try_operations(repository, settings, now)]
        return _without_repeated_warnings([*found, *await _outbox_findings(repository, settings)])
    except StoreError as error:
        return [refusal(error, settings)]


def _without_repeated_warnings(found: list[Finding]) -> list[Finding]:
    """Remove warnings that are also reported as an error."""
    errors = {finding.code for finding in found if finding.severity is Severity.ERROR}
    return [finding for finding in found if finding.severity is Severity.ERROR or finding.code not in errors]


def _without_worker_settings(finding: Finding) -> Finding:
    """Downgrade the finding about the journal mode, which a worker sets at start but the doctor does not."""
    if finding.code is not Code.STORE_JOURNAL:
        return finding
    return replace(finding, severity=Severity.INFO, cost="", remedy="a worker enables WAL at start")


def refusal(error: StoreError, settings: Settings, where: str = STORE) -> Finding:
    """Convert an error of the store to a finding."""
    if not isinstance(error, StoreUnavailableError | StoreConfigurationError):
        what, remedy = store_remedy(Code.STORE_REFUSED, str(error))
        return Finding(Code.STORE_REFUSED, Severity.ERROR, where, what, _PAUSED, remedy)
    code = Code(error.code)
    what, remedy = store_remedy(code, error.reason)
    if isinstance(settings.store, SqliteStoreSettings) and code in _CREATED_AT_START:
        return Finding(code, Severity.INFO, where, what, "", "a worker does this at start")
    waits = isinstance(error, StoreUnavailableError)
    return Finding(code, Severity.ERROR, where, what, _PAUSED if waits else _COST.get(code, ""), remedy)


async def _outbox_findings(repository: IdempotencyRepository, settings: Settings) -> list[Finding]:
    """Check the outbox tables.  A user without permission to read them has no transactional handlers."""
    if not isinstance(settings.store, SqlSettings):
        return []
    from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox

    if not isinstance(repository, SqlIdempotencyRepository):
        return []  # provided by the application
    outbox = SqlOutbox(repository.engine)
    try:
        await outbox.check()
        return _backlog_findings(await outbox.backlog())
    except StoreError as error:
        refused = refusal(error, settings)
        if refused.code is Code.STORE_PERMISSION:
            return []
        return [replace(refused, where=OUTBOX, cost=_OUTBOX_COST if refused.cost else "")]


def _backlog_findings(backlog: Backlog) -> list[Finding]:
    """Report events that have waited for longer than a relay needs, even while it waits for a broker."""
    if backlog.age < _OLD_EVENT:
        return []
    what = f"{backlog.count} events wait, the oldest for {backlog.age.total_seconds():.0f} s"
    remedy = (
        "start a worker with transactional handlers, or `integr8s-idem relay`; if one runs, its log says which events "
        "the broker does not accept"
    )
    return [Finding(Code.OUTBOX_WAITING, Severity.WARNING, OUTBOX, what, "they are not published", remedy)]


def _health_findings(health: StoreHealth) -> list[Finding]:
    milliseconds = health.latency / timedelta(milliseconds=1)
    seen = f"{' '.join([health.kind, health.version]).rstrip()} answers in {milliseconds:.1f} ms"
    found = [Finding(Code.STORE_SEEN, Severity.INFO, STORE, seen, "", "")]
    if is_too_old(health.kind, health.version):
        oldest = ".".join(map(str, _OLDEST[_product(health.kind, health.version)]))
        what, cost = f"{health.kind} {health.version} is older than {oldest}", "this version is not tested"
        found.append(Finding(Code.STORE_VERSION, Severity.WARNING, STORE, what, cost, f"use {oldest} or newer"))
    return found + [_warning_finding(warning) for warning in health.warnings]


def _warning_finding(warning: str) -> Finding:
    if isinstance(warning, StoreWarning):
        return Finding(warning.code, Severity.WARNING, STORE, warning.what, warning.cost, warning.remedy)
    return Finding(Code.STORE_WARNING, Severity.WARNING, STORE, warning, "", "")


def is_too_old(kind: str, version: str) -> bool:
    """Return whether `version`, or one of several, is older than supported; an unknown format is not."""
    oldest = _OLDEST.get(_product(kind, version))
    if oldest is None:
        return False
    matches = (re.match(r"\d+(\.\d+)*", one.removeprefix(_MARIADB_PREFIX)) for one in version.split(", "))
    versions = [tuple(map(int, match[0].split("."))) for match in matches if match]
    # Missing parts of a version are assumed to be new enough.
    return any(numbers < oldest[: len(numbers)] for numbers in versions)


def _product(kind: str, version: str) -> str:
    return "mariadb" if kind == "mysql" and "mariadb" in version.lower() else kind


async def try_operations(
    repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]
) -> list[Finding]:
    """Use each operation once on test records, to find missing permissions and lost writes."""
    prefix = f"{settings.idempotency.key_prefix}:doctor:{os.urandom(8).hex()}"
    trial = _Trial(repository, settings, prefix)
    before = now()
    reserved = await trial.result(trial.reserve())
    after = now()
    if reserved is None:
        return trial.found
    first, second, third = reserved
    answers = {
        "renew": await trial.result(repository.renew([first], _LEASE)),
        "complete": await trial.result(repository.complete([Completion(reservation=first, ttl=_TTL)])),
        "fail": await trial.result(repository.fail([Failure(reservation=second, ttl=_TTL, error="doctor")])),
        "release": await trial.result(repository.release([third], delay=_LEASE, retention=_TTL)),
    }
    read = await trial.result(repository.get([one.key for one in reserved]))
    await trial.result(trial.scan())
    await trial.result(repository.delete([one.key for one in reserved]))
    forgotten = [operation for operation, answer in answers.items() if answer == [False]]
    if forgotten or (read is not None and None in read):
        trial.add_lost_writes(", ".join(forgotten) or "get")
    if not isinstance(settings.store, SqliteStoreSettings):  # SQLite uses this machine's clock
        # The fence of a new key is the store's clock.
        trial.found += skew_findings(first.fence / 1e6, before, after)
    return trial.found


@dataclass
class _Trial:
    repository: IdempotencyRepository
    settings: Settings
    prefix: str
    found: list[Finding] = field(default_factory=list)

    async def reserve(self) -> list[Reserved]:
        requests = [
            ReserveRequest(key=f"{self.prefix}:{name}", token=os.urandom(16), lease=_LEASE, retention=_TTL)
            for name in ("a", "b", "c")
        ]
        verdicts = await self.repository.reserve(requests)
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert len(reserved) == len(requests), "random keys were already reserved"
        return reserved

    async def scan(self) -> None:
        """Scan the store for the test records, for a limited time."""
        for operation in (lambda: self.repository.count_active(self.prefix), self._scan_one):
            try:
                async with asyncio.timeout(_SCAN_SECONDS):
                    await operation()
            except TimeoutError:
                continue  # the store is large, but permits scanning

    async def _scan_one(self) -> None:
        async for _ in self.repository.scan(self.prefix):
            return

    async def result(self, call: Awaitable[T]) -> T | None:
        """Return the result of `call`; for an error, add a finding and return `None`."""
        try:
            return await call
        except StoreError as error:
            finding = refusal(error, self.settings)
            if finding not in self.found:
                self.found.append(finding)
            return None

    def add_lost_writes(self, operations: str) -> None:
        what = f"writes were lost within a second ({operations})"
        cost = "redelivered events are handled again"
        remedy = "check for evictions, a flush, or several servers at the same address"
        self.found.append(Finding(Code.STORE_FORGETS, Severity.ERROR, STORE, what, cost, remedy))
