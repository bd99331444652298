"""Parse the addresses of workers' metrics, and resolve host names to endpoints."""

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
"""Default port."""
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 -- addresses that a worker listens on
_PAGES: Final = ("/metrics", "/readyz")
_USAGE: Final = "write host:port, or http://host:port"


@dataclass(frozen=True)
class Address:
    """An address from the command line.  Its host name may resolve to several machines."""

    host: str
    port: int
    base: str = ""
    """Path before `/metrics` and `/readyz`."""
    is_secure: bool = False
    """Whether to use TLS, with the certificates that this system trusts."""

    @property
    def text(self) -> str:
        """The address as a URL, or `host:port` without TLS."""
        return f"{'https://' if self.is_secure else ''}{host_and_port(self.host, self.port)}{self.base}"


@dataclass(frozen=True)
class Endpoint:
    """One IP address of an address."""

    address: Address
    ip: str

    @property
    def text(self) -> str:
        """A unique name of the endpoint."""
        return Address(self.ip, self.address.port, self.address.base, self.address.is_secure).text


def host_and_port(host: str, port: int) -> str:
    """Join host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(text: str) -> Address:
    """Parse `host:port`, a URL, a host, or a port of this machine.

    Raises:
        ApplicationError: `text` has another form.
    """
    if text.isascii() and text.isdigit():
        text = f"{LOOPBACK}:{text}"
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refusal(text, f"{error}; {_USAGE}") from None
    if parts.username is not None or parts.password is not None:
        raise _refusal(text.rpartition("@")[2], "credentials are not supported; remove the part before the @")
    if parts.scheme not in ("", "http", "https") or not host or parts.query or parts.fragment or port == 0:
        raise _refusal(text, f"invalid address of a worker; {_USAGE}")
    return Address(host, port or _default_port(parts), _base(parts.path), parts.scheme == "https")


def address_in(settings: Settings) -> Address:
    """Return the address of a worker with these settings on this machine.

    Raises:
        ApplicationError: It serves no metrics, or on a random port.
    """
    telemetry = settings.telemetry
    if not telemetry.metrics_enabled:
        raise ApplicationError("metrics are disabled in these settings; set [telemetry] metrics_enabled = true")
    if telemetry.metrics_port == 0:
        raise ApplicationError(
            "[telemetry] metrics_port = 0 selects a free port, which the worker logs at start; "
            "pass that port: integr8s-idem top 127.0.0.1:PORT"
        )
    host = telemetry.metrics_host
    return Address(LOOPBACK if host in _EVERYWHERE else host, telemetry.metrics_port)


async def endpoints_of(address: Address) -> list[Endpoint]:
    """Resolve an address to its IPv4 endpoints, or to its IPv6 endpoints if there are none.

    Raises:
        OSError: The host name cannot be resolved.
    """
    try:
        return [Endpoint(address, str(ipaddress.ip_address(address.host)))]
    except ValueError:
        pass  # a name
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError("invalid host name") from error
    # A machine often has both an IPv4 and an IPv6 address, and must not be shown twice.
    for family in (socket.AF_INET, socket.AF_INET6):
        ips = sorted({str(address_info[0]) for kind, _, _, _, address_info in found if kind is family})
        if ips:
            return [Endpoint(address, ip) for ip in ips]
    raise OSError("the host name has no address")


def _default_port(parts: SplitResult) -> int:
    return {"http": 80, "https": 443}.get(parts.scheme, PORT)


def _base(path: str) -> str:
    for page in _PAGES:
        path = path.removesuffix(page)
    return path.rstrip("/")


def _refusal(text: str, reason: str) -> ApplicationError:
    return ApplicationError(f'"{shown(text, 100)}": {reason}')
