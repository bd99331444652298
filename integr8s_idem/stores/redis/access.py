"""The least that a user of Redis needs."""

from __future__ import annotations

from typing import Final

COMMANDS: Final = (
    *("evalsha", "script|load", "get", "set", "setrange", "time", "pttl", "pexpire"),
    *("scan", "getrange", "unlink"),
    *("ping", "info", "config|get"),
    *("client|setname", "select"),
)
"""For the scripts; for counting, listing and deleting; for the look at the server; for each connection."""


def acl_setuser(user: str, key_prefix: str) -> str:
    """The command that makes `user`, with PASSWORD for the administrator to replace."""
    rights = " ".join(f"+{command}" for command in COMMANDS)
    return f"ACL SETUSER {user} on >PASSWORD resetchannels resetkeys ~{key_prefix}:* -@all {rights}"
