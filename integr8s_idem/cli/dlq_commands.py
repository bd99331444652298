"""`integr8s-idem dlq`: dead letters, looked at, taken away in a file, and put back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import AppOption, Embedded, Json, SettingsFile, answered, quiet_clients
from integr8s_idem.cli.confirmation import AuditFile, Yes
from integr8s_idem.cli.dlq_output import Columns, Story, as_line, counted, story_text, tally_lines
from integr8s_idem.cli.dlq_replay import ReplayCommand, tell_note
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.output import say, to_its_end, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.atomic_file import whole_file
from integr8s_idem.operations.dead_letter_counts import Group, Tally
from integr8s_idem.operations.dead_letter_filter import Choice, moment
from integr8s_idem.operations.dead_letter_reader import DeadLetterReader, open_letter_box
from integr8s_idem.operations.dead_letter_records import open_letter_records
from integr8s_idem.operations.dead_letter_replay import decided
from integr8s_idem.operations.dead_letter_search import Found, Search, found_by, pages
from integr8s_idem.operations.dead_letters import Place

dlq_app = typer.Typer(help="Look at dead letters, and put them back.", no_args_is_help=True, rich_markup_mode=None)

App = Annotated[
    str | None, typer.Option("--app", metavar="MODULE:APP", help="Only the topics that this platform reads.")
]
Topics = Annotated[
    list[str] | None, typer.Option("--topic", metavar="NAME", help="Only the letters of this topic; can be repeated.")
]
Services = Annotated[list[str] | None, typer.Option("--service", metavar="NAME", help="Given up by this service.")]
Reasons = Annotated[
    list[str] | None, typer.Option("--reason", metavar="NAME", help="For this reason, as in handler_failed.")
]
Errors = Annotated[
    list[str] | None, typer.Option("--error", metavar="TEXT", help="The error's class, or a part of what it says.")
]
Types = Annotated[list[str] | None, typer.Option("--event-type", metavar="NAME", help="Events of this type.")]
Keys = Annotated[list[str] | None, typer.Option("--key", metavar="KEY", help="With this idempotency or Kafka key.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="Dead-lettered since: an age, as in 2h, or ISO 8601, in UTC.")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Dead-lettered before: as --since.")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many.")]


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
    summary: Annotated[bool, typer.Option("--summary", help="The numbers only.")] = False,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Show dead letters, one a line, and how many there are by service, reason and error.

    Patterns may hold * and ?; an option that is repeated takes any of its values.  With --json one object a line, or,
    with --summary, one object.
    """

    def look() -> int:
        filters = _Filters(service, reason, error, event_type, key, since, until)
        tally = asyncio.run(
            _list(
                _search(_From(settings, embedded, application), topic, filters, limit),
                rows=not summary,
                as_json=as_json,
            )
        )
        if summary and as_json:
            say(json.dumps({"letters": tally.total, "groups": tally.as_json()}, indent=2))
        elif not as_json:
            # Beside the letters it is a remark, as that of keys list; alone it is what was asked for.
            (say if summary else write_error)("\n".join([counted(tally.total), *tally_lines(tally.rows())]))
        return 0

    raise typer.Exit(_answered(look, embedded=embedded))


@dlq_app.command("show")
def show_command(
    place: Annotated[list[str], typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="As dlq list names it.")],
    payload: Annotated[bool, typer.Option("--payload", help="All of the payload.")] = False,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Show one dead letter: why it is there, its headers and payload, its records, and what a replay would do."""

    def look() -> int:
        search = _search(_From(settings, embedded, application), None, _Filters(), None, place)
        for number, story in enumerate(to_its_end(_stories(search))):
            text = as_line(story.as_json()) if as_json else story_text(story, payload=payload)
            say(f"\n{text}" if number and not as_json else text)
        return 0

    raise typer.Exit(_answered(look, embedded=embedded))


@dlq_app.command("export")
def export_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A file, whole or not at all; or stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
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
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Write dead letters as JSON lines, byte for byte: key, payload and all headers.

    Texts stand as {"text": …}, whatever is no UTF-8 as {"base64": …}.  With --json the count on standard error is an
    object as well.
    """

    def write() -> int:
        filters = _Filters(service, reason, error, event_type, key, since, until)
        search = _search(_From(settings, embedded, application), topic, filters, limit)
        with whole_file(output, replace=force) if output else nullcontext(sys.stdout) as file:
            written = to_its_end(_export(search, file))
        where = str(output) if output else "-"
        told = as_line({"letters": written, "file": where}) if as_json else f"{counted(written)} written to {where}"
        write_error(told)
        return 0

    raise typer.Exit(_answered(write, embedded=embedded))


