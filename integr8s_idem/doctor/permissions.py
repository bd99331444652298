"""The minimum permissions of the store's user, as commands, statements or a policy."""

from __future__ import annotations

from integr8s_idem.config import (
    DynamodbStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    Settings,
)
from integr8s_idem.config.message_text import needing
from integr8s_idem.errors import ApplicationError


def access_of(settings: Settings) -> str:
    """Return the commands, statements or policy for the administrator of the store, without a password.

    Raises:
        ApplicationError: This kind of store has no users, or its extra is not installed.
    """
    try:
        return _access_of(settings)
    except ModuleNotFoundError as error:
        raise ApplicationError(needing(settings.store.kind, error)) from error


def _access_of(settings: Settings) -> str:
    match settings.store:
        case RedisStoreSettings() | RedisClusterStoreSettings() | RedisSentinelStoreSettings() as store:
            from integr8s_idem.stores.redis import access as redis

            return "\n".join(redis.access_of(store, settings.idempotency.key_prefix))
        case PostgresqlStoreSettings() | MysqlStoreSettings() as store:
            from integr8s_idem.stores.sql import access as sql

            return "\n".join(sql.access_of(store))
        case DynamodbStoreSettings() as store:
            from integr8s_idem.stores.dynamodb import access as dynamodb

            return dynamodb.policy(store)
        case store:
            raise ApplicationError(f'a store of kind "{store.kind}" has no users')
