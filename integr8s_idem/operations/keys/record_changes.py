"""Changes by operators: release leases and purge records.

Operators have no token.  A record is changed only if it is still as it was when it was read: see docs/decisions/0047.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from integr8s_idem.config import Settings
from integr8s_idem.engine.step_slots import step_name
from integr8s_idem.keys import KeySpace
from integr8s_idem.operations.keys.key_parser import (
    ParsedKey,
    check_name,
    key_space,
    literal_parts,
    matches_name,
    parse_key,
)
from integr8s_idem.operations.keys.record_filter import RecordFilter
from integr8s_idem.operations.keys.record_reader import (
    Advance,
    AnyRecord,
    matching_records,
    read_records,
    read_steps_of_units,
    require_admin,
    scan_records,
)
from integr8s_idem.operations.keys.record_state import Lease, RecordState, status_of
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository

ParsedRecord: TypeAlias = tuple[AnyRecord, ParsedKey]

HELD: Final = "in progress with an active lease"
RENEWED: Final = "renewed recently: the owner seems to be alive"
NOT_HELD: Final = "not leased"
CORRUPT: Final = "corrupt; name the key, or use --status corrupt"
CHANGED: Final = "changed in the meantime"
FILTERED: Final = "named, but excluded by the filter"

BATCH_SIZE: Final = 500
"""Number of records to change in one call."""


@dataclass(frozen=True)
class Selection:
    """The records to change: by name, by a filter, or both.

    Raises:
        ApplicationError: A name is not valid UTF-8.
    """

    names: tuple[str, ...] = ()
    record_filter: RecordFilter = field(default_factory=RecordFilter)

    def __post_init__(self) -> None:
        for name in self.names:
            check_name(name)


@dataclass
class ChangeSummary:
    """Counts of records that were found or changed."""

    records: int = 0
    by: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts by service and status."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Counts of records that were not changed, by reason."""
    unmatched: list[str] = field(default_factory=list)
    """Names without a record: mistyped, expired or already purged."""

    def add(self, found: AnyRecord, parsed: ParsedKey) -> None:
        self.records += 1
        self.by[parsed.scope, status_of(found)] += 1

    def add_all(self, batch: Sequence[ParsedRecord], done: Sequence[bool]) -> None:
        for (found, parsed), is_done in zip(batch, done, strict=True):
            if is_done:
                self.add(found, parsed)
            else:
                self.skipped[CHANGED] += 1

    def as_json(self) -> dict[str, object]:
        """Return the counts for audit lines and `--json`."""
        by = [{"service": service, "status": state, "records": n} for (service, state), n in sorted(self.by.items())]
        return {"records": self.records, "by": by, "skipped": dict(self.skipped)}


