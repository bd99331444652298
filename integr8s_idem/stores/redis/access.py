"""The least that a user of Redis needs."""

from __future__ import annotations

from typing import Final

from integr8s_idem.config import RedisClusterStoreSettings, RedisSentinelStoreSettings
from integr8s_idem.config.sections import AnyRedisSettings

COMMANDS: Final = (
    *("evalsha", "script|load", "get", "set", "setrange", "time", "pttl", "pexpire"),
    *("scan", "getrange", "unlink"),
    *("ping", "info", "config|get"),
    *("client|setname", "select"),
)
"""For the scripts; for counting, listing and deleting; for the look at the server; for each connection."""

_CLUSTER: Final = (*(command for command in COMMANDS if command != "select"), "cluster|slots", "asking")
"""A cluster has one database; its servers tell who has which slot, and give keys that are on their way."""

_SENTINEL: Final = ("sentinel|masters",)

_USER: Final = "worker"
"""Where the settings name none."""


def access_of(settings: AnyRedisSettings, key_prefix: str) -> list[str]:
    """Commands that make the user of these settings, and where there are several servers, lines that say at which."""
    user, wait = settings.username or _USER, ("wait",) if settings.wait_replicas else ()
    if isinstance(settings, RedisClusterStoreSettings):
        return [
            "# at every server of the cluster, replicas included; before Redis 7 with +cluster for +cluster|slots",
            _command(user, f"~{{idem:*}}{key_prefix}:*", (*_CLUSTER, *wait)),
        ]
    at_redis = _command(user, f"~{key_prefix}:*", (*COMMANDS, *wait))
    if isinstance(settings, RedisSentinelStoreSettings):
        return [
            "# at the primary and at every replica",
            at_redis,
            "# at every Sentinel",
            _command(settings.sentinel_username or _USER, "", _SENTINEL),
        ]
    return [at_redis]


def acl_setuser(user: str, key_prefix: str) -> str:
    """The command that makes `user` at a server of its own, with PASSWORD for the administrator to replace."""
    return _command(user, f"~{key_prefix}:*", COMMANDS)


def _command(user: str, keys: str, commands: tuple[str, ...]) -> str:
    rights = " ".join(f"+{command}" for command in commands)
    kept = f"resetkeys {keys}".rstrip()
    return f"ACL SETUSER {user} on >PASSWORD resetchannels {kept} -@all {rights}"
