"""Addresses in settings: what is wrong with one, and what to write instead.  Never shows a password."""

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
"""The kinds of store that schemes of addresses stand for."""
_SECRET_OPTION: Final = re.compile(r"(?i)((?:password|passwd|pwd|secret|token)=)[^&\s]+")
_OPTION: Final = re.compile(r"[^\s?&]+")
_WORD: Final = re.compile(r"[^\s'\"<>]+")
_END_OF_HOST: Final = re.compile("[/?#]")
SENTINEL_PORT: Final = 26379
_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def without_secret(url: str) -> str:
    """`url` with whatever stands before an `@`, and any password among its options, hidden."""
    scheme, separator, rest = url.rpartition("://")
    _, at, tail = rest.rpartition("@")
    return _without_secret_options(f"{scheme}{separator}{'***@' if at else ''}{tail}")


def redacted(text: str) -> str:
    """Foreign text, such as that of an error, with what `without_secret` hides in a URL hidden wherever it stands."""
    # Word by word, so that a text of megabytes costs what its length says.
    plain = _WORD.sub(_without_credentials, text) if "://" in text else text
    return _without_secret_options(plain)


def _without_secret_options(text: str) -> str:
    plain = _SECRET_OPTION.sub(r"\1***", text)
    # Whoever reads a URL decodes the names of its options: pass%77ord is one, too.
    return _OPTION.sub(_without_encoded_secret, plain) if "%" in plain else plain


def _without_encoded_secret(option: re.Match[str]) -> str:
    name, is_option, _ = option[0].partition("=")
    return f"{name}=***" if is_option and _SECRET_OPTION.search(f"{unquote(name)}=x") else option[0]


def _without_credentials(word: re.Match[str]) -> str:
    scheme, separator, rest = word[0].partition("://")
    _, at, tail = rest.rpartition("@")
    return f"{scheme}{separator}***@{tail}" if at else word[0]


def url_holds_password(url: str) -> bool:
    """Whether the URL itself says a password: before its host, or among its options."""
    parts = urlsplit(url)
    return bool(parts.password) or "password" in parse_qs(parts.query)


def redis_url(url: str) -> str:
    """`url` if redis-py would understand all of it.

    Raises:
        ValueError: With the URL to write instead.
    """
    scheme, separator, rest = url.partition("://")
    _must_be_plain(url, _example())
    if not separator or scheme not in _REDIS_SCHEMES or not rest:
        _refuse_of_another_kind(url, "Redis")
        host = _host_of(rest if separator else url)
        raise ValueError(f'"{without_secret(url)}" is no Redis URL; write {_example("redis", host)}')
    if scheme == "unix":
        return url
    parts = _split(url, _example())
    # redis-py takes database 0, without a word, for any path that is no number.
    database = parts.path.strip("/")
    if "@" in database:
        # Whatever stands before the last `@` may be meant for a password: a slash in it has cut it in two.
        raise ValueError(
            "has a slash within its user or password; write / as %2F, @ as %40, : as %3A there: "
            f"{scheme}://user:pass%2Fword@localhost:6379/0"
        )
    if database and not database.isdecimal():
        raise ValueError(
            f'"{without_secret(url)}" names the database "{database}", which is no number; '
            f"write {_example(scheme, parts.netloc)}"
        )
    return url


def cluster_url(url: str) -> str:
    """`url` if it names a server of a Redis Cluster.

    Raises:
        ValueError: With the URL to write instead.
    """
    redis_url(url)
    scheme = url.partition("://")[0]
    example = f"{'rediss' if scheme == 'rediss' else 'redis'}://localhost:6379"
    if scheme == "unix":
        raise ValueError(f"has a socket in it, where a Redis Cluster has none; write {example}")
    if _split(url, example).path.strip("/") not in {"", "0"}:
        raise ValueError(f'"{without_secret(url)}" names a database, of which a Redis Cluster has one; leave it out')
    return url


def sentinel_address(address: str) -> str:
    """`address` if it is `host:port`, with the usual port if it has none.

    Raises:
        ValueError: With the address to write instead.
    """
    found = _BROKER.fullmatch(address.strip())
    if found is None:
        host = without_secret(address).rpartition("://")[2].rpartition("@")[2].partition("/")[0].partition(":")[0]
        meant = host if _BROKER.fullmatch(host) else "localhost"
        raise ValueError(f'"{without_secret(address)}" is no address of a Sentinel; write {meant}:{SENTINEL_PORT}')
    return f"{found[1]}{found[2] or f':{SENTINEL_PORT}'}"


