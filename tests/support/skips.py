"""The reasons for which tests may be skipped, also with CI=true, and the commands that enable the tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Skip:
    """Tests that may be skipped, and the command that enables them; empty if none does."""

    reason: str
    """A part of the reason in the tests."""
    command: str = ""


EXPECTED: Final = (
    Skip("no chromium", "apt-get install chromium chromium-driver"),
    Skip("no chromedriver", "apt-get install chromium-driver"),
    Skip("no prometheus", "apt-get install prometheus"),
    Skip("no promtool", "apt-get install prometheus"),
    Skip("run `make speedups`", "make speedups, with Rust 1.83 or newer"),
    Skip("no kubectl", "install kubectl 1.21 or newer"),
    Skip("root alone can become another user", "run the tests as root"),
    Skip("this store cannot hold an unreadable record"),  # its records are objects, not bytes
)
"""With CI=true, any other skip is a failure."""

_UNEXPECTED: Final = (
    Skip("no MariaDB: run", "make mariadb"),
    Skip("no jars of Apache Kafka", "make kafka"),
    Skip("no jars of DynamoDB Local", "make dynamodb"),
    Skip("no Java", "apt-get install default-jdk-headless maven"),
)
"""Other skips with a known command: the README requires these programs."""


def is_expected(reason: str) -> bool:
    return any(skip.reason in reason for skip in EXPECTED)


def is_strict() -> bool:
    """Return whether unexpected skips are failures."""
    return os.environ.get("CI", "").lower() == "true"


def reason_of(longrepr: Any) -> str:
    """Return the reason in a pytest report."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def table(reasons: Iterable[str]) -> Iterator[str]:
    """Yield a table of skip reasons: number of tests, reason, and the command that enables them."""
    rows = [(str(count), *_shown(reason)) for reason, count in Counter(reasons).most_common()]
    if not rows:
        return
    rows.insert(0, ("tests", "skipped for", "to run them"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for count, why, command in rows:
        yield f"{count:>{widths[0]}}  {why:<{widths[1]}}  {command}".rstrip()


def _shown(reason: str) -> tuple[str, str]:
    command = next((skip.command for skip in (*EXPECTED, *_UNEXPECTED) if skip.reason in reason), None)
    if command is None:
        return reason, ""
    return reason.partition(":")[0], command or "(nothing does)"
