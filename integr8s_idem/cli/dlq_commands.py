"""`integr8s-idem dlq`: list, show, export and replay dead letters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, TextIO

import typer

from integr8s_idem.cli.common import AppOption, Embedded, Json, SettingsFile, exit_status_of, silence_client_logs
from integr8s_idem.cli.confirmation import AuditFile, Yes
from integr8s_idem.cli.dlq_options import (
    App,
    Errors,
    Filters,
    InGroups,
    Keys,
    Limit,
    Reasons,
    Services,
    Since,
    Source,
    Topics,
    Types,
    Until,
    search_of,
)
from integr8s_idem.cli.dlq_output import (
    DeadLetterDetails,
    ListFormat,
    count_text,
    details_text,
    group_lines,
    json_line,
    tally_lines,
)
from integr8s_idem.cli.dlq_replay import ReplayCommand, print_note
from integr8s_idem.cli.output import cleanup_on_signals, echo, output_errors, run_async, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.atomic_file import open_atomically
from integr8s_idem.operations.dead_letter_counts import Group, Tally
from integr8s_idem.operations.dead_letter_groups import GroupedDeadLetters
from integr8s_idem.operations.dead_letter_reader import DeadLetterReader, open_dead_letter_reader
from integr8s_idem.operations.dead_letter_records import open_record_lookup
from integr8s_idem.operations.dead_letter_replay import decide
from integr8s_idem.operations.dead_letter_search import Search, SearchPlan, pages, plan_search
from integr8s_idem.operations.replay_rate import parse_rate

dlq_app = typer.Typer(help="Inspect and replay dead letters.", no_args_is_help=True, rich_markup_mode=None)


@dlq_app.command("list")
def list_command(
    application: App = None,
    topic: Topics = None,
    service: Services = None,
    reason: Reasons = None,
    error: Errors = None,
    event_type: Types = None,
    key: Keys = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    summary: Annotated[bool, typer.Option("--summary", help="Print only the counts.")] = False,
    group: Annotated[
        bool, typer.Option("--group", help="Group by handler and error, without what varies in its message.")
    ] = False,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """List dead letters, and count them by service, reason and error.

    A dead letter is listed if it matches all options; a repeated option matches any of its values.  The values of
    --service, --reason, --error, --event-type and --key may contain the wildcards * and ?.

    With --json, prints one object per line and the counts on standard error, or a single object with --summary or
    --group.
    """

    def run() -> int:
        if group and summary:
            raise ApplicationError("--summary counts by service and reason, --group by handler and error: use one")
        filters = Filters(service, reason, error, event_type, key, since, until)
        search = search_of(Source(settings, embedded, application), topic, filters, limit)
        if group:
            groups = asyncio.run(_grouped(search))
            content = {"dead_letters": groups.total, "groups": groups.as_json()}
            echo(json.dumps(content, indent=2) if as_json else "\n".join(group_lines(groups)))
            return 0
        tally = asyncio.run(_list(search, rows=not summary, as_json=as_json))
        # The counts belong on standard output only if they are the requested output.
        write = echo if summary else write_error
        if as_json:
            write(json.dumps({"dead_letters": tally.total, "groups": tally.as_json()}, indent=2 if summary else None))
        else:
            write("\n".join([count_text(tally.total), *tally_lines(tally.rows())]))
        return 0

    raise typer.Exit(_exit_status_of(run, embedded=embedded))


@dlq_app.command("show")
def show_command(
    place: Annotated[
        list[str],
        typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="Position of a dead letter, as `dlq list` prints it."),
    ],
    payload: Annotated[bool, typer.Option("--payload", help="Print the payload in full.")] = False,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Show dead letters in detail.

    Prints the reason, headers, payload and records of each, and what a replay would do.
    """

    def run() -> int:
        search = search_of(Source(settings, embedded, application), None, Filters(), None, place)
        for number, details in enumerate(run_async(_details(search))):
            text = json_line(details.as_json()) if as_json else details_text(details, payload=payload)
            echo(f"\n{text}" if number and not as_json else text)
        return 0

    raise typer.Exit(_exit_status_of(run, embedded=embedded))


