"""`integr8s-idem keys`: records looked up and explained, listed, released, purged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import (
    FAILURE,
    AppOption,
    Embedded,
    Json,
    SettingsFile,
    exit_status_of,
    silence_client_logs,
)
from integr8s_idem.cli.confirmation import AuditFile, Yes
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.keys_change import Change, HowToChange, tell_unmatched
from integr8s_idem.cli.keys_format import counted_text
from integr8s_idem.cli.keys_output import Listing, show_explanation, show_record
from integr8s_idem.cli.output import run_async, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.keys.explanation import READINGS, Explainer
from integr8s_idem.operations.keys.open_services import OpenService, open_services
from integr8s_idem.operations.keys.record_changes import Changer, Chosen, Counted
from integr8s_idem.operations.keys.record_filter import Wanted, checked_states, length_of
from integr8s_idem.operations.keys.record_reader import opened, size, wanted_records
from integr8s_idem.runtime import Platform
from integr8s_idem.stores import RecordAdmin

keys_app = typer.Typer(help="Look up what was handled, and mend it.", no_args_is_help=True, rich_markup_mode=None)

Keys = Annotated[
    list[str] | None, typer.Argument(metavar="KEY", help="Full keys, their last parts, or events' ids; or a filter.")
]
ServiceFilter = Annotated[
    list[str] | None, typer.Option("--service", metavar="NAME", help="Only of this service; can be repeated.")
]
StatusFilter = Annotated[
    list[str] | None,
    typer.Option("--status", metavar="STATUS", help="Only processing, completed, failed or corrupt; can be repeated."),
]
TypeFilter = Annotated[
    list[str] | None, typer.Option("--event-type", metavar="TYPE", help="Only of these events; can be repeated.")
]
OwnerFilter = Annotated[
    list[str] | None,
    typer.Option("--owner", metavar="NAME", help="Only held, or held last, by billing@host-7; can be repeated."),
]
Ended = Annotated[bool, typer.Option("--lease-ended", help="Only in progress, and nobody works on it.")]
OlderThan = Annotated[
    str | None, typer.Option(metavar="LENGTH", help="Settled, or begun, longer ago than 90s, 15m, 2h or 8d.")
]
NewerThan = Annotated[str | None, typer.Option(metavar="LENGTH", help="Settled, or begun, within this length.")]


@keys_app.command("list")
def list_command(
    service: ServiceFilter = None,
    status: StatusFilter = None,
    event_type: TypeFilter = None,
    owner: OwnerFilter = None,
    lease_ended: Ended = False,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Annotated[int | None, typer.Option(min=1, help="No more than this many.")] = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Print records as they are found: a table on a terminal, lines with tabs in a pipe, JSON lines with --json."""

    def show() -> int:
        wanted = _wanted(service, status, event_type, owner, lease_ended, older_than, newer_than)
        return run_async(
            _listed(
                command_settings(settings, optional_application(application), embedded=embedded), wanted, limit, as_json
            )
        )

    raise typer.Exit(exit_status_of(show, embedded=embedded))


async def _listed(settings: Settings, wanted: Wanted, limit: int | None, as_json: bool) -> int:
    silence_client_logs()
    counted, listing = Counted(), Listing(as_json=as_json)
    async with opened(settings) as repository:
        if not isinstance(repository, RecordAdmin):
            write_error("records that cannot be read are not shown: this store shows no such thing")
        with progress("keys", await size(repository)) as advance:
            found_ones = wanted_records(repository, settings.idempotency.key_prefix, wanted, advance)
            async with aclosing(found_ones) as records:
                async for found, told in records:
                    listing.show(found, told)
                    counted.add(found, told)
                    if counted.records == limit:
                        break
    summary = {"records": counted.records, "by": counted.told()["by"]}
    write_error(json.dumps(summary) if as_json else counted_text(counted))
    return 0


