"""The tests on the page about testing handlers pass, and fail where the page says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from integr8s_idem.testing.faults import FAULTS
from tests.packaging.repository import ROOT, code_blocks
from tests.support.pytest_options import WITHOUT_PLUGINS

PAGE = (ROOT / "docs" / "how-to" / "test-your-handlers.md").read_text(encoding="utf-8")
OPTIONS = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error", "-q")


def write(folder: Path) -> None:
    """Write the files of the page; the first line of each block names its file."""
    for block in code_blocks(PAGE, "python"):
        name, _, text = block.partition("\n")
        with (folder / name.removeprefix("# ")).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")
    (folder / "settings.toml").write_bytes((ROOT / "examples" / "billing" / "settings.toml").read_bytes())


def test_the_tests_on_the_page_pass_and_fail_for_an_unguarded_handler(tmp_path: Path) -> None:
    write(tmp_path)
    conftest = (tmp_path / "conftest.py").read_text(encoding="utf-8")
    careless = tmp_path / "careless"
    careless.mkdir()
    (careless / "conftest.py").write_text(conftest.replace("if idempotency_key not in self.receipts:", "if True:"))
    (careless / "settings.toml").write_bytes((tmp_path / "settings.toml").read_bytes())
    charging = (tmp_path / "test_charging.py").read_text(encoding="utf-8")
    (careless / "test_charging.py").write_text(charging)

    printed = "    assert [first.outcome, duplicate.outcome]"
    assert charging.count(printed) == 1
    [tree] = [text.strip() for text in code_blocks(PAGE, "text") if text.startswith("process ")]
    compared = charging.replace(printed, f"    assert spans.tree() == {tree!r}\n{printed}")
    (tmp_path / "test_charging.py").write_text(compared, encoding="utf-8")

    passed = run(tmp_path, "test_charging.py", "test_generated.py", "test_bookings.py", "test_sockets.py")
    failed = run(careless, "-k", "after_the_charge or redelivery_charges")

    assert f"{11 + len(FAULTS)} passed" in passed
    assert "1 failed, 1 passed" in failed
    assert "assert ['1', '1'] == ['1']" in failed


def run(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *WITHOUT_PLUGINS, *OPTIONS, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    return ran.stdout


def test_the_page_states_the_number_of_faults() -> None:
    assert len(FAULTS) == 18
    assert "`fault` makes this eighteen tests" in PAGE
