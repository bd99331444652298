"""Store records in PostgreSQL, MySQL, MariaDB or SQLite, optionally in the transaction of the application."""

from integr8s_idem.config.message_text import lacking

try:
    from integr8s_idem.stores.sql.engine import reading, settings_engine, sql_engine, writing
    from integr8s_idem.stores.sql.handler_transaction import SqlTransaction
    from integr8s_idem.stores.sql.migrations import check_schema, ddl, migrate, migrate_in
    from integr8s_idem.stores.sql.outbox import SqlOutbox
    from integr8s_idem.stores.sql.repository import SqlIdempotencyRepository
    from integr8s_idem.stores.sql.schema import metadata
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking(__name__, "sql", error), name=error.name) from error

__all__ = [
    "SqlIdempotencyRepository",
    "SqlOutbox",
    "SqlTransaction",
    "check_schema",
    "ddl",
    "metadata",
    "migrate",
    "migrate_in",
    "reading",
    "settings_engine",
    "sql_engine",
    "writing",
]
