"""Remedies for findings about the store and the settings.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from integr8s_idem.diagnostics import Code

_REMEDIES: Final[Mapping[Code, str]] = {
    Code.STORE_UNAVAILABLE: "start the server, or correct its address in [store]",
    Code.STORE_REFUSED: "correct [store] or the server's configuration according to the error",
    Code.STORE_CREDENTIALS: "correct the user, password or credentials in the settings or on the server",
    Code.STORE_PERMISSION: "integr8s-idem doctor --acl prints the required permissions",
    Code.STORE_REPLICA: "use the address of the primary",
    Code.STORE_PRIMARY_UNKNOWN: "set store.master_name to the name that the Sentinels use",
    Code.STORE_CLUSTER_DOWN: "restore its servers, and assign every slot to one of them",
    Code.STORE_TOO_FEW_REPLICAS: "restore the replicas, or require fewer",
    Code.STORE_MEMORY: "raise maxmemory, or lower the ttl",
    Code.SCHEMA_MISSING: "run: integr8s-idem store migrate",
    Code.SCHEMA_OLDER: "run: integr8s-idem store migrate",
    Code.SCHEMA_NEWER: "deploy the newer version of the library here as well",
    Code.SCHEMA_OTHER: "choose another table",
    Code.CLOCK_SKEW: "synchronize this machine with a time server",
}
_DEFAULT: Final = "correct [store] according to the error"
_FOREIGN: Final = re.compile(r"(?:answers|reported): |no connection to|no answer from|the response is not from")
"""Precedes messages of other programs, in which a semicolon has no meaning."""
_NO_SENTINEL: Final = re.compile(r"unknown command\W*SENTINEL", re.IGNORECASE)


def store_remedy(code: Code, reason: str) -> tuple[str, str]:
    """Split a store's error into the problem and its remedy."""
    if _NO_SENTINEL.search(reason):
        return reason, "set store.sentinels to the addresses of Sentinels, usually on port 26379"
    foreign = _FOREIGN.search(reason)
    what, remedy = (reason, "") if foreign else split_remedy(reason)
    if code is Code.STORE_UNAVAILABLE and not foreign:
        # The server answers, so its address is right.
        return what, remedy or "wait until the problem passes, or resolve it on the server"
    return what, remedy or _REMEDIES.get(code, _DEFAULT)


def warning_remedy(path: str, message: str) -> tuple[str, str, str]:
    """Split a warning about a setting into the problem, its consequence and its remedy."""
    problem, remedy = mistake_remedy(path, message)
    what, _, cost = problem.rpartition(": ")
    return (what, cost, remedy) if what else (problem, "", remedy)


def mistake_remedy(path: str, message: str) -> tuple[str, str]:
    """Split a mistake in a setting into the problem and its remedy."""
    what, remedy = split_remedy(message)
    return what, remedy or f"change {path}"


def split_remedy(text: str) -> tuple[str, str]:
    """Split a message of this library at its last semicolon into the problem and its remedy."""
    what, _, remedy = text.rpartition("; ")
    return (what, remedy) if what else (text, "")
