"""The machine, the versions and the commit that results were measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks.measuring import Flat

DRIVERS: Final = ("redis", "hiredis", "SQLAlchemy", "asyncpg", "aiomysql", "aiosqlite", "aiobotocore", "uvloop")
PEERS: Final = (
    "redis",
    "hiredis",
    "aiokafka",
    "pydantic",
    "faststream",
    "idemkit",
    "idempotency-kit",
    "aws_lambda_powertools",
    "SQLAlchemy",
    "asyncpg",
    "opentelemetry-sdk",
    "prometheus_client",
    "uvloop",
)


def machine(packages: tuple[str, ...] = PEERS) -> Flat:
    """Describe the machine, and the versions of `packages`."""
    result: Flat = {
        "machine.cpus": len(os.sched_getaffinity(0)),
        "machine.cpu": _processor(),
        "machine.system": f"{platform.system()} {platform.machine()}",
        "machine.python": platform.python_version(),
    }
    return result | {f"version.{name}": version(name) for name in packages}


def commit() -> str:
    """Return the commit of this checkout, with a `+` if tracked files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    try:
        asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
