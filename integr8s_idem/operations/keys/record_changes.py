"""What operators change: leases that end now, records that are forgotten.

They hold no token.  Each record is changed as it was seen, or not at all: see docs/decisions/0047.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from integr8s_idem.config import Settings
from integr8s_idem.keys import generation_key
from integr8s_idem.operations.keys.key_parser import Named, is_meant, named, parts_of, space_of
from integr8s_idem.operations.keys.record_filter import Wanted
from integr8s_idem.operations.keys.record_reader import Advance, Found, read, steps_of, survey, tended, wanted_records
from integr8s_idem.operations.keys.record_state import Lease, Standing, state_of
from integr8s_idem.records import Corrupt, IdempotencyRecord
from integr8s_idem.stores import IdempotencyRepository

HELD: Final = "in progress, with a lease that holds"
RENEWED: Final = "renewed lately: its owner seems to live"
NOT_HELD: Final = "nobody holds it"
UNREADABLE: Final = "unreadable; name it, or say --status corrupt"
CHANGED: Final = "changed meanwhile"
FILTERED: Final = "named, but not what the filter asks for"

BATCH: Final = 500
"""Records that are changed in one call."""


@dataclass(frozen=True)
class Chosen:
    """What a command is to be done to: by names, by a filter, or by both."""

    names: tuple[str, ...] = ()
    wanted: Wanted = field(default_factory=Wanted)


@dataclass
class Counted:
    """What was found, or changed."""

    records: int = 0
    by: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By service and state."""
    spared: Counter[str] = field(default_factory=Counter)
    """Left alone, by the reason why."""
    unmatched: list[str] = field(default_factory=list)
    """Names of which there is no record: mistyped, or gone already."""

    def add(self, found: Found, told: Named) -> None:
        self.records += 1
        self.by[told.scope, state_of(found)] += 1

    def add_all(self, batch: Sequence[tuple[Found, Named]], done: Sequence[bool]) -> None:
        for (found, told), is_done in zip(batch, done, strict=True):
            if is_done:
                self.add(found, told)
            else:
                self.spared[CHANGED] += 1

    def told(self) -> dict[str, object]:
        """For audit lines and `--json`."""
        by = [{"service": service, "status": state, "records": n} for (service, state), n in sorted(self.by.items())]
        return {"records": self.records, "by": by, "spared": dict(self.spared)}


class Changer:
    """Chooses records of one store, and changes them."""

    def __init__(
        self, settings: Settings, repository: IdempotencyRepository, advance: Advance = lambda _: None
    ) -> None:
        self._settings = settings
        self._repository = repository
        self._store = tended(repository)
        self.advance = advance
        self._prefix = settings.idempotency.key_prefix

    async def count_to_release(self, chosen: Chosen, *, force: bool) -> Counted:
        """What `release` would do it to."""
        return await self._count(self._to_release(chosen, force, counted := Counted()), counted)

    async def count_to_purge(self, chosen: Chosen, *, in_progress: bool) -> Counted:
        """What `purge` would do it to."""
        return await self._count(self._to_purge(chosen, in_progress, counted := Counted()), counted)

    async def _count(self, records: AsyncIterator[tuple[Found, Named]], counted: Counted) -> Counted:
        async for found, told in records:
            counted.add(found, told)
        return counted

    async def release(self, chosen: Chosen, counted: Counted, *, force: bool) -> None:
        """Let leases end now, a batch at a time; `counted` is told of each.

        `force`: of owners that seem to live as well.
        """
        async for batch in _batches(self._to_release(chosen, force, counted)):
            records = [found for found, _ in batch if isinstance(found, IdempotencyRecord)]
            counted.add_all(batch, await self._store.end_leases(records))

    async def purge(self, chosen: Chosen, counted: Counted, *, in_progress: bool) -> None:
        """Forget records, a batch at a time; `counted` is told of each.

        `in_progress`: those that somebody holds as well.
        """
        async for batch in _batches(self._to_purge(chosen, in_progress, counted)):
            readable = [one for one in batch if isinstance(one[0], IdempotencyRecord)]
            damaged = [one for one in batch if isinstance(one[0], Corrupt)]
            gone = await self._store.forget([found for found, _ in readable])  # type: ignore[misc]
            counted.add_all(readable, gone)
            # What cannot be read cannot have changed, either: nobody writes it.
            await self._repository.delete([found.key for found, _ in damaged])
            counted.add_all(damaged, [True] * len(damaged))

    async def _to_release(self, chosen: Chosen, force: bool, counted: Counted) -> AsyncIterator[tuple[Found, Named]]:
        async for found, told in self.chosen(chosen, counted):
            if isinstance(found, Corrupt):
                counted.spared[UNREADABLE] += 1
                continue
            standing = Standing(found)
            lease = self._settings.idempotency_for(told.scope).lease
            if standing.lease is not Lease.HELD:
                counted.spared[NOT_HELD] += 1
            elif standing.seems_alive(lease) and not force:
                counted.spared[RENEWED] += 1
            else:
                yield found, told

    async def _to_purge(
        self, chosen: Chosen, in_progress: bool, counted: Counted
    ) -> AsyncIterator[tuple[Found, Named]]:
        async for found, told in self.chosen(chosen, counted):
            if isinstance(found, Corrupt):
                if chosen.names or "corrupt" in chosen.wanted.states:
                    yield found, told
                else:
                    counted.spared[UNREADABLE] += 1
            elif Standing(found).lease is Lease.HELD and not in_progress:
                counted.spared[HELD] += 1
            else:
                yield found, told

    async def chosen(self, chosen: Chosen, counted: Counted) -> AsyncGenerator[tuple[Found, Named], None]:
        """What is named, and the steps of that, as far as the filter takes it; `counted` is told of names in vain."""
        if not chosen.names:
            async for found, told in wanted_records(self._repository, self._prefix, chosen.wanted, self.advance):
                yield found, told
            return
        seen: set[str] = set()
        for name in chosen.names:
            in_vain = True
            async for found in self._called(name):
                told = named(found.key, self._prefix)
                in_vain = False
                if found.key in seen:
                    continue
                seen.add(found.key)
                if chosen.wanted.takes(found, told):
                    yield found, told
                else:
                    counted.spared[FILTERED] += 1
            if in_vain:
                counted.unmatched.append(name)

    async def _called(self, name: str) -> AsyncIterator[Found]:
        """What `name` names, and the steps of it: with those left behind, a new run would take them for done."""
        if name.startswith(f"{self._prefix}:"):
            for found in (await read(self._repository, [name])).values():
                yield found
            for step in await self._steps(name):
                yield step
            return
        async for found in survey(self._repository, f"{self._prefix}:", parts_of(name), self.advance):
            if is_meant(named(found.key, self._prefix), name):
                yield found
                for step in await self._steps(found.key):
                    yield step

    async def _steps(self, full: str) -> Sequence[Found]:
        told = named(full, self._prefix)
        config = self._settings.idempotency_for(told.scope)
        space = space_of(told, self._prefix, hash_keys=config.hash_keys)
        if space is None or told.step is not None:
            return ()
        unit = generation_key(told.unit, told.generation)
        return list((await steps_of(self._repository, space, unit)).values())


async def _batches(
    records: AsyncIterator[tuple[Found, Named]],
) -> AsyncIterator[list[tuple[Found, Named]]]:
    batch: list[tuple[Found, Named]] = []
    async for one in records:
        batch.append(one)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
