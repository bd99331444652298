"""Certificates of a test authority, TLS settings of a Kafka broker, and a TLS proxy for servers without TLS."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from tests.support.accepting import Acceptor


class Authority:
    """Signs certificates; clients trust it through `ca_file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self.ca_file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_file))

    def server_context(self, host: str = "127.0.0.1", *, expired: bool = False) -> ssl.SSLContext:
        """Create the TLS context of a server with a certificate for `host`."""
        ended = datetime.now(UTC) - timedelta(days=1)
        certificate = self._ca.issue_cert(host, not_after=ended) if expired else self._ca.issue_cert(host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        return context

    def certificate_files(self, folder: Path, host: str = "127.0.0.1", name: str = "server") -> tuple[Path, Path]:
        """Write a certificate chain for `host` and its key to files."""
        certificate = self._ca.issue_cert(host)
        chain, key = folder / f"{name}.crt", folder / f"{name}.key"
        chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        key.write_bytes(certificate.private_key_pem.bytes())
        key.chmod(0o600)
        return chain, key

    def broker_settings(self, host: str = "127.0.0.1") -> dict[str, str]:
        """Return settings of a Kafka broker with a certificate for `host`."""
        certificate = self._ca.issue_cert(host)
        key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.key": _line(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
            "ssl.keystore.certificate.chain": _line(chain),
        }


def _line(text: bytes) -> str:
    """Escape a value for a Java properties file."""
    return text.decode().replace("\n", "\\n")


class TlsFront:
    """Accepts TLS on `port` and passes the plain bytes on to `target`, a port or a Unix socket.

    With `postgresql`, the client requests TLS as in the PostgreSQL protocol.
    """

    def __init__(self, target: int | Path, context: ssl.SSLContext, *, postgresql: bool = False) -> None:
        self._target = target
        self._context = context
        self._postgresql = postgresql
        self._acceptor = Acceptor(self._serve)

    @property
    def port(self) -> int:
        return self._acceptor.port

    async def __aenter__(self) -> Self:
        await self._acceptor.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._acceptor.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends: list[asyncio.WriteTransport] = []
        try:
            if self._postgresql:
                await reader.readexactly(8)  # SSLRequest
                writer.write(b"S")
            await writer.start_tls(self._context)
            ends.append(writer.transport)
            if isinstance(self._target, Path):
                answers, requests = await asyncio.open_unix_connection(self._target)
            else:
                answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(requests.transport)
            await asyncio.gather(_pass(reader, requests), _pass(answers, writer))
        except (OSError, EOFError):
            return  # an end has closed the connection
        finally:
            for end in ends:
                end.abort()  # a TLS shutdown would wait for a client that is gone


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
