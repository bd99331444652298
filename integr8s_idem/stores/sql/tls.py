"""TLS to a database: its certificate is always checked, and so is the name of its host."""

from __future__ import annotations

import ssl
from typing import Any, Final

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings
from integr8s_idem.errors import StoreConfigurationError

_NO_TLS: Final = 2026
"""MySQL's number for a connection whose TLS does not come about."""


def tls_context(settings: MysqlStoreSettings | PostgresqlStoreSettings) -> ssl.SSLContext | None:
    """What connections are to be wrapped in; `None`: they are plain.

    Raises:
        StoreConfigurationError: A file cannot be read, or is no certificate or key.
    """
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
    except (OSError, ValueError) as error:
        raise _unreadable("tls_ca_file", settings.tls_ca_file, error) from error
    if settings.tls_cert_file is not None:
        try:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        except (OSError, ValueError) as error:
            files = f"{settings.tls_cert_file}, {settings.tls_key_file}"
            raise _unreadable("tls_cert_file and store.tls_key_file", files, error) from error
    return context


def refuse_plain(connection: Any) -> None:
    """Close a connection of aiomysql that was to have TLS and has none: it goes on without where a server has none.

    Raises:
        aiomysql.OperationalError: It has none.
    """
    from aiomysql import OperationalError

    # It has no public way to ask.
    writer = connection._writer  # noqa: SLF001
    if writer.transport.get_extra_info("ssl_object") is None:
        connection.close()
        raise OperationalError(_NO_TLS, "store.tls is set, and the server speaks no TLS")


def _unreadable(name: str, file: str | None, error: Exception) -> StoreConfigurationError:
    told = getattr(error, "strerror", None) or str(error)
    return StoreConfigurationError("start", f"store.{name} ({file}) cannot be used: {told}; give files in PEM")
