"""Commands that change records: count, ask for confirmation, write audit lines, change, and report."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from integr8s_idem._util.escaping import printable
from integr8s_idem.cli.common import FAILURE
from integr8s_idem.cli.confirmation import confirm
from integr8s_idem.cli.keys_format import summary_text
from integr8s_idem.cli.output import run_async, write_error, write_report
from integr8s_idem.cli.progress import progress
from integr8s_idem.config import Settings
from integr8s_idem.keys import Key
from integr8s_idem.operations.audit import audited, store_place
from integr8s_idem.operations.keys.record_changes import ChangeSummary, RecordChanger
from integr8s_idem.operations.keys.record_reader import estimated_size, open_repository


@dataclass(frozen=True)
class ChangeOptions:
    """Options shared by these commands."""

    yes: bool
    audit_file: str | None
    as_json: bool


@dataclass(frozen=True)
class Change:
    """A command that changes records."""

    command: str
    """The command as typed."""
    done: str
    """Past participle of the action, for the report."""
    question: str
    """Question for the confirmation; `{}` is replaced by the counts."""
    count: Callable[[RecordChanger], Awaitable[ChangeSummary]]
    do: Callable[[RecordChanger, ChangeSummary], Awaitable[None]]

    def run(self, settings: Settings, selected: Mapping[str, Any], options: ChangeOptions) -> int:
        """Run the command and return its exit status.  Counts beforehand only if it asks for confirmation."""
        if not options.yes:
            # Asked outside of an event loop, where Ctrl-C would not interrupt the prompt.
            summary = run_async(self._count(settings))
            if not summary.records:
                return self._report(summary, options)
            _print_skipped(summary)
            if not confirm(self.question.format(summary_text(summary))):
                return FAILURE
        summary = run_async(self._execute(settings, selected, options))
        status = self._report(summary, options)
        if settings.idempotency.local_memory_keys and summary.records:
            write_error("workers keep outcomes of their own runs in memory until they restart (local_memory_keys)")
        return status

    async def _count(self, settings: Settings) -> ChangeSummary:
        async with _open_changer(settings, "counting") as changer:
            return await self.count(changer)

    async def _execute(self, settings: Settings, selected: Mapping[str, Any], options: ChangeOptions) -> ChangeSummary:
        summary = ChangeSummary()
        audit_fields = {**_hashed_names(selected, settings), "store": store_place(settings)}
        with audited(self.command, audit_fields, options.audit_file) as entry:
            try:
                async with _open_changer(settings, self.done) as changer:
                    await self.do(changer, summary)
            finally:
                entry.counts.update(summary.as_json())
        return summary

    def _report(self, summary: ChangeSummary, options: ChangeOptions) -> int:
        """Print the report and return the exit status."""
        counts, text = summary.as_json(), f"{self.done}: {summary_text(summary)}"
        answer = {self.done: counts.pop("records"), **counts, "unmatched": summary.unmatched}
        is_written = write_report(json.dumps(answer) if options.as_json else text, text)
        if not (options.as_json and is_written):
            _print_skipped(summary)
        return _status_of(summary) if is_written else FAILURE


@asynccontextmanager
async def _open_changer(settings: Settings, activity: str) -> AsyncIterator[RecordChanger]:
    """Open a store whose records this version may change, and show the progress of `activity`."""
    async with open_repository(settings) as repository:
        await repository.ping()  # raises an error if the tables are of another version
        with progress(activity, await estimated_size(repository)) as advance:
            yield RecordChanger(settings, repository, advance)


def _status_of(summary: ChangeSummary) -> int:
    """Return `FAILURE` if keys were named and none of them has a record."""
    return FAILURE if summary.unmatched and not summary.records else 0


def _hashed_names(selected: Mapping[str, Any], settings: Settings) -> Mapping[str, Any]:
    """Hash the names of keys if keys are hashed, since both may contain personal data."""
    config = settings.idempotency
    if not config.hash_keys or "keys" not in selected:
        return selected
    full = f"{config.key_prefix}:"
    return {**selected, "keys": [name if name.startswith(full) else Key.of(name).digest for name in selected["keys"]]}


def _print_skipped(summary: ChangeSummary) -> None:
    for reason, number in sorted(summary.skipped.items()):
        write_error(f"skipped: {number:,} {reason}")
    print_unmatched(summary)


def print_unmatched(summary: ChangeSummary) -> None:
    """Report each name without a record, since it may be mistyped."""
    for name in summary.unmatched:
        write_error(f"no record found for {printable(name)}: never seen, expired or mistyped; see `keys explain`")
