"""Commands that change records: counted, asked about, told to the audit file, done."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from integr8s_idem._util.escaping import printable
from integr8s_idem.cli.common import FAILURE
from integr8s_idem.cli.confirmation import confirm
from integr8s_idem.cli.keys_format import counted_text
from integr8s_idem.cli.output import echo, run_async, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.config import Settings
from integr8s_idem.keys import Key
from integr8s_idem.operations.audit import audited, store_place
from integr8s_idem.operations.keys.record_changes import Changer, Counted
from integr8s_idem.operations.keys.record_reader import opened, size


@dataclass(frozen=True)
class HowToChange:
    """What all of these commands are told."""

    yes: bool
    audit_file: str | None
    as_json: bool


@dataclass(frozen=True)
class Change:
    """One of these commands."""

    command: str
    """As people type it."""
    done: str
    """What was done, as a word."""
    question: str
    """`{}` stands for what it would be done to."""
    count: Callable[[Changer], Awaitable[Counted]]
    do: Callable[[Changer, Counted], Awaitable[None]]

    def made(self, settings: Settings, asked: Mapping[str, Any], how: HowToChange) -> int:
        """The exit status.  Nothing is counted beforehand where nobody is asked."""
        if not how.yes:
            # Asked between two event loops: within one, Ctrl-C would not end the question.
            counted = run_async(self._counted(settings))
            if not counted.records:
                self._tell(counted, how)
                return _status_of(counted)
            _tell_left(counted)
            if not confirm(self.question.format(counted_text(counted))):
                return FAILURE
        counted = run_async(self._done(settings, asked, how))
        self._tell(counted, how)
        if settings.idempotency.local_memory_keys and counted.records:
            told = "workers that completed some of it themselves remember that until they restart (local_memory_keys)"
            write_error(told)
        return _status_of(counted)

    async def _counted(self, settings: Settings) -> Counted:
        async with opened(settings) as repository:
            with progress("counting", await size(repository)) as advance:
                return await self.count(Changer(settings, repository, advance))

    async def _done(self, settings: Settings, asked: Mapping[str, Any], how: HowToChange) -> Counted:
        counted = Counted()
        told = {**_fit_for_audit(asked, settings), "store": store_place(settings)}
        with audited(self.command, told, how.audit_file) as entry:
            try:
                async with opened(settings) as repository:
                    with progress(self.done, await size(repository)) as advance:
                        await self.do(Changer(settings, repository, advance), counted)
            finally:
                entry.counts.update(counted.told())
        return counted

    def _tell(self, counted: Counted, how: HowToChange) -> None:
        told = counted.told()
        if how.as_json:
            echo(json.dumps({self.done: told.pop("records"), **told, "unmatched": counted.unmatched}))
            return
        echo(f"{self.done}: {counted_text(counted)}")
        _tell_left(counted)


def _status_of(counted: Counted) -> int:
    """`FAILURE` if keys were named and none of them has a record."""
    return FAILURE if counted.unmatched and not counted.records else 0


def _fit_for_audit(asked: Mapping[str, Any], settings: Settings) -> Mapping[str, Any]:
    """Where keys are hashed because they hold personal data, what people call them holds it, too."""
    config = settings.idempotency
    if not config.hash_keys or "keys" not in asked:
        return asked
    full = f"{config.key_prefix}:"
    return {**asked, "keys": [name if name.startswith(full) else Key.of(name).digest for name in asked["keys"]]}


def _tell_left(counted: Counted) -> None:
    for reason, number in sorted(counted.spared.items()):
        write_error(f"left alone: {number:,} {reason}")
    tell_unmatched(counted)


def tell_unmatched(counted: Counted) -> None:
    """Name by name, or one that was mistyped would pass for one that is done."""
    for name in counted.unmatched:
        told = f"no record of {printable(name)}: never seen, expired, or called otherwise; `keys explain` says more"
        write_error(told)
