"""Records in a table of PostgreSQL or SQLite, by SQLAlchemy; alone, or in the transaction of the business."""

from integr8s_idem.stores.sql.engine import settings_engine, sql_engine
from integr8s_idem.stores.sql.migrations import ddl, migrate
from integr8s_idem.stores.sql.repository import SqlIdempotencyRepository
from integr8s_idem.stores.sql.schema import metadata

__all__ = ["SqlIdempotencyRepository", "ddl", "metadata", "migrate", "settings_engine", "sql_engine"]
