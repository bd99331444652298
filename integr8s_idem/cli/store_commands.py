"""`integr8s-idem store`: migrate the tables of a store and purge expired records."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import FAILURE, AppOption, Embedded, Json, SettingsFile, exit_status_of
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.output import echo, write_report, write_text
from integr8s_idem.config import DynamodbStoreSettings, SqliteStoreSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.stores.factory import SqlSettings, open_dynamo, open_engine

_TableStore: TypeAlias = SqlSettings | DynamodbStoreSettings

store_app = typer.Typer(help="Manage the tables of a store.", no_args_is_help=True, rich_markup_mode=None)


@store_app.command("migrate")
def migrate_command(
    application: AppOption = None, settings: SettingsFile = None, embedded: Embedded = False, as_json: Json = False
) -> None:
    """Create the tables, or migrate them to the current version."""

    def migrate() -> int:
        store = _table_store(settings, application, embedded=embedded)
        steps = asyncio.run(_migrate(store))
        lines = [f"version {step['version']}: {step['says']}" for step in steps]
        text = "\n".join([*lines, "done" if steps else "the tables are up to date"])
        answer = json.dumps({"kind": store.kind, "migrated": steps})
        return 0 if write_report(answer if as_json else text, text) else FAILURE

    raise typer.Exit(exit_status_of(migrate, embedded=embedded))


@store_app.command("sql")
def sql_command(
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    since: Annotated[
        int, typer.Option("--from", min=0, help="Current version of the schema; 0 if there are no tables.")
    ] = 0,
) -> None:
    """Print the SQL of `migrate`, to apply it manually."""

    def show() -> int:
        store = _table_store(settings, application, embedded=embedded)
        if isinstance(store, DynamodbStoreSettings):
            raise ApplicationError('a store of kind "dynamodb" does not use SQL; create its table with `store migrate`')

        async def statements() -> str:
            async with open_engine(store) as engine:
                from integr8s_idem.stores.sql import ddl

                return ddl(engine.dialect, since)

        write_text(asyncio.run(statements()))
        return 0

    raise typer.Exit(exit_status_of(show, embedded=embedded))


@store_app.command("purge")
def purge_command(
    application: AppOption = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    batch: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows in a transaction.")] = 500,
    as_json: Json = False,
) -> None:
    """Delete expired records in small transactions.  Workers also do this in the background."""

    def purge() -> int:
        store = _table_store(settings, application, embedded=embedded)
        if isinstance(store, DynamodbStoreSettings):
            message = "nothing to do: DynamoDB deletes expired records itself, within days"
            echo(json.dumps({"kind": store.kind, "purged": 0}) if as_json else message)
            return 0
        if isinstance(store, SqliteStoreSettings) and not Path(store.path).exists():
            raise ApplicationError(f"file {store.path} of [store] path does not exist: nothing to purge")

        async def purge_all() -> int:
            async with open_engine(store) as engine:
                from integr8s_idem.stores.sql import SqlIdempotencyRepository, check_schema

                timeout = timedelta(seconds=store.timeout_seconds)
                await check_schema(engine, "purge", timeout)
                repository, purged = SqlIdempotencyRepository(engine, timeout=timeout), 0
                while count := await repository.purge(batch):
                    purged += count
                return purged

        purged = asyncio.run(purge_all())
        text, answer = f"{purged} records purged", json.dumps({"kind": store.kind, "purged": purged})
        return 0 if write_report(answer if as_json else text, text) else FAILURE

    raise typer.Exit(exit_status_of(purge, embedded=embedded))


async def _migrate(store: _TableStore) -> list[dict[str, object]]:
    if isinstance(store, DynamodbStoreSettings):
        async with open_dynamo(store) as client:
            from integr8s_idem.stores.dynamodb import migrate as migrate_table

            return [{"version": 1, "says": says} for says in await migrate_table(client, store.table)]
    async with open_engine(store) as engine:
        from integr8s_idem.stores.sql import migrate

        return [{"version": one.version, "says": one.description} for one in await migrate(engine)]


def _table_store(file: Path | None, application: str | None, *, embedded: bool) -> _TableStore:
    store = command_settings(file, optional_application(application), embedded=embedded).store
    if not isinstance(store, _TableStore):
        raise ApplicationError(f'[store] kind is "{store.kind}", which has no tables')
    return store
