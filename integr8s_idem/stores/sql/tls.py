"""TLS connections to a database; the server's certificate and host name are always verified."""

from __future__ import annotations

import ssl
from typing import Any, Final

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings
from integr8s_idem.errors import StoreConfigurationError

_TLS_FAILED: Final = 2026
"""MySQL's error number for a failed TLS connection."""


def tls_context(settings: MysqlStoreSettings | PostgresqlStoreSettings) -> ssl.SSLContext | None:
    """Return the TLS context for connections, or `None` for connections without TLS.

    Raises:
        StoreConfigurationError: A file cannot be read, or is not a valid certificate or key.
    """
    if not settings.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
    except (OSError, ValueError) as error:
        raise _unusable("tls_ca_file", settings.tls_ca_file, error) from error
    if settings.tls_cert_file is not None:
        try:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        except (OSError, ValueError) as error:
            files = f"{settings.tls_cert_file}, {settings.tls_key_file}"
            raise _unusable("tls_cert_file and store.tls_key_file", files, error) from error
    return context


def refuse_plain(connection: Any) -> None:
    """Close an aiomysql connection that lacks TLS: aiomysql continues without it if the server does not support it.

    Raises:
        aiomysql.OperationalError: The connection does not use TLS.
    """
    from aiomysql import OperationalError

    # aiomysql has no public API for this.
    writer = connection._writer  # noqa: SLF001
    if writer.transport.get_extra_info("ssl_object") is None:
        connection.close()
        raise OperationalError(_TLS_FAILED, "store.tls is set, but the server does not support TLS")


def _unusable(name: str, file: str | None, error: Exception) -> StoreConfigurationError:
    reason = getattr(error, "strerror", None) or str(error)
    return StoreConfigurationError("start", f"store.{name} ({file}) cannot be used: {reason}; use files in PEM format")
