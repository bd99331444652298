"""Validation of addresses in settings.  Errors suggest a correction and never show a password."""

from __future__ import annotations

import json
import re
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

_REDIS_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
_KINDS: Final = {
    "redis": "redis",
    "rediss": "redis",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
"""The kind of store for each URL scheme."""
_SCHEMES: Final = frozenset({*_REDIS_SCHEMES, *_KINDS, "http", "https", "ftp", "grpc", "kafka"})
"""Schemes that are shown in front of user info; another word may be a part of it."""
_SECRET_OPTION: Final = re.compile(r"(?i)((?:password|passwd|pwd|secret|token)=)[^&\s]+")
_OPTION: Final = re.compile(r"[^\s?&]+")
_WORD: Final = re.compile(r"[^\s'\"<>]+")
_END_OF_HOST: Final = re.compile("[/?#]")
_COMMA_BEFORE_URL: Final = re.compile(r",(?=\s*(?:rediss?|unix)://)")
SENTINEL_PORT: Final = 26379
_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def without_secret(url: str) -> str:
    """Return `url` with user info and passwords in its options hidden, and with them what may belong to them."""
    scheme, separator, rest = url.partition("://")
    is_scheme = scheme.partition("+")[0].lower() in _SCHEMES or "@" not in url
    plain = f"{scheme}{separator}{_without_user_info(rest)}" if separator and is_scheme else _without_user_info(url)
    for option in _OPTION.finditer(plain):
        name, is_option, _ = option[0].partition("=")
        if is_option and _SECRET_OPTION.search(f"{unquote(option[0])}x"):
            # An unencoded `&` in the password would make the rest of it look like another option.
            return f"{plain[: option.start()]}{name}=***"
    return plain


def _without_user_info(rest: str) -> str:
    """Hide the user info after a scheme, or everything if it is not clear where it ends."""
    before, at, tail = rest.rpartition("@")
    if at and "?" in before:
        return "***"  # the `@` may belong to a password in the options, or the `?` to one in the user info
    return f"***@{tail}" if at else rest


def redacted(text: str) -> str:
    """Return text, such as an error message, with the secrets of all URLs in it hidden."""
    # Word by word, so that the time is linear in the length of the text.
    plain = _WORD.sub(_without_credentials, text) if "://" in text else text
    return _without_secret_options(plain)


def _without_secret_options(text: str) -> str:
    plain = _SECRET_OPTION.sub(r"\1***", text)
    # Names of options may be percent-encoded: pass%77ord is password.
    return _OPTION.sub(_without_encoded_secret, plain) if "%" in plain else plain


def _without_encoded_secret(option: re.Match[str]) -> str:
    name, is_option, _ = option[0].partition("=")
    return f"{name}=***" if is_option and _SECRET_OPTION.search(f"{unquote(name)}=x") else option[0]


def _without_credentials(word: re.Match[str]) -> str:
    scheme, separator, rest = word[0].partition("://")
    return f"{scheme}{separator}{_without_user_info(rest)}"


def url_holds_password(url: str) -> bool:
    """Return whether the URL contains a password, before its host or in its options."""
    parts = urlsplit(url)
    return bool(parts.password) or "password" in parse_qs(parts.query)


def redis_url(url: str) -> str:
    """Return `url` if it is a valid Redis URL.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    scheme, separator, rest = url.partition("://")
    _must_be_plain(url, _example())
    if not separator or scheme not in _REDIS_SCHEMES or not rest:
        _reject_other_kind(url, "Redis")
        host = _host_of(rest if separator else url)
        raise ValueError(f'"{without_secret(url)}" is not a Redis URL; write {_example("redis", host)}')
    if scheme == "unix":
        return url
    parts = _split(url, _example())
    # redis-py silently uses database 0 for a path that is not a number.
    database = parts.path.strip("/")
    if database and not database.isdecimal() and "@" in rest.removeprefix(parts.netloc):
        # Everything before the last `@` may be part of a password that contains a slash.
        raise ValueError(
            "contains a slash in its user or password; write / as %2F, @ as %40, : as %3A there: "
            f"{scheme}://user:pass%2Fword@localhost:6379/0"
        )
    if database and not database.isdecimal():
        raise ValueError(
            f'"{without_secret(url)}" names the database "{database}", which is not a number; '
            f"write {_example(scheme, parts.netloc)}"
        )
    return url


def cluster_url(url: str) -> str:
    """Return `url` if it is a valid URL of a Redis Cluster server.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    redis_url(url)
    scheme = url.partition("://")[0]
    example = f"{'rediss' if scheme == 'rediss' else 'redis'}://localhost:6379"
    if scheme == "unix":
        raise ValueError(f"contains a socket, but a Redis Cluster is reached over TCP; write {example}")
    if _split(url, example).path.strip("/") not in {"", "0"}:
        raise ValueError(f'"{without_secret(url)}" names a database, but a Redis Cluster has only one; remove it')
    return url


def sentinel_address(address: str) -> str:
    """Return `address` as `host:port`, with the default port if it has none.

    Raises:
        ValueError: It is not a valid address; the message suggests one.
    """
    found = _BROKER.fullmatch(address.strip())
    if found is None:
        host = without_secret(address).rpartition("://")[2].rpartition("@")[2].partition("/")[0].partition(":")[0]
        meant = host if _BROKER.fullmatch(host) else "localhost"
        raise ValueError(f'"{without_secret(address)}" is not a Sentinel address; write {meant}:{SENTINEL_PORT}')
    return f"{found[1]}{found[2] or f':{SENTINEL_PORT}'}"


def one_or_many(value: object) -> object:
    """Split a comma-separated string into a list."""
    if not isinstance(value, str):
        return value
    # A comma may belong to a password, unless a URL follows.
    parts = value.split(",") if without_secret(value) == value else _COMMA_BEFORE_URL.split(value)
    return [part.strip() for part in parts]


def postgresql_url(url: str) -> str:
    """Return `url` if it is a valid URL of a PostgreSQL database.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    example = _database_url(url, "PostgreSQL", ("postgresql", "postgres"), "localhost:5432/postgres")
    return _check_options(url, ("host", "port", "user", "password"), example)


def mysql_url(url: str) -> str:
    """Return `url` if it is a valid URL of a MySQL or MariaDB database.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    example = _database_url(url, "MySQL", ("mysql", "mariadb"), "localhost:3306/idempotency")
    return _check_options(url, ("unix_socket", "user", "password"), example)


def _database_url(url: str, server: str, schemes: tuple[str, ...], place: str) -> str:
    """Check that `url` is a database URL, and return an example of one."""
    example = f"{schemes[0]}://{place}"
    _must_be_plain(url, example)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in schemes or not rest:
        _reject_other_kind(url, server)
        host = _host_of(rest if separator else url) or "localhost"
        meant = f"{schemes[0]}://{host}/{place.partition('/')[2]}"
        raise ValueError(f'"{without_secret(url)}" is not a {server} URL; write {meant}')
    parts = _split(url, example)
    if "@" in parts.path:
        raise ValueError(f"contains a slash in its user or password; write / as %2F, @ as %40 there, as in {example}")
    if not parts.path.strip("/"):
        # Without it, the drivers use the user name as the database, or none.
        host = _host_of(rest).removeprefix("***@") or place.partition("/")[0]
        meant = f"{scheme}://{host}/{place.partition('/')[2]}"
        raise ValueError(f'"{without_secret(url)}" does not name a database; write {meant}')
    return example


def _check_options(url: str, known: tuple[str, ...], example: str) -> str:
    query = _split(url, example).query
    is_ambiguous = "@" in query
    for name in parse_qs(query, keep_blank_values=True):
        if name in known:
            # What follows may belong to a password with an unencoded `&`.
            is_ambiguous = is_ambiguous or name == "password"
            continue
        shown = "an option" if is_ambiguous else f'the option "{name}"'
        what = f"has {shown}, which is not supported; remove it"
        if name.lower().startswith(("ssl", "tls")):
            raise ValueError(f"{what}: set store.tls = true for TLS, with store.tls_ca_file for a custom CA")
        hint = "; write & as %26 and @ as %40 in a password" if is_ambiguous else ""
        raise ValueError(f"{what}{hint}; known: {', '.join(known)}")
    return url


def _reject_other_kind(url: str, server: str) -> None:
    """Raise an error that suggests the kind of store of `url`, if there is one."""
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme.partition("+")[0].lower()) if separator else None
    if kind is None or not rest:
        return
    if kind == "sqlite":
        plain = without_secret(url).partition("://")[2].removeprefix("/")
        path = json.dumps("idempotency.db" if not plain or "***" in plain else plain)
        meant = f'kind = "sqlite" and path = {path} instead of url'
    else:
        meant = f'kind = "{kind}"'
    raise ValueError(f'"{without_secret(url)}" is not a {server} URL; write {meant}')


