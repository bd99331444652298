"""`integr8s-idem keys`: list, show, explain, release and purge records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

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
from integr8s_idem.cli.keys_change import Change, ChangeOptions, print_unmatched
from integr8s_idem.cli.keys_format import summary_text
from integr8s_idem.cli.keys_output import Listing, print_explanation, print_record
from integr8s_idem.cli.output import run_async, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.keys.explainer import READINGS, Explainer
from integr8s_idem.operations.keys.open_services import OpenService, open_services
from integr8s_idem.operations.keys.record_changes import ChangeSummary, RecordChanger, Selection
from integr8s_idem.operations.keys.record_filter import RecordFilter, check_statuses, parse_duration
from integr8s_idem.operations.keys.record_reader import estimated_size, matching_records, open_repository
from integr8s_idem.runtime import Platform
from integr8s_idem.stores import RecordAdmin

keys_app = typer.Typer(help="Inspect and change idempotency records.", no_args_is_help=True, rich_markup_mode=None)

_KEY: Final = "Full key, its last parts such as order_placed:0192-a, event id or custom key"
Keys = Annotated[list[str] | None, typer.Argument(metavar="KEY", help=f"{_KEY}; or use options.")]
ServiceFilter = Annotated[
    list[str] | None, typer.Option("--service", metavar="NAME", help="Match only this service; can be repeated.")
]
StatusFilter = Annotated[
    list[str] | None,
    typer.Option(
        "--status", metavar="STATUS", help="Match only processing, completed, failed or corrupt; can be repeated."
    ),
]
TypeFilter = Annotated[
    list[str] | None, typer.Option("--event-type", metavar="TYPE", help="Match only this event type; can be repeated.")
]
OwnerFilter = Annotated[
    list[str] | None,
    typer.Option(
        "--owner",
        metavar="NAME",
        help="Match only this current or last owner, such as billing@host-7; can be repeated.",
    ),
]
Ended = Annotated[bool, typer.Option("--lease-ended", help="Match only records in progress whose lease has ended.")]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Match only records older than this, such as 90s, 15m, 2h or 8d."),
]
NewerThan = Annotated[str | None, typer.Option(metavar="DURATION", help="Match only records newer than this.")]


@keys_app.command("list")
def list_command(
    service: ServiceFilter = None,
    status: StatusFilter = None,
    event_type: TypeFilter = None,
    owner: OwnerFilter = None,
    lease_ended: Ended = False,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after N records.")] = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """List records.

    Prints a table on a terminal, tab-separated lines in a pipe, and JSON lines with --json.  A record is listed if it
    matches all options.  Its age counts from its outcome, or from the start of its last run if there is none.
    """

    def show() -> int:
        record_filter = _wanted(service, status, event_type, owner, lease_ended, older_than, newer_than)
        return run_async(
            _list(
                command_settings(settings, optional_application(application), embedded=embedded),
                record_filter,
                limit,
                as_json,
            )
        )

    raise typer.Exit(exit_status_of(show, embedded=embedded))


async def _list(settings: Settings, record_filter: RecordFilter, limit: int | None, as_json: bool) -> int:
    silence_client_logs()
    summary, listing = ChangeSummary(), Listing(as_json=as_json)
    async with open_repository(settings) as repository:
        if not isinstance(repository, RecordAdmin):
            write_error("corrupt records are not listed: this store does not support it")
        with progress("keys", await estimated_size(repository)) as advance:
            found_ones = matching_records(repository, settings.idempotency.key_prefix, record_filter, advance)
            async with aclosing(found_ones) as records:
                async for found, parsed in records:
                    listing.show(found, parsed)
                    summary.add(found, parsed)
                    if summary.records == limit:
                        break
    counts = {"records": summary.records, "by": summary.as_json()["by"]}
    write_error(json.dumps(counts) if as_json else summary_text(summary))
    return 0


@keys_app.command("show")
def show_command(
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help=f"{_KEY}.")],
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Show all stored fields of records.

    The exit status is 1 if no record is found.
    """

    def show() -> int:
        return run_async(
            _show(command_settings(settings, optional_application(application), embedded=embedded), keys, as_json)
        )

    raise typer.Exit(exit_status_of(show, embedded=embedded))


async def _show(settings: Settings, keys: Sequence[str], as_json: bool) -> int:
    silence_client_logs()
    summary = ChangeSummary()
    async with open_repository(settings) as repository:
        with progress("keys", await estimated_size(repository)) as advance:
            changer = RecordChanger(settings, repository, advance)
            async with aclosing(changer.select(Selection(tuple(keys)), summary)) as records:
                async for found, parsed in records:
                    summary.add(found, parsed)
                    print_record(found, parsed, as_json=as_json)
    print_unmatched(summary)
    return 0 if summary.records else FAILURE


