"""The store: whether it answers, what it says of itself, and whether this user may do all that is needed."""

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
from integr8s_idem.doctor.remedies import of_store
from integr8s_idem.doctor.sqlite_file import is_to_be_made, look_at_absent_file
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.records import Completion, Failure, Reserved, ReserveRequest, StoreHealth
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import SqlSettings, as_it_is, open_store

T = TypeVar("T")

STORE: Final = "store"
OUTBOX: Final = "outbox"
_LEASE: Final = timedelta(seconds=30)
_TTL: Final = timedelta(minutes=1)
_LOOK_SECONDS: Final = 2.0
"""How long the whole store is searched for our own records: a refusal comes with the first page."""
_OLDEST: Final[Mapping[str, tuple[int, ...]]] = {
    "redis": (6, 2),
    "redis-cluster": (6, 2),
    "postgresql": (15,),
    "mysql": (8, 0, 19),
    "mariadb": (10, 6),
    "sqlite": (3, 35),
}
_BEFORE_MARIADB: Final = "5.5.5-"
"""What some MariaDB put before their version, for clients that took 10 for less than 5."""
_MADE_AT_START: Final = (Code.SCHEMA_MISSING, Code.SCHEMA_OLDER)

_COST: Final[Mapping[Code, str]] = {
    Code.SCHEMA_MISSING: "no worker starts",
    Code.SCHEMA_OLDER: "no worker starts",
    Code.SCHEMA_NEWER: "no worker of this version starts",
    Code.SCHEMA_OTHER: "no worker starts",
    Code.STORE_PERMISSION: "workers stop at the first event that needs it",
    Code.STORE_CREDENTIALS: "no worker starts",
    Code.STORE_REFUSED: "no worker starts",
}
_OUTBOX_COST: Final = "no worker starts whose handlers commit together with their records, and their events stay here"
_PAUSED: Final = "workers wait, and handle nothing meanwhile"


async def look_at_store(settings: Settings, now: Callable[[], float]) -> list[Finding]:
    """All about the store.  It writes three records that live for a minute, and deletes them.

    `now`: this machine's clock, in seconds since 1970.
    """
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        return []  # the settings say all there is to say
    if isinstance(store, SqliteStoreSettings) and await is_to_be_made(settings):
        return [await look_at_absent_file(store)]
    try:
        with as_it_is():
            async with open_store(store, key_prefix=settings.idempotency.key_prefix) as repository:
                found = await look_at_repository(repository, settings, now)
                return [_left_to_a_worker(finding) for finding in found]
    except StoreError as error:
        return [refusal(error, settings)]


async def look_at_repository(
    repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]
) -> list[Finding]:
    """All about a store that is open, whoever wrote it; as `look_at_store`."""
    try:
        health = await repository.ping()
        found = [*_told(health), *await tried(repository, settings, now)]
        return _worst([*found, *await _outbox_findings(repository, settings)])
    except StoreError as error:
        return [refusal(error, settings)]


def _worst(found: list[Finding]) -> list[Finding]:
    """Without warnings of what has turned out to be an error."""
    errors = {finding.code for finding in found if finding.severity is Severity.ERROR}
    return [finding for finding in found if finding.severity is Severity.ERROR or finding.code not in errors]


def _left_to_a_worker(finding: Finding) -> Finding:
    """What a worker sets by itself in a file of the settings, and the doctor has left as it is."""
    if finding.code is not Code.STORE_JOURNAL:
        return finding
    return replace(finding, severity=Severity.INFO, cost="", mend="a worker sets WAL at its start")


def refusal(error: StoreError, settings: Settings, where: str = STORE) -> Finding:
    """An error of the store as a finding: it names itself what is wrong."""
    if not isinstance(error, StoreUnavailableError | StoreConfigurationError):
        what, mend = of_store(Code.STORE_REFUSED, str(error))
        return Finding(Code.STORE_REFUSED, Severity.ERROR, where, what, _PAUSED, mend)
    code = Code(error.code)
    what, mend = of_store(code, error.reason)
    if isinstance(settings.store, SqliteStoreSettings) and code in _MADE_AT_START:
        return Finding(code, Severity.INFO, where, what, "", "a worker does it at its start")
    waits = isinstance(error, StoreUnavailableError)
    return Finding(code, Severity.ERROR, where, what, _PAUSED if waits else _COST.get(code, ""), mend)


async def _outbox_findings(repository: IdempotencyRepository, settings: Settings) -> list[Finding]:
    """Whether the tables for events are whole; a user who may not look at them has no such handlers."""
    if not isinstance(settings.store, SqlSettings):
        return []
    from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox

    if not isinstance(repository, SqlIdempotencyRepository):
        return []  # the application's own, in place of that of the settings
    try:
        await SqlOutbox(repository.engine).check()
    except StoreError as error:
        refused = refusal(error, settings)
        if refused.code is Code.STORE_PERMISSION:
            return []
        return [replace(refused, where=OUTBOX, cost=_OUTBOX_COST if refused.cost else "")]
    return []


