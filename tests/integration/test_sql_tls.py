"""TLS connections to a real PostgreSQL and a real MariaDB, with certificates of a test authority."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings
from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, settings_engine, sql_engine
from tests.support.conditions import eventually
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.ports import reserve_port
from tests.support.postgres import PostgresServer
from tests.support.tls import Authority, TlsFront

NEEDS_MARIADB = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())
KINDS = ["postgresql", pytest.param("mysql", marks=NEEDS_MARIADB)]


class Servers:
    """MariaDB servers with and without TLS, and a PostgreSQL built without TLS, behind a TLS proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self._mariadbs: dict[bool, tuple[MariadbServer, int]] = {}

    @cached_property
    def postgres(self) -> TcpPostgres:
        server = TcpPostgres(reserve_port())
        server.start()
        return server

    @asynccontextmanager
    async def settings(self, kind: str, *, secure: bool = True, **more: Any) -> AsyncIterator[Any]:
        """Return the settings of a store on the server of this kind."""
        common = {"tls": True, "tls_ca_file": str(self.authority.ca_file), **more}
        if kind == "mysql":
            port = await self._mariadb(secure=secure)
            yield MysqlStoreSettings(
                kind="mysql", url=f"mysql://127.0.0.1:{port}/test", **{"username": "idem", **common}
            )
            return
        common["username"] = "postgres"
        url = "postgresql://127.0.0.1:{}/postgres"
        if not secure:
            yield PostgresqlStoreSettings(kind="postgresql", url=url.format(self.postgres.port), **common)
            return
        async with TlsFront(self.postgres.port, self.authority.server_context(), postgresql=True) as front:
            yield PostgresqlStoreSettings(kind="postgresql", url=url.format(front.port), **common)

    async def _mariadb(self, *, secure: bool) -> int:
        if secure not in self._mariadbs:
            certificate = self.authority.certificate_files(self.folder) if secure else ()
            port = reserve_port()
            server = mariadb(port, *certificate, ca=self.authority.ca_file)
            server.start()
            self._mariadbs[secure] = server, port
            await run(server.url, *USERS)
        return self._mariadbs[secure][1]

    def stop(self) -> None:
        for server, _ in self._mariadbs.values():
            server.stop()
        self.postgres.stop()


class TcpPostgres(PostgresServer):
    """A PostgreSQL that also listens on a TCP port of the loopback interface."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.settings = {**self.settings, "listen_addresses": "127.0.0.1", "port": str(port)}


USERS = (
    "CREATE USER idem@'127.0.0.1'",
    "GRANT ALL ON test.* TO idem@'127.0.0.1'",
    "CREATE USER certified@'127.0.0.1' REQUIRE X509",
    "GRANT ALL ON test.* TO certified@'127.0.0.1'",
)


def mariadb(port: int, *certificate: Path, ca: Path) -> MariadbServer:
    network = {"skip-networking": "OFF", "bind-address": "127.0.0.1", "port": str(port)}
    if certificate:
        files = zip(("ssl-cert", "ssl-key", "ssl-ca"), map(str, (*certificate, ca)), strict=True)
        network |= {"ssl": "ON", **dict(files)}
    return MariadbServer(settings=network)


async def run(url: str, *statements: str) -> None:
    engine = sql_engine(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("tls"))
    yield servers
    servers.stop()


async def ping_version(settings: Any) -> str:
    """Migrate the store, ping it, and return its version."""
    before = open_sockets()
    engine = settings_engine(settings)
    try:
        await migrate(engine)
        return (await SqlIdempotencyRepository(engine).ping()).version
    finally:
        await engine.dispose()
        await eventually(lambda: open_sockets() <= before)


def open_sockets() -> set[int]:
    """Return the sockets of this process.  TLS connections close in the background, after a final exchange."""
    found = set()
    for entry in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                found.add(int(entry.name))
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_is_reached_through_tls(servers: Servers, kind: str) -> None:
    async with servers.settings(kind) as settings:
        assert await ping_version(settings)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_with_the_certificate_of_another_authority_is_refused(
    servers: Servers, kind: str, tmp_path: Path
) -> None:
    async with servers.settings(kind, tls_ca_file=str(Authority(tmp_path, "other").ca_file)) as settings:
        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await ping_version(settings)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_with_the_certificate_of_another_host_is_refused(servers: Servers, kind: str) -> None:
    async with servers.settings(kind) as settings:
        other_host = settings.model_copy(update={"url": settings.url.replace("127.0.0.1", "localhost")})

        with pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await ping_version(other_host)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_without_tls_is_refused(servers: Servers, kind: str) -> None:
    async with servers.settings(kind, secure=False) as settings:
        with pytest.raises(StoreUnavailableError, match=r"TLS|SSL"):
            await ping_version(settings)
        assert await ping_version(settings.model_copy(update={"tls": False}))


@NEEDS_MARIADB
async def test_the_client_certificate_is_sent_to_a_server_that_requires_one(servers: Servers) -> None:
    certificate, key = servers.authority.certificate_files(servers.folder, "worker.example", "worker")
    files: dict[str, Any] = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}

    async with servers.settings("mysql", username="certified", **files) as settings:
        assert await ping_version(settings)
    async with servers.settings("mysql", username="certified") as settings:
        with pytest.raises(StoreConfigurationError, match="does not accept this user"):
            await ping_version(settings)


@pytest.mark.parametrize("name", ["tls_ca_file", "tls_cert_file"])
@pytest.mark.parametrize("text", [None, "not a certificate"])
def test_an_unusable_tls_file_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    file = tmp_path / "file.pem"
    if text is not None:
        file.write_text(text)
    settings = PostgresqlStoreSettings(kind="postgresql", tls=True, **{name: str(file)})

    with pytest.raises(StoreConfigurationError, match=rf"store\.{name}.*file\.pem.* cannot be used"):
        settings_engine(settings)
