"""What to do about each finding: every line says it, and so does `mend` in `--json`.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from integr8s_idem.diagnostics import Code

_MEND: Final[Mapping[Code, str]] = {
    Code.STORE_UNAVAILABLE: "start it, or mend its address in [store]",
    Code.STORE_REFUSED: "make [store] and the server fit by what it says",
    Code.STORE_CREDENTIALS: "mend the user, the password or the credentials, here or there",
    Code.STORE_PERMISSION: "integr8s-idem doctor --acl prints all that it needs",
    Code.STORE_REPLICA: "give the address of the primary",
    Code.STORE_PRIMARY_UNKNOWN: "set store.master_name to the name that the Sentinels use",
    Code.STORE_CLUSTER_DOWN: "bring its servers back, and give every slot to one of them",
    Code.STORE_TOO_FEW_REPLICAS: "bring the replicas back, or ask for fewer",
    Code.STORE_MEMORY: "raise maxmemory, or lower the ttl",
    Code.SCHEMA_MISSING: "run: integr8s-idem store migrate",
    Code.SCHEMA_OLDER: "run: integr8s-idem store migrate",
    Code.SCHEMA_NEWER: "deploy that version here, too",
    Code.SCHEMA_OTHER: "name another table",
    Code.CLOCK_SKEW: "let this machine follow a time server",
}
_ELSE: Final = "make [store] fit by what it says"
_FOREIGN: Final = re.compile(r"answers: |no connection to|no answer from|what answers is not")
"""Before words that are not ours, in which a semicolon means nothing."""
_NO_SENTINEL: Final = re.compile(r"unknown command\W*SENTINEL", re.IGNORECASE)


def of_store(code: Code, reason: str) -> tuple[str, str]:
    """What a store's error says is wrong, and what to do."""
    if _NO_SENTINEL.search(reason):
        return reason, "give the addresses of Sentinels in store.sentinels: usually those at port 26379"
    foreign = _FOREIGN.search(reason)
    what, mend = (reason, "") if foreign else parted(reason)
    if code is Code.STORE_UNAVAILABLE and not foreign:
        # It has answered, and is where it should be.
        return what, mend or "wait until that has passed, or end it there"
    return what, mend or _MEND.get(code, _ELSE)


def of_warning(path: str, message: str) -> tuple[str, str, str]:
    """What a warning says of a setting, what that can cost, and what to do."""
    said, mend = of_mistake(path, message)
    what, _, cost = said.rpartition(": ")
    return (what, cost, mend) if what else (said, "", mend)


def of_mistake(path: str, message: str) -> tuple[str, str]:
    """What is wrong with a setting, and what to do."""
    what, mend = parted(message)
    return what, mend or f"change {path}"


def parted(text: str) -> tuple[str, str]:
    """A sentence of ours before and behind its last semicolon, behind which stands what to do."""
    what, _, mend = text.rpartition("; ")
    return (what, mend) if what else (text, "")