@dlq_app.command("export")
def export_command(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write to FILE, atomically, instead of to standard output."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    application: App = None,
    topic: Topics = None,
    service: Services = None,
    reason: Reasons = None,
    error: Errors = None,
    event_type: Types = None,
    key: Keys = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    group: InGroups = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Export dead letters as JSON lines.

    Each line contains the key, the payload and all headers of one dead letter, byte for byte: UTF-8 as {"text": …},
    other bytes as {"base64": …}.  Filter options work as in `dlq list`.  With --json, the count on standard error is
    also JSON.
    """

    def write() -> int:
        filters = Filters(service, reason, error, event_type, key, since, until, group)
        search = search_of(Source(settings, embedded, application), topic, filters, limit)
        with ExitStack() as stack:
            if output:
                # The temporary file contains payloads.
                stack.enter_context(cleanup_on_signals())
            file = stack.enter_context(open_atomically(output, replace=force)) if output else sys.stdout
            exported = run_async(_export(search, file))
        where = str(output) if output else "-"
        summary = {"dead_letters": exported, "file": where}
        write_error(json_line(summary) if as_json else f"{count_text(exported)} written to {where}")
        return 0

    raise typer.Exit(_exit_status_of(write, embedded=embedded))


@dlq_app.command("replay")
def replay_command(
    place: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="Replay only the dead letters at these positions."),
    ] = None,
    application: App = None,
    topic: Topics = None,
    service: Services = None,
    reason: Reasons = None,
    error: Errors = None,
    event_type: Types = None,
    key: Keys = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    group: InGroups = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Include dead letters that were already replayed, according to the store."),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Publish to this topic instead of the original topics."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="N/s", help="Publish at most N replays per second; also N/m and N/h."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the dead letters, but publish nothing.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Replay dead letters.

    Publishes each dead letter to its original topic, as its next generation, for the handler that failed.  Signs it
    with the [replay] secret, if the settings contain one.  Without arguments and filter options, replays all dead
    letters.  Filter options work as in `dlq list`.

    Counts first, and asks for confirmation.  Each generation of a guarded handler runs once, so you can safely replay
    twice, or run the command again after an interruption.
    """

    def replay() -> int:
        filters = Filters(service, reason, error, event_type, key, since, until, group)
        search = search_of(Source(settings, embedded, application), topic, filters, limit, place)
        per_second = parse_rate(rate) if rate is not None else None
        return ReplayCommand(search, again, as_json, audit_file, to, per_second).run(yes=yes, dry_run=dry_run)

    raise typer.Exit(_exit_status_of(replay, embedded=embedded))


def _exit_status_of(command: Callable[[], int], *, embedded: bool) -> int:
    silence_client_logs()
    return exit_status_of(command, embedded=embedded)


@asynccontextmanager
async def _opened(search: Search) -> AsyncIterator[tuple[DeadLetterReader, SearchPlan]]:
    async with open_dead_letter_reader(search.settings.kafka) as reader:
        plan = await plan_search(search, reader)
        print_note(plan)
        yield reader, plan


async def _list(search: Search, *, rows: bool, as_json: bool) -> Tally:
    tally, is_shown = Tally(), sys.stdout.isatty()
    async with _opened(search) as (reader, plan):
        list_format = ListFormat(plan.offset_ranges)
        if rows and not as_json:
            echo(list_format.heading())
        # On a terminal the lines themselves show the progress.
        with progress("reading", plan.length, quiet=rows and is_shown) as advance:
            async for page in pages(search, plan, reader):
                lines = [json_line(one.summary()) if as_json else list_format.line(one) for one in page.dead_letters]
                if rows and lines:
                    echo("\n".join(lines))
                for dead_letter in page.dead_letters:
                    tally.add(Group.of(dead_letter))
                advance(page.offsets_read)
    return tally


async def _grouped(search: Search) -> GroupedDeadLetters:
    groups = GroupedDeadLetters()
    async with _opened(search) as (reader, plan):
        with progress("reading", plan.length) as advance:
            async for page in pages(search, plan, reader):
                for dead_letter in page.dead_letters:
                    groups.add(dead_letter)
                advance(page.offsets_read)
    return groups


async def _details(search: Search) -> list[DeadLetterDetails]:
    details = []
    async with _opened(search) as (reader, plan), open_record_lookup(search.settings) as records:
        dead_letters = [dead_letter async for page in pages(search, plan, reader) for dead_letter in page.dead_letters]
        for place in search.places:
            dead_letter = next((one for one in dead_letters if one.place == place), None)
            if dead_letter is None:
                raise ApplicationError(f"no dead letter at {place}: the offset contains no message", is_missing=True)
            history = await records.history(dead_letter)
            decision = decide(dead_letter, history.get(dead_letter.generation + 1), plan.topics, search.settings)
            details.append(DeadLetterDetails(dead_letter, history, decision, records.problem))
    return details


async def _export(search: Search, file: TextIO) -> int:
    exported = 0
    async with _opened(search) as (reader, plan):
        with progress("exporting", plan.length, quiet=file is sys.stdout and sys.stdout.isatty()) as advance:
            async for page in pages(search, plan, reader):
                with output_errors() if file is sys.stdout else nullcontext():
                    file.writelines(f"{json_line(dead_letter.as_json())}\n" for dead_letter in page.dead_letters)
                exported += len(page.dead_letters)
                advance(page.offsets_read)
    return exported