@dlq_app.command("replay")
def replay_command(
    place: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC:PARTITION:OFFSET]...", help="These letters only.")
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
    again: Annotated[
        bool, typer.Option("--again", help="Those as well that were replayed already, as far as the store knows.")
    ] = False,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Publish to this topic, instead of the one each was read from."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count them, and change nothing.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Publish dead letters again, each for the handler that gave it up, as its next generation.

    They go to the topic that the dead-letter topic is named after, signed with the secret of [replay].

    It counts first and asks.  One generation is handled once, so it does no harm to replay twice, or to begin anew
    after a replay was cut short.
    """

    def replay() -> int:
        filters = _Filters(service, reason, error, event_type, key, since, until)
        search = _search(_From(settings, embedded, application), topic, filters, limit, place)
        return ReplayCommand(search, again, as_json, audit_file, to).run(yes=yes, dry_run=dry_run)

    raise typer.Exit(_answered(replay, embedded=embedded))


@dataclass(frozen=True)
class _Filters:
    """Options as they were typed."""

    services: Sequence[str] | None = None
    reasons: Sequence[str] | None = None
    errors: Sequence[str] | None = None
    event_types: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    since: str | None = None
    until: str | None = None

    def choice(self) -> Choice:
        now = datetime.now(UTC)
        return Choice(
            services=tuple(self.services or ()),
            reasons=tuple(self.reasons or ()),
            errors=tuple(self.errors or ()),
            event_types=tuple(self.event_types or ()),
            keys=tuple(self.keys or ()),
            since=moment(self.since, now) if self.since else None,
            until=moment(self.until, now) if self.until else None,
        )


@dataclass(frozen=True)
class _From:
    """Where to look."""

    settings_file: Path | None
    embedded: bool
    application: str | None


def _search(
    source: _From,
    topics: Sequence[str] | None,
    filters: _Filters,
    limit: int | None,
    places: Sequence[str] | None = None,
) -> Search:
    platform = optional_application(source.application)
    return Search(
        command_settings(source.settings_file, platform, embedded=source.embedded),
        platform,
        tuple(topics or ()),
        tuple(dict.fromkeys(map(Place.of, places or ()))),
        filters.choice(),
        limit,
    )


def _answered(command: Callable[[], int], *, embedded: bool) -> int:
    quiet_clients()
    return answered(command, embedded=embedded)


@asynccontextmanager
async def _opened(search: Search) -> AsyncIterator[tuple[DeadLetterReader, Found]]:
    async with open_letter_box(search.settings.kafka) as box:
        found = await found_by(search, box)
        tell_note(found)
        yield box, found


async def _list(search: Search, *, rows: bool, as_json: bool) -> Tally:
    tally, is_shown = Tally(), sys.stdout.isatty()
    async with _opened(search) as (box, found):
        columns = Columns(found.stretches)
        if rows and not as_json:
            say(columns.heading())
        # On a terminal the lines tell themselves how far it has come.
        with progress("reading", found.length, quiet=rows and is_shown) as advance:
            async for page in pages(search, found, box):
                lines = [as_line(one.summary()) if as_json else columns.line(one) for one in page.letters]
                if rows and lines:
                    say("\n".join(lines))
                for letter in page.letters:
                    tally.add(Group.of(letter))
                advance(page.passed)
    return tally


async def _stories(search: Search) -> list[Story]:
    stories = []
    async with _opened(search) as (box, found), open_letter_records(search.settings) as records:
        letters = [letter async for page in pages(search, found, box) for letter in page.letters]
        for place in search.places:
            letter = next((one for one in letters if one.place == place), None)
            if letter is None:
                raise ApplicationError(f"there is no letter at {place}: the offset holds no message", is_missing=True)
            history = await records.history(letter)
            decision = decided(letter, history.get(letter.generation + 1), found.topics, search.settings)
            stories.append(Story(letter, history, decision, records.problem))
    return stories


async def _export(search: Search, file: TextIO) -> int:
    written = 0
    async with _opened(search) as (box, found):
        with progress("exporting", found.length, quiet=file is sys.stdout and sys.stdout.isatty()) as advance:
            async for page in pages(search, found, box):
                file.writelines(f"{as_line(letter.whole())}\n" for letter in page.letters)
                written += len(page.letters)
                advance(page.passed)
    return written