def brokers(servers: str) -> str:
    """Return `servers` if it is a comma-separated list of `host:port`.

    Raises:
        ValueError: It is not; the message names the first invalid address.
    """
    # A comma may belong to a password, which no address has.
    parts = servers.split(",") if without_secret(servers) == servers else [servers]
    for part in map(str.strip, parts):
        if not _BROKER.fullmatch(part):
            shown = without_secret(part)
            raise ValueError(f'"{shown}" is not a broker address; write host:port, as in {_broker_like(part)}')
    return servers


def _broker_like(part: str) -> str:
    """Return the broker address that was probably meant by `part`."""
    host = without_secret(part).rpartition("://")[2].rpartition("@")[2].partition("/")[0]
    if _BROKER.fullmatch(host):
        return host
    name = host.partition(":")[0]
    return f"{name if _BROKER.fullmatch(name) else 'localhost'}:9092"


def collector_url(url: str) -> str:
    """Return `url` if it is an HTTP URL.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    return _http_url(url, "a collector", "localhost:4317")


def dynamodb_url(url: str) -> str:
    """Return `url` if it is an HTTP URL.

    Raises:
        ValueError: It is not; the message suggests a URL.
    """
    return _http_url(url, "a DynamoDB", "localhost:8000")


def _http_url(url: str, what: str, example: str) -> str:
    scheme, separator, rest = url.partition("://")
    _must_be_plain(url, f"http://{example}")
    if separator and scheme in {"http", "https"} and rest:
        return url
    host = _host_of(rest if separator else url)
    raise ValueError(f'"{without_secret(url)}" is not {what} URL; write http://{host or example}')


def _host_of(rest: str) -> str:
    """Return host and port after a scheme, hiding everything before an `@`, which may contain slashes."""
    host = _END_OF_HOST.split(_without_user_info(rest))[0]
    return "" if host == "***" else host


def _must_be_plain(url: str, example: str) -> None:
    if not url.isprintable() or " " in url:
        raise ValueError(f"contains spaces or invisible characters; write {example}")


def _split(url: str, example: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parses the port
    except ValueError:
        # The URL is not shown: without a host, the part parsed as port may be a password.
        raise ValueError(f"has an invalid host or port; write {example}") from None
    return parts


def _example(scheme: str = "redis", host: str = "localhost:6379") -> str:
    return f"{scheme}://{_host_of(host) or 'localhost:6379'}/0"