@keys_app.command("show")
def show_command(
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Full keys, their last parts, or events' ids.")],
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Print the records of keys, with all that is stored of them; status 1 if there are none."""

    def show() -> int:
        return run_async(
            _shown(command_settings(settings, optional_application(application), embedded=embedded), keys, as_json)
        )

    raise typer.Exit(exit_status_of(show, embedded=embedded))


async def _shown(settings: Settings, keys: Sequence[str], as_json: bool) -> int:
    silence_client_logs()
    counted = Counted()
    async with opened(settings) as repository:
        with progress("keys", await size(repository)) as advance:
            changer = Changer(settings, repository, advance)
            async with aclosing(changer.chosen(Chosen(tuple(keys)), counted)) as records:
                async for found, told in records:
                    counted.add(found, told)
                    show_record(found, told, as_json=as_json)
    tell_unmatched(counted)
    return 0 if counted.records else FAILURE


@keys_app.command("explain")
def explain_command(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="A key, its last parts, an event's id, or topic:partition:offset."),
    ],
    application: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:APP", help="The platform: its services compute their keys, without a search."
        ),
    ] = None,
    reading: Annotated[
        str | None, typer.Option("--as", metavar="READING", help="What WHAT is: key, event or message.")
    ] = None,
    result: Annotated[bool, typer.Option("--result", help="All of the stored result.")] = False,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Say in one screen what is known of some work, and what would happen to its next delivery."""

    def explain() -> int:
        if reading not in (None, *READINGS):
            raise ApplicationError(f'--as is {", ".join(READINGS)}, not "{reading}"')
        platform = optional_application(application)
        return run_async(
            _explained(
                _Question(what, reading, result, as_json),
                command_settings(settings, platform, embedded=embedded),
                platform,
            )
        )

    raise typer.Exit(exit_status_of(explain, embedded=embedded))


@dataclass(frozen=True)
class _Question:
    what: str
    reading: str | None
    whole_result: bool
    as_json: bool


async def _explained(question: _Question, settings: Settings, platform: Platform | None) -> int:
    silence_client_logs()
    async with opened(settings) as repository, _services(platform, settings) as services:
        with progress("keys", await size(repository)) as advance:
            explainer = Explainer(settings, repository, services, advance)
            answer = await explainer.explain(question.what, question.reading)
    show_explanation(answer, as_json=question.as_json, whole_result=question.whole_result)
    return 0


@keys_app.command("release")
def release_command(
    keys: Keys = None,
    service: ServiceFilter = None,
    owner: OwnerFilter = None,
    event_type: TypeFilter = None,
    force: Annotated[bool, typer.Option("--force", help="Also where the owner seems to live.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Let the leases of a dead owner end now, so that others take over; attempts stay counted.

    Name the keys or the owner.  Left alone is what was renewed lately: its owner seems to live.
    """

    def release() -> int:
        chosen = Chosen(tuple(keys or ()), _wanted(service, None, event_type, owner))
        if not keys and not owner:
            raise ApplicationError("say whose leases are to end: KEY, or --owner; `keys list` shows them")
        asked = {**_asked(chosen), "force": force}
        question = (
            "End the lease of {} now? If an owner lives after all, it notices at its next renewal, and until then "
            "two may do the same work."
        )
        return Change(
            "keys release",
            "released",
            question,
            count=lambda changer: changer.count_to_release(chosen, force=force),
            do=lambda changer, counted: changer.release(chosen, counted, force=force),
        ).made(
            command_settings(settings, optional_application(application), embedded=embedded),
            asked,
            HowToChange(yes, audit_file, as_json),
        )

    raise typer.Exit(exit_status_of(release, embedded=embedded))


@keys_app.command("purge")
def purge_command(
    keys: Keys = None,
    service: ServiceFilter = None,
    status: StatusFilter = None,
    event_type: TypeFilter = None,
    owner: OwnerFilter = None,
    lease_ended: Ended = False,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    everything: Annotated[bool, typer.Option("--all", help="All records of the settings' key_prefix.")] = False,
    in_progress: Annotated[bool, typer.Option("--in-progress", help="Also what somebody holds now.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Forget records, by their names or by a filter: what they guard is handled again when it comes again."""

    def purge() -> int:
        wanted = _wanted(service, status, event_type, owner, lease_ended, older_than, newer_than)
        chosen = Chosen(tuple(keys or ()), wanted)
        if not keys and wanted.is_all and not everything:
            raise ApplicationError("say what is to be forgotten: KEY, a filter, or --all")
        asked = {**_asked(chosen), "in_progress": in_progress}
        return Change(
            "keys purge",
            "purged",
            "Forget {}? What they guard is handled again when it comes again.",
            count=lambda changer: changer.count_to_purge(chosen, in_progress=in_progress),
            do=lambda changer, counted: changer.purge(chosen, counted, in_progress=in_progress),
        ).made(
            command_settings(settings, optional_application(application), embedded=embedded),
            asked,
            HowToChange(yes, audit_file, as_json),
        )

    raise typer.Exit(exit_status_of(purge, embedded=embedded))


def _wanted(
    services: list[str] | None,
    states: list[str] | None = None,
    event_types: list[str] | None = None,
    owners: list[str] | None = None,
    lease_ended: bool = False,
    older_than: str | None = None,
    newer_than: str | None = None,
) -> Wanted:
    return Wanted(
        tuple(services or ()),
        checked_states(states or ()),
        tuple(event_types or ()),
        tuple(owners or ()),
        lease_ended,
        length_of(older_than) if older_than else None,
        length_of(newer_than) if newer_than else None,
    )


def _asked(chosen: Chosen) -> dict[str, Any]:
    return {"keys": list(chosen.names), **chosen.wanted.told()} if chosen.names else chosen.wanted.told()


@asynccontextmanager
async def _services(platform: Platform | None, settings: Settings) -> AsyncIterator[Sequence[OpenService]]:
    if platform is None:
        yield ()
        return
    async with open_services(platform, settings) as services:
        yield services
