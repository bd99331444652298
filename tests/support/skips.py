"""What may be skipped where a program is missing, and what to do about it: the one list, also where CI=true."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Skip:
    """Tests that may be skipped, and the one command that enables them; empty if nothing does."""

    reason: str
    """A part of the reason that the tests give."""
    command: str = ""


EXPECTED: Final = (
    Skip("no chromium", "apt-get install chromium chromium-driver"),
    Skip("no chromedriver", "apt-get install chromium-driver"),
    Skip("no prometheus", "apt-get install prometheus"),
    Skip("no promtool", "apt-get install prometheus"),
    Skip("no kubectl", "install kubectl 1.21 or newer"),
    Skip("root alone can become another user", "run the tests as root"),
    Skip("this store cannot hold an unreadable record"),  # its records are objects, not bytes
)
"""Any other skip is a failure where CI=true."""

_ELSEWHERE: Final = (
    Skip("no MariaDB: run", "make mariadb"),
    Skip("no jars of Apache Kafka", "make kafka"),
    Skip("no jars of DynamoDB Local", "make dynamodb"),
    Skip("no Java", "apt-get install default-jdk-headless maven"),
)
"""Known, and not expected: README asks for the programs."""


def is_expected(reason: str) -> bool:
    return any(skip.reason in reason for skip in EXPECTED)


def is_strict() -> bool:
    """Whether a skip that is not expected is a failure."""
    return os.environ.get("CI", "").lower() == "true"


def reason_of(longrepr: Any) -> str:
    """Of a report of pytest."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def table(reasons: Iterable[str]) -> Iterator[str]:
    """Lines: how many tests each reason skipped, and the command that would run them."""
    rows = [(str(count), *_shown(reason)) for reason, count in Counter(reasons).most_common()]
    if not rows:
        return
    rows.insert(0, ("tests", "skipped for", "to run them"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for count, why, command in rows:
        yield f"{count:>{widths[0]}}  {why:<{widths[1]}}  {command}".rstrip()


def _shown(reason: str) -> tuple[str, str]:
    command = next((skip.command for skip in (*EXPECTED, *_ELSEWHERE) if skip.reason in reason), None)
    if command is None:
        return reason, ""
    return reason.partition(":")[0], command or "(nothing does)"
