"""The least that a user of the store needs, as the statements that give it."""

from __future__ import annotations

from integr8s_idem.config import PostgresqlStoreSettings, RedisStoreSettings, Settings
from integr8s_idem.errors import ApplicationError

_USER = "worker"
"""Where the settings name none."""


def access_of(settings: Settings) -> str:
    """Lines for the administrator of the store.  The password is theirs to put in.

    Raises:
        ApplicationError: This kind of store has no users.
    """
    store = settings.store
    if isinstance(store, RedisStoreSettings):
        from integr8s_idem.stores.redis.access import acl_setuser

        return acl_setuser(store.username or _USER, settings.idempotency.key_prefix)
    if isinstance(store, PostgresqlStoreSettings):
        from integr8s_idem.stores.sql.access import grants

        return "\n".join(grants(store.username or _USER))
    raise ApplicationError(f'a store of kind "{store.kind}" has no users')
