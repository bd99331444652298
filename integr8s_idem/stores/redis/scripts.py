"""The Lua scripts, one a verb, each sent by its hash and loaded again when the server has lost it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final, Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


class Script(Protocol):
    """A script on the server; the answer is what its head comment says."""

    async def __call__(self, keys: list[str], args: list[bytes | int]) -> list[Any]: ...


LOADS: Final = 3
"""Times a script is loaded for one call, before the server is taken for one that keeps none."""


def _text(name: str) -> str:
    return files(__package__).joinpath(f"{name}.lua").read_text("utf-8")


_TEXTS: Final = {name: _text(name) for name in ("reserve", "settle", "renew", "release", "read")}


class Scripts:
    """All scripts, bound to a client."""

    def __init__(self, client: Redis) -> None:
        self.reserve = _bound(client, "reserve")
        self.settle = _bound(client, "settle")
        self.renew = _bound(client, "renew")
        self.release = _bound(client, "release")
        self.read = _bound(client, "read")


def _bound(client: Redis, name: str) -> Script:
    # The driver's script object sends EVALSHA, and SCRIPT LOAD and EVALSHA after NOSCRIPT.
    once = cast(Script, client.register_script(_TEXTS[name]))

    async def call(keys: list[str], args: list[bytes | int]) -> list[Any]:
        for _ in range(LOADS - 1):
            try:
                return await once(keys, args)
            except NoScriptError:
                pass  # flushed again between loading and calling; nothing was executed
        return await once(keys, args)

    return call