def _told(health: StoreHealth) -> list[Finding]:
    milliseconds = health.latency / timedelta(milliseconds=1)
    seen = f"{' '.join([health.kind, health.version]).rstrip()} answers in {milliseconds:.1f} ms"
    found = [Finding(Code.STORE_SEEN, Severity.INFO, STORE, seen, "", "")]
    if is_too_old(health.kind, health.version):
        oldest = ".".join(map(str, _OLDEST[_product(health.kind, health.version)]))
        what, cost = f"{health.kind} {health.version} is older than {oldest}", "nothing here was tested with it"
        found.append(Finding(Code.STORE_VERSION, Severity.WARNING, STORE, what, cost, f"use {oldest} or newer"))
    return found + [_warned(warning) for warning in health.warnings]


def _warned(warning: str) -> Finding:
    if isinstance(warning, StoreWarning):
        return Finding(warning.code, Severity.WARNING, STORE, warning.what, warning.cost, warning.mend)
    return Finding(Code.STORE_WARNING, Severity.WARNING, STORE, warning, "", "")


def is_too_old(kind: str, version: str) -> bool:
    """Whether `version`, or one of several, is below the oldest that we support; what cannot be read is not."""
    oldest = _OLDEST.get(_product(kind, version))
    if oldest is None:
        return False
    read = (re.match(r"\d+(\.\d+)*", one.removeprefix(_BEFORE_MARIADB)) for one in version.split(", "))
    told = [tuple(map(int, numbers[0].split("."))) for numbers in read if numbers]
    # Of a version that is not told to the end, the rest is taken for new enough.
    return any(numbers < oldest[: len(numbers)] for numbers in told)


def _product(kind: str, version: str) -> str:
    return "mariadb" if kind == "mysql" and "mariadb" in version.lower() else kind


async def tried(repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]) -> list[Finding]:
    """Use each verb once, on records of our own: a permission that lacks shows, and a store that forgets."""
    prefix = f"{settings.idempotency.key_prefix}:doctor:{os.urandom(8).hex()}"
    trial = _Trial(repository, settings, prefix)
    before = now()
    reserved = await trial.told(trial.reserve())
    after = now()
    if reserved is None:
        return trial.found
    first, second, third = reserved
    answers = {
        "renew": await trial.told(repository.renew([first], _LEASE)),
        "complete": await trial.told(repository.complete([Completion(reservation=first, ttl=_TTL)])),
        "fail": await trial.told(repository.fail([Failure(reservation=second, ttl=_TTL, error="doctor")])),
        "release": await trial.told(repository.release([third])),
    }
    read = await trial.told(repository.get([one.key for one in reserved]))
    await trial.told(trial.searched())
    await trial.told(repository.delete([one.key for one in reserved]))
    forgotten = [verb for verb, answer in answers.items() if answer == [False]]
    if forgotten or (read is not None and None in read):
        trial.forgets(", ".join(forgotten) or "get")
    if not isinstance(settings.store, SqliteStoreSettings):  # its clock is ours
        # The fence of a key that is new is the store's clock.
        trial.found += skew_findings(first.fence / 1e6, before, after)
    return trial.found


@dataclass
class _Trial:
    repository: IdempotencyRepository
    settings: Settings
    prefix: str
    found: list[Finding] = field(default_factory=list)

    async def reserve(self) -> list[Reserved]:
        wishes = [
            ReserveRequest(key=f"{self.prefix}:{name}", token=os.urandom(16), lease=_LEASE, retention=_TTL)
            for name in ("a", "b", "c")
        ]
        verdicts = await self.repository.reserve(wishes)
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert len(reserved) == len(wishes), "keys that nobody else can know were taken"
        return reserved

    async def searched(self) -> None:
        """Look for our records among all others, for a while."""
        for looking in (lambda: self.repository.count_active(self.prefix), self._first_scanned):
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await looking()
            except TimeoutError:
                continue  # so many records are there; that it may look is known

    async def _first_scanned(self) -> None:
        async for _ in self.repository.scan(self.prefix):
            return

    async def told(self, call: Awaitable[T]) -> T | None:
        """The answer; `None` for an error, which is a finding then."""
        try:
            return await call
        except StoreError as error:
            finding = refusal(error, self.settings)
            if finding not in self.found:
                self.found.append(finding)
            return None

    def forgets(self, verbs: str) -> None:
        what = f"it has forgotten within a second what it was told ({verbs})"
        cost = "events that come again run again"
        mend = "look for evictions, a flush, or another server behind the same address"
        self.found.append(Finding(Code.STORE_FORGETS, Severity.ERROR, STORE, what, cost, mend))
