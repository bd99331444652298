"""The minimal permissions of a Redis user."""

from __future__ import annotations

from typing import Final

from integr8s_idem.config import RedisClusterStoreSettings, RedisSentinelStoreSettings
from integr8s_idem.config.store_sections import AnyRedisSettings

COMMANDS: Final = (
    *("evalsha", "script|load", "get", "set", "setrange", "time", "pttl", "pexpire"),
    *("scan", "getrange", "unlink"),
    *("ping", "info", "config|get"),
    *("client|setname", "select"),
)
"""For the scripts; for counting, listing and deleting; for `ping`; for each connection."""

_CLUSTER: Final = (*(command for command in COMMANDS if command != "select"), "cluster|slots", "asking")
"""A cluster has a single database; `cluster|slots` finds the owners of slots, `asking` reads migrating keys."""

_SENTINEL: Final = ("sentinel|masters",)

_USER: Final = "worker"
"""User name if the settings contain none."""


def access_of(settings: AnyRedisSettings, key_prefix: str) -> list[str]:
    """Return the commands that create the user of these settings, and comments that name the servers."""
    user, wait = settings.username or _USER, ("wait",) if settings.wait_replicas else ()
    if isinstance(settings, RedisClusterStoreSettings):
        return [
            "# on every server of the cluster, replicas included; before Redis 7, write +cluster for +cluster|slots",
            _command(user, f"~{{idem:*}}{key_prefix}:*", (*_CLUSTER, *wait)),
        ]
    at_redis = _command(user, f"~{key_prefix}:*", (*COMMANDS, *wait))
    if isinstance(settings, RedisSentinelStoreSettings):
        return [
            "# on the primary and on every replica",
            at_redis,
            "# on every Sentinel",
            _command(settings.sentinel_username or _USER, "", _SENTINEL),
        ]
    return [at_redis]


def acl_setuser(user: str, key_prefix: str) -> str:
    """Return the command that creates `user` on a single server; the administrator replaces PASSWORD."""
    return _command(user, f"~{key_prefix}:*", COMMANDS)


def _command(user: str, keys: str, commands: tuple[str, ...]) -> str:
    rights = " ".join(f"+{command}" for command in commands)
    key_rule = f"resetkeys {keys}".rstrip()
    return f"ACL SETUSER {user} on >PASSWORD resetchannels {key_rule} -@all {rights}"
