"""`integr8s-idem store`: the tables of a store, and its records that have expired."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import AppOption, Embedded, Json, SettingsFile, answered
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.output import say, write_text
from integr8s_idem.config import DynamodbStoreSettings, SqliteStoreSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.stores.factory import SqlSettings, open_dynamo, open_engine

_WithTables: TypeAlias = SqlSettings | DynamodbStoreSettings

store_app = typer.Typer(help="Look after a store with tables.", no_args_is_help=True, rich_markup_mode=None)


@store_app.command("migrate")
def migrate_command(
    application: AppOption = None, settings: SettingsFile = None, embedded: Embedded = False, as_json: Json = False
) -> None:
    """Make the tables, or bring them to the version of this program."""

    def migrate() -> int:
        store = _with_tables(settings, application, embedded=embedded)
        steps = asyncio.run(_migrated(store))
        if as_json:
            say(json.dumps({"kind": store.kind, "migrated": steps}))
            return 0
        for step in steps:
            say(f"version {step['version']}: {step['says']}")
        say("the tables are up to date" if not steps else "done")
        return 0

    raise typer.Exit(answered(migrate, embedded=embedded))


@store_app.command("sql")
def sql_command(
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    since: Annotated[
        int, typer.Option("--from", min=0, help="Version of the schema that is there; 0: there are no tables.")
    ] = 0,
) -> None:
    """Print what `migrate` does, as SQL for somebody who applies it by hand."""

    def show() -> int:
        store = _with_tables(settings, application, embedded=embedded)
        if isinstance(store, DynamodbStoreSettings):
            raise ApplicationError('a store of kind "dynamodb" speaks no SQL; `store migrate` makes its table')

        async def statements() -> str:
            async with open_engine(store) as engine:
                from integr8s_idem.stores.sql import ddl

                return ddl(engine.dialect, since)

        write_text(asyncio.run(statements()))
        return 0

    raise typer.Exit(answered(show, embedded=embedded))


@store_app.command("purge")
def purge_command(
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="Rows of one transaction.")] = 500,
    as_json: Json = False,
) -> None:
    """Take away records that have expired, in small transactions.  Workers do so by themselves."""

    def purge() -> int:
        store = _with_tables(settings, application, embedded=embedded)
        if isinstance(store, DynamodbStoreSettings):
            told = "nothing to do: DynamoDB deletes records by itself, within days after they expired"
            say(json.dumps({"kind": store.kind, "purged": 0}) if as_json else told)
            return 0
        if isinstance(store, SqliteStoreSettings) and not Path(store.path).exists():
            raise ApplicationError(f"there is no file {store.path}, which [store] path names: nothing to purge")

        async def done() -> int:
            async with open_engine(store) as engine:
                from integr8s_idem.stores.sql import SqlIdempotencyRepository, check_schema

                timeout = timedelta(seconds=store.timeout_seconds)
                await check_schema(engine, "purge", timeout)
                repository, purged = SqlIdempotencyRepository(engine, timeout=timeout), 0
                while more := await repository.purge(batch):
                    purged += more
                return purged

        purged = asyncio.run(done())
        say(json.dumps({"kind": store.kind, "purged": purged}) if as_json else f"{purged} records purged")
        return 0

    raise typer.Exit(answered(purge, embedded=embedded))


async def _migrated(store: _WithTables) -> list[dict[str, object]]:
    if isinstance(store, DynamodbStoreSettings):
        async with open_dynamo(store) as client:
            from integr8s_idem.stores.dynamodb import migrate as migrate_table

            return [{"version": 1, "says": says} for says in await migrate_table(client, store.table)]
    async with open_engine(store) as engine:
        from integr8s_idem.stores.sql import migrate

        return [{"version": one.version, "says": one.says} for one in await migrate(engine)]


def _with_tables(file: Path | None, application: str | None, *, embedded: bool) -> _WithTables:
    store = command_settings(file, optional_application(application), embedded=embedded).store
    if not isinstance(store, _WithTables):
        raise ApplicationError(f'the store of the settings is of kind "{store.kind}", which has no tables')
    return store