class RecordChanger:
    """Selects and changes the records of one store."""

    def __init__(
        self, settings: Settings, repository: IdempotencyRepository, advance: Advance = lambda _: None
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._store = require_admin(repository)
        self.advance = advance
        self._prefix = settings.idempotency.key_prefix

    async def count_releasable(self, selection: Selection, *, force: bool) -> ChangeSummary:
        """Count the records that `release` would change."""
        return await self._count(self._releasable(selection, force, summary := ChangeSummary()), summary)

    async def count_purgeable(self, selection: Selection, *, in_progress: bool) -> ChangeSummary:
        """Count the records that `purge` would delete."""
        return await self._count(self._purgeable(selection, in_progress, summary := ChangeSummary()), summary)

    async def _count(self, records: AsyncIterator[ParsedRecord], summary: ChangeSummary) -> ChangeSummary:
        async for found, parsed in records:
            summary.add(found, parsed)
        return summary

    async def release(self, selection: Selection, summary: ChangeSummary, *, force: bool) -> None:
        """End leases now, in batches.

        Args:
            selection: The records to release.
            summary: Updated for each record.
            force: Whether to end leases that were renewed recently as well.
        """
        async for batch in _batches(self._releasable(selection, force, summary)):
            records = [found for found, _ in batch if isinstance(found, IdempotencyRecord)]
            summary.add_all(batch, await self._store.end_leases(records))

    async def purge(self, selection: Selection, summary: ChangeSummary, *, in_progress: bool) -> None:
        """Delete records, in batches.

        Args:
            selection: The records to delete.
            summary: Updated for each record.
            in_progress: Whether to delete records with an active lease as well.
        """
        async for batch in _batches(self._purgeable(selection, in_progress, summary)):
            readable = [one for one in batch if isinstance(one[0], IdempotencyRecord)]
            damaged = [one for one in batch if isinstance(one[0], Corrupt)]
            gone = await self._store.forget([found for found, _ in readable])  # type: ignore[misc]
            summary.add_all(readable, gone)
            # A corrupt record is never written, so it cannot have changed.
            await self._repository.delete([found.key for found, _ in damaged])
            summary.add_all(damaged, [True] * len(damaged))

    async def _releasable(
        self, selection: Selection, force: bool, summary: ChangeSummary
    ) -> AsyncIterator[ParsedRecord]:
        async for found, parsed in self.select(selection, summary):
            if isinstance(found, Corrupt):
                summary.skipped[CORRUPT] += 1
                continue
            state = RecordState(found)
            lease = self._settings.idempotency_for(parsed.scope).lease
            if state.lease is Lease.SCHEDULED:
                yield found, parsed  # nobody holds it, so nobody can lose it
            elif state.lease is not Lease.HELD:
                summary.skipped[NOT_HELD] += 1
            elif state.is_owner_alive(lease) and not force:
                summary.skipped[RENEWED] += 1
            else:
                yield found, parsed

    async def _purgeable(
        self, selection: Selection, in_progress: bool, summary: ChangeSummary
    ) -> AsyncIterator[ParsedRecord]:
        """Yield records with their steps: the next run skips steps that remain, and repeats steps that are gone."""
        async for batch in _batches(self.select(selection, summary)):
            units = [
                one
                for one in batch
                if not _is_step(*one) and self._is_purgeable(one[0], selection, in_progress, summary)
            ]
            chosen = {one[0].key: one for one in [*units, *await self._steps_of([parsed for _, parsed in units])]}
            others = [one for one in batch if _is_step(*one) and one[0].key not in chosen]
            for one in [*chosen.values(), *await self._separate_steps(others, selection, in_progress, summary)]:
                yield one

    def _is_purgeable(self, found: AnyRecord, selection: Selection, in_progress: bool, summary: ChangeSummary) -> bool:
        if isinstance(found, Corrupt):
            if selection.names or "corrupt" in selection.record_filter.states:
                return True
            summary.skipped[CORRUPT] += 1
        elif _is_held(found) and not in_progress:
            summary.skipped[HELD] += 1
        else:
            return True
        return False

    async def _separate_steps(
        self, steps: Sequence[ParsedRecord], selection: Selection, in_progress: bool, summary: ChangeSummary
    ) -> Sequence[ParsedRecord]:
        """Return the steps to delete although their unit is not: it is gone, or the full key of the step is named."""
        units = {found.key: parsed.unit_generation for found, parsed in steps if parsed.step is not None}
        # Steps are read again: they may have been deleted with their unit since.
        existing = await read_records(self._repository, [*units.values(), *(found.key for found, _ in steps)])
        chosen: list[ParsedRecord] = []
        for found, parsed in steps:
            unit = existing.get(units.get(found.key, ""))
            is_alone = found.key in units and unit is None and found.key in existing
            if isinstance(unit, IdempotencyRecord) and _is_held(unit) and not in_progress:
                if found.key in selection.names:
                    summary.skipped[HELD] += 1
            elif is_alone and not selection.record_filter.matches(found, parsed):
                summary.skipped[FILTERED] += 1
            elif is_alone or found.key in selection.names:
                chosen.append((found, parsed))
        return chosen

    async def select(self, selection: Selection, summary: ChangeSummary) -> AsyncGenerator[ParsedRecord, None]:
        """Yield the selected records and their steps; names without a record are added to `summary.unmatched`."""
        if not selection.names:
            async for found, parsed in matching_records(
                self._repository, self._prefix, selection.record_filter, self.advance
            ):
                yield found, parsed
            return
        seen: set[str] = set()
        for name in selection.names:
            is_unmatched = True
            async for found in self._find(name):
                parsed = parse_key(found.key, self._prefix)
                is_unmatched = False
                if found.key in seen:
                    continue
                seen.add(found.key)
                if _is_step(found, parsed) or selection.record_filter.matches(found, parsed):
                    yield found, parsed
                else:
                    summary.skipped[FILTERED] += 1
            if is_unmatched:
                summary.unmatched.append(name)

    async def _find(self, name: str) -> AsyncIterator[AnyRecord]:
        """Yield the records named `name` with their steps.  A new run would skip steps whose records remain."""
        if name.startswith(f"{self._prefix}:"):
            for found in (await read_records(self._repository, [name])).values():
                yield found
            for step in await self._steps(name):
                yield step
            return
        async for found in scan_records(self._repository, f"{self._prefix}:", literal_parts(name), self.advance):
            if matches_name(parse_key(found.key, self._prefix), name):
                yield found
                for step in await self._steps(found.key):
                    yield step

    async def _steps(self, full: str) -> Sequence[AnyRecord]:
        return [found for found, _ in await self._steps_of([parse_key(full, self._prefix)])]

    async def _steps_of(self, units: Sequence[ParsedKey]) -> list[ParsedRecord]:
        spaces: dict[str, KeySpace] = {}
        for parsed in units:
            config = self._settings.idempotency_for(parsed.scope)
            space = key_space(parsed, self._prefix, hash_keys=config.hash_keys)
            if space is not None and parsed.step is None:
                spaces[parsed.unit_generation] = space
        steps = await read_steps_of_units(self._repository, spaces)
        return [(found, parse_key(found.key, self._prefix)) for unit in steps.values() for found in unit.values()]


def _is_held(record: IdempotencyRecord) -> bool:
    return RecordState(record).lease in (Lease.HELD, Lease.SCHEDULED)


def _is_step(found: AnyRecord, parsed: ParsedKey) -> bool:
    """Return whether this is a readable record of a step; of a hashed key, only its result shows it."""
    if isinstance(found, Corrupt):
        return False
    return parsed.step is not None or (found.result is not None and bool(step_name(found.result)))


async def _batches(
    records: AsyncIterator[ParsedRecord],
) -> AsyncIterator[list[ParsedRecord]]:
    batch: list[ParsedRecord] = []
    async for one in records:
        batch.append(one)
        if len(batch) == BATCH_SIZE:
            yield batch
            batch = []
    if batch:
        yield batch