def one_or_many(value: object) -> object:
    """A list, from one text or from several separated by commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def postgresql_url(url: str) -> str:
    """`url` if it names a PostgreSQL database.

    Raises:
        ValueError: With the URL to write instead.
    """
    example = _database_url(url, "PostgreSQL", ("postgresql", "postgres"), "localhost:5432/postgres")
    return _of_known_options(url, ("host", "port", "user", "password"), example)


def mysql_url(url: str) -> str:
    """`url` if it names a database of MySQL or MariaDB.

    Raises:
        ValueError: With the URL to write instead.
    """
    example = _database_url(url, "MySQL", ("mysql", "mariadb"), "localhost:3306/idempotency")
    return _of_known_options(url, ("unix_socket", "user", "password"), example)


def _database_url(url: str, server: str, schemes: tuple[str, ...], place: str) -> str:
    """Refuse what is none; an example of one."""
    example = f"{schemes[0]}://{place}"
    _must_be_plain(url, example)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in schemes or not rest:
        _refuse_of_another_kind(url, server)
        host = _host_of(rest if separator else url) or "localhost"
        meant = f"{schemes[0]}://{host}/{place.partition('/')[2]}"
        raise ValueError(f'"{without_secret(url)}" is no {server} URL; write {meant}')
    parts = _split(url, example)
    if "@" in parts.path:
        raise ValueError(f"has a slash within its user or password; write / as %2F, @ as %40 there, as in {example}")
    if not parts.path.strip("/"):
        # The drivers take the user's name for it, or none.
        meant = f"{scheme}://{parts.netloc.rpartition('@')[2]}/{place.partition('/')[2]}"
        raise ValueError(f'"{without_secret(url)}" names no database; write {meant}')
    return example


def _of_known_options(url: str, known: tuple[str, ...], example: str) -> str:
    for name in parse_qs(_split(url, example).query, keep_blank_values=True):
        if name in known:
            continue
        what = f'has the option "{name}", of which nothing is known here; take it out'
        if name.lower().startswith(("ssl", "tls")):
            raise ValueError(f"{what}: TLS is store.tls = true, with store.tls_ca_file for a certificate of your own")
        raise ValueError(f"{what}; known: {', '.join(known)}")
    return url


def _refuse_of_another_kind(url: str, server: str) -> None:
    """Name the kind of store that `url` leads to, where it is one that there is."""
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme.partition("+")[0].lower()) if separator else None
    if kind is None or not rest:
        return
    if kind == "sqlite":
        path = json.dumps(rest.removeprefix("/") or "idempotency.db")
        meant = f'kind = "sqlite" and path = {path} in place of the url'
    else:
        meant = f'kind = "{kind}"'
    raise ValueError(f'"{without_secret(url)}" is no {server} URL; write {meant}')


def brokers(servers: str) -> str:
    """`servers` if it is a list of `host:port`, separated by commas.

    Raises:
        ValueError: With the first part that is none.
    """
    for part in (part.strip() for part in servers.split(",")):
        if not _BROKER.fullmatch(part):
            raise ValueError(f'"{without_secret(part)}" is no broker; write host:port, as in {_broker_like(part)}')
    return servers


def _broker_like(part: str) -> str:
    """A broker that may have been meant by `part`, which is none."""
    host = without_secret(part).rpartition("://")[2].rpartition("@")[2].partition("/")[0]
    if _BROKER.fullmatch(host):
        return host
    name = host.partition(":")[0]
    return f"{name if _BROKER.fullmatch(name) else 'localhost'}:9092"


def collector_url(url: str) -> str:
    """`url` if it is one of HTTP.

    Raises:
        ValueError: With the URL to write instead.
    """
    return _http_url(url, "a collector", "localhost:4317")


def dynamodb_url(url: str) -> str:
    """`url` if it is one of HTTP.

    Raises:
        ValueError: With the URL to write instead.
    """
    return _http_url(url, "a DynamoDB", "localhost:8000")


def _http_url(url: str, what: str, example: str) -> str:
    scheme, separator, rest = url.partition("://")
    _must_be_plain(url, f"http://{example}")
    if separator and scheme in {"http", "https"} and rest:
        return url
    host = _host_of(rest if separator else url)
    raise ValueError(f'"{without_secret(url)}" is no URL of {what}; write http://{host or example}')


def _host_of(rest: str) -> str:
    """Host and port behind a scheme, with whatever stands before an `@` hidden, be it a path."""
    _, at, tail = rest.rpartition("@")
    return f"{'***@' if at else ''}{_END_OF_HOST.split(tail)[0]}"


def _must_be_plain(url: str, example: str) -> None:
    if not url.isprintable() or " " in url:
        raise ValueError(f"has spaces or characters that cannot be seen; write {example}")


def _split(url: str, example: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only when asked for
    except ValueError:
        # Not shown: with its host forgotten, what is read for a port is a password.
        raise ValueError(f"has a host or port that cannot be read; write {example}") from None
    return parts


def _example(scheme: str = "redis", host: str = "localhost:6379") -> str:
    return f"{scheme}://{_host_of(host) or 'localhost:6379'}/0"
