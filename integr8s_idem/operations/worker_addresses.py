"""Where workers tell their metrics: what people write for it, and the machines that a name stands for."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from integr8s_idem._util.escaping import shown
from integr8s_idem.config import Settings, TelemetrySettings
from integr8s_idem.errors import ApplicationError

LOOPBACK: Final = "127.0.0.1"
PORT: Final = TelemetrySettings().metrics_port
"""Of an address that says none."""
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 -- what a worker listens on, not we
_PAGES: Final = ("/metrics", "/readyz")
_USAGE: Final = "write host:port, or http://host:port"


@dataclass(frozen=True)
class Address:
    """What somebody has named: a host, which may be a name of several machines."""

    host: str
    port: int
    base: str = ""
    """What stands before `/metrics` and `/readyz` in the path."""
    is_secure: bool = False
    """Whether it is asked by TLS, with the certificates that this system trusts."""

    @property
    def text(self) -> str:
        """As people write it."""
        return f"{'https://' if self.is_secure else ''}{host_and_port(self.host, self.port)}{self.base}"


@dataclass(frozen=True)
class Endpoint:
    """One machine behind an address."""

    address: Address
    ip: str

    @property
    def text(self) -> str:
        """What tells it from all others."""
        return Address(self.ip, self.address.port, self.address.base, self.address.is_secure).text


def host_and_port(host: str, port: int) -> str:
    """Both, as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(text: str) -> Address:
    """`host:port`, a URL, a host alone, or a port alone, which is one of this machine.

    Raises:
        ApplicationError: It is none of these; it says what to write.
    """
    if text.isascii() and text.isdigit():
        text = f"{LOOPBACK}:{text}"
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refusal(text, f"{error}; {_USAGE}") from None
    if parts.username is not None or parts.password is not None:
        raise _refusal(text.rpartition("@")[2], "is asked without a user; leave out what stands before the @")
    if parts.scheme not in ("", "http", "https") or not host or parts.query or parts.fragment or port == 0:
        raise _refusal(text, f"is no address of a worker; {_USAGE}")
    return Address(host, port or _usual_port(parts), _base(parts.path), parts.scheme == "https")


def address_in(settings: Settings) -> Address:
    """Of a worker of these settings on this machine.

    Raises:
        ApplicationError: It serves none, or on a port that nobody knows beforehand.
    """
    telemetry = settings.telemetry
    if not telemetry.metrics_enabled:
        raise ApplicationError("workers of these settings serve no metrics; set [telemetry] metrics_enabled = true")
    if telemetry.metrics_port == 0:
        raise ApplicationError(
            "[telemetry] metrics_port = 0 takes a free port, which the worker logs when it starts; "
            "name its address: integr8s-idem top 127.0.0.1:PORT"
        )
    host = telemetry.metrics_host
    return Address(LOOPBACK if host in _EVERYWHERE else host, telemetry.metrics_port)


async def endpoints_of(address: Address) -> list[Endpoint]:
    """The machines behind an address: those of version 4 of the internet protocol, or of version 6 if there is none.

    Raises:
        OSError: Nobody knows the name.
    """
    try:
        return [Endpoint(address, str(ipaddress.ip_address(address.host)))]
    except ValueError:
        pass  # a name
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError("this can be no name of a host") from error
    # A name has one machine by both versions, often: it is not to be shown twice.
    for family in (socket.AF_INET, socket.AF_INET6):
        ips = sorted({str(place[0]) for kind, _, _, _, place in found if kind is family})
        if ips:
            return [Endpoint(address, ip) for ip in ips]
    raise OSError("this name has no address")


def _usual_port(parts: SplitResult) -> int:
    return {"http": 80, "https": 443}.get(parts.scheme, PORT)


def _base(path: str) -> str:
    for page in _PAGES:
        path = path.removesuffix(page)
    return path.rstrip("/")


def _refusal(text: str, why: str) -> ApplicationError:
    return ApplicationError(f'"{shown(text, 100)}": {why}')
