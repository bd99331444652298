"""CI runs the commands of the README, on every Python version in the metadata."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.packaging.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
JOBS: dict[str, Any] = WORKFLOW["jobs"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands(job: str) -> list[str]:
    return [line for step in JOBS[job]["steps"] for line in step.get("run", "").splitlines()]


def test_tests_run_on_every_python_version_of_the_metadata() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]

    assert JOBS["test"]["strategy"]["matrix"]["python"] == named
    assert commands("test") == ["make test"]


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("check", "make check"),
        ("wheel", "make wheel"),
        ("docs", "make docs"),
        ("lowest", "make test-lowest"),
        ("native", "make test-native"),
    ],
)
def test_each_job_runs_a_documented_make_target(job: str, command: str) -> None:
    assert commands(job)[0] == command
    assert command.removeprefix("make ") in TARGETS


def test_jobs_have_timeouts_and_read_only_permissions() -> None:
    assert WORKFLOW["permissions"] == {}
    assert {name: (job["permissions"], job["timeout-minutes"] <= 60) for name, job in JOBS.items()} == {
        name: ({"contents": "read"}, True) for name in JOBS
    }
