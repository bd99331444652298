"""The README's instructions for new users, line by line, with the built wheel in a virtual environment.

The checkout is not on the path, and the commands are exactly those of the README. Only the metrics port is a free one,
and the worker is stopped by SIGINT instead of Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.repository import ROOT, code_blocks, files, section
from tests.support.conditions import eventually
from tests.support.ports import reserve_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
(INSTALL,) = code_blocks(section(README, "Install"), "sh")
BEGIN, LOOK = code_blocks(section(README, "Quickstart"), "sh")
INSTALLING_SECONDS = 300


@dataclass
class Newcomer:
    """A new user with a shell in which the virtual environment is active."""

    home: Path
    environment: dict[str, str]

    def types(self, lines: str, folder: Path, seconds: float = 100) -> str:
        """Run commands that must all succeed, and return their output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def terminal(self, line: str, folder: Path, seen: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in another terminal, and write its output to `seen`."""
        with seen.open("wb") as shown:
            running = subprocess.Popen(
                line.split(), cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=shown, stderr=shown
            )
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()
            running.wait()


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    """Create a user with an empty home, and with Python but without this project on all paths."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    programs = [tmp_path / "idem" / "bin", Path(sys.base_prefix) / "bin", Path("/usr/bin"), Path("/bin")]
    return Newcomer(
        tmp_path,
        {
            "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"),
            **passed,
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
            "PATH": os.pathsep.join(map(str, programs)),
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "INTEGR8S_IDEM_TELEMETRY__METRICS_PORT": str(reserve_port()),
        },
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the checkout, without generated files."""
    folder = tmp_path / "checkout"
    for file in files():
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    return folder


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_a_newcomer_sees_a_duplicate_blocked_and_explained(newcomer: Newcomer, checkout: Path) -> None:
    copied = _files(checkout)
    newcomer.types(INSTALL, checkout, INSTALLING_SECONDS)
    assert _files(checkout) == copied, "the commands wrote to the checkout"
    *prepare, run = BEGIN.strip().splitlines()
    assert "passed" in newcomer.types("\n".join(prepare), newcomer.home)
    shop, seen = newcomer.home / "shop", newcomer.home / "seen.txt"

    def counted() -> list[int]:
        snapshot = json.loads(newcomer.types("integr8s-idem top --once --json", shop))
        return [snapshot["total"][name] for name in ("handled", "duplicates_blocked")]

    with newcomer.terminal(run, shop, seen) as worker:
        await eventually(lambda: "with --embedded" in seen.read_text(), state=seen.read_text)
        place, *look = LOOK.strip().splitlines()
        placed = newcomer.types(place, shop)
        await eventually(lambda: counted() == [1, 1], state=seen.read_text)
        looked = newcomer.types("\n".join(look), shop)
        (explain,) = re.findall(r"integr8s-idem keys explain .*", placed)
        explained = newcomer.types(explain, shop)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 0, seen.read_text()

    event_id = explain.split()[3].partition(":")[2]
    assert event_id in looked
    assert "completed" in explained
    assert "billing" in explained


def test_the_readme_uses_one_environment_outside_the_checkout() -> None:
    """Everything is installed in `~/idem` and used from there; the checkout is only read."""
    activations = set(re.findall(r"[\w~./]*/bin/activate", README))

    assert activations == {"~/idem/bin/activate"}
    assert ".venv/bin" not in README
    assert "--wheel-dir ~/" in INSTALL
    assert "dist/" not in INSTALL