@keys_app.command("explain")
def explain_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help=f"{_KEY}; or topic:partition:offset of a message."),
    ],
    application: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:APP",
            help="Compute the keys with the services of this platform instead of searching the store.",
        ),
    ] = None,
    reading: Annotated[
        str | None, typer.Option("--as", metavar="KIND", help="Interpret NAME as a key, event or message.")
    ] = None,
    result: Annotated[bool, typer.Option("--result", help="Print the stored result in full.")] = False,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Explain how an event was handled.

    Also shows what would happen to the next delivery of the event.
    """

    def explain() -> int:
        if reading not in (None, *READINGS):
            raise ApplicationError(f'--as must be one of {", ".join(READINGS)}, not "{reading}"')
        platform = optional_application(application)
        return run_async(
            _explain(
                _Query(name, reading, result, as_json),
                command_settings(settings, platform, embedded=embedded),
                platform,
            )
        )

    raise typer.Exit(exit_status_of(explain, embedded=embedded))


@dataclass(frozen=True)
class _Query:
    name: str
    reading: str | None
    whole_result: bool
    as_json: bool


async def _explain(query: _Query, settings: Settings, platform: Platform | None) -> int:
    silence_client_logs()
    async with open_repository(settings) as repository, _services(platform, settings) as services:
        with progress("keys", await estimated_size(repository)) as advance:
            explainer = Explainer(settings, repository, services, advance)
            answer = await explainer.explain(query.name, query.reading)
    print_explanation(answer, as_json=query.as_json, whole_result=query.whole_result)
    return 0


@keys_app.command("release")
def release_command(
    keys: Keys = None,
    service: ServiceFilter = None,
    owner: OwnerFilter = None,
    event_type: TypeFilter = None,
    force: Annotated[bool, typer.Option("--force", help="Also end leases whose owner seems to be alive.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Release keys whose owner is dead.

    Ends their leases now, so that other workers can take over; attempts remain counted.  Requires keys or --owner.
    Asks for confirmation.

    Skips leases that were renewed recently, because their owner seems to be alive.  If an owner is alive after all, two
    workers may do the same work until its next renewal.
    """

    def release() -> int:
        selection = Selection(tuple(keys or ()), _wanted(service, None, event_type, owner))
        if not keys and not owner:
            raise ApplicationError("name the leases to release: KEY or --owner; `keys list` shows them")
        selected = {**_audit_fields(selection), "force": force}
        question = (
            "End the leases of {} now? An owner that is still alive notices at its next renewal; until then two "
            "workers may do the same work."
        )
        return Change(
            "keys release",
            "released",
            question,
            count=lambda changer: changer.count_releasable(selection, force=force),
            do=lambda changer, summary: changer.release(selection, summary, force=force),
        ).run(
            command_settings(settings, optional_application(application), embedded=embedded),
            selected,
            ChangeOptions(yes, audit_file, as_json),
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
    everything: Annotated[
        bool, typer.Option("--all", help="Match all records under the key_prefix of the settings.")
    ] = False,
    in_progress: Annotated[bool, typer.Option("--in-progress", help="Include records with an active lease.")] = False,
    yes: Yes = False,
    audit_file: AuditFile = None,
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Delete records.

    Their events are handled again if they are redelivered.  Requires keys, filter options or --all.  Asks for
    confirmation.

    Skips records with an active lease, unless you pass --in-progress, and corrupt records, unless you name them or pass
    --status corrupt.
    """

    def purge() -> int:
        record_filter = _wanted(service, status, event_type, owner, lease_ended, older_than, newer_than)
        selection = Selection(tuple(keys or ()), record_filter)
        if not keys and record_filter.is_empty and not everything:
            raise ApplicationError("name the records to purge: KEY, filter options, or --all")
        selected = {**_audit_fields(selection), "in_progress": in_progress}
        return Change(
            "keys purge",
            "purged",
            "Delete {}? Their events are handled again if they are redelivered.",
            count=lambda changer: changer.count_purgeable(selection, in_progress=in_progress),
            do=lambda changer, summary: changer.purge(selection, summary, in_progress=in_progress),
        ).run(
            command_settings(settings, optional_application(application), embedded=embedded),
            selected,
            ChangeOptions(yes, audit_file, as_json),
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
) -> RecordFilter:
    return RecordFilter(
        tuple(services or ()),
        check_statuses(states or ()),
        tuple(event_types or ()),
        tuple(owners or ()),
        lease_ended,
        parse_duration(older_than) if older_than is not None else None,
        parse_duration(newer_than) if newer_than is not None else None,
    )


def _audit_fields(selection: Selection) -> dict[str, Any]:
    fields = selection.record_filter.as_json()
    return {"keys": list(selection.names), **fields} if selection.names else fields


@asynccontextmanager
async def _services(platform: Platform | None, settings: Settings) -> AsyncIterator[Sequence[OpenService]]:
    if platform is None:
        yield ()
        return
    async with open_services(platform, settings) as services:
        yield services
