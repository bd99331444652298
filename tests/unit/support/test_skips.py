"""Tests that are skipped are counted by their reason, next to the command that enables them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.repository import ROOT
from tests.support import browser, mariadb, prometheus, skips

KUBECTL = "tests/packaging/test_deploy_kubernetes.py::test_kubectl_renders_the_overlay_to_valid_manifests"


def test_a_table_counts_tests_by_reason_and_names_the_command() -> None:
    reasons = ["no promtool: apt-get install prometheus"] * 2 + ["no kubectl"] * 3 + ["something else"]

    assert list(skips.table(reasons)) == [
        "tests  skipped for     to run them",
        "    3  no kubectl      install kubectl 1.21 or newer",
        "    2  no promtool     apt-get install prometheus",
        "    1  something else",
    ]


def test_a_table_of_nothing_has_no_lines() -> None:
    assert list(skips.table([])) == []


@pytest.mark.parametrize("reason", [browser.missing_programs, lambda: prometheus.missing_program("promtool")])
def test_a_missing_optional_program_is_an_expected_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: object
) -> None:
    assert callable(reason)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert skips.is_expected(str(reason()))


def test_a_missing_mariadb_is_not_expected_and_make_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mariadb, "FETCHED", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")

    reason = mariadb.missing_programs()

    assert not skips.is_expected(reason)
    assert next(line for line in skips.table([reason]) if "MariaDB" in line).endswith("make mariadb")


@pytest.mark.slow
def test_pytest_ends_with_the_table_and_lists_the_skipped_tests(tmp_path: Path) -> None:
    file = tmp_path / "skipped"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", KUBECTL]

    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "SKIPPED_TESTS": str(file)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert "    1  no kubectl   install kubectl 1.21 or newer" in ran.stdout, ran.stdout + ran.stderr
    assert file.read_text(encoding="utf-8") == f"{KUBECTL}\n"
