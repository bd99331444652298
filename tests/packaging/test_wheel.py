"""The wheel contains only the library, and works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.packaging.repository import ROOT, files, name_of

LIBRARY = ROOT / "integr8s_idem"

ERRORS = "integr8s_idem/operations/errors.md"
"""The page of the documentation that is part of the wheel, for `integr8s-idem errors`."""

LOOK_AROUND = """
import importlib.machinery, os, integr8s_idem, integr8s_idem.stores.redis, integr8s_idem.worker
print(integr8s_idem.__file__)
print([name for name in integr8s_idem.__all__ if getattr(integr8s_idem, name) is None])
strangers = ("providers", "services", "examples", "tests")
print([name for name in strangers if importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without its dependencies, and return the folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(wheel)]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=100)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder


def run_in(folder: Path, *arguments: str) -> str:
    """Run Python with the wheel and its dependencies, but without `site`, whose `.pth` files lead to the checkout."""
    paths = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    ran = subprocess.run(
        [sys.executable, "-S", "-P", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_the_wheel_contains_the_complete_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert held == {ERRORS, *(name_of(path) for path in files() if LIBRARY in path.parents)}
    stores, page = "integr8s_idem/stores", "integr8s_idem/operations/graphs/page"
    assert {"integr8s_idem/py.typed", f"{stores}/redis/reserve.lua", f"{stores}/sql/version_1.sqlite.sql"} <= held
    assert {f"{page}.css", f"{page}.js"} <= held


def test_the_wheel_contains_the_license_and_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}

        assert archive.read(inside["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        assert (ROOT / "README.md").read_text(encoding="utf-8") in archive.read(inside["METADATA"]).decode()


def test_outside_the_checkout_the_library_is_imported_from_the_wheel(elsewhere: Path) -> None:
    place, missing, strangers = run_in(elsewhere, "-c", LOOK_AROUND, sysconfig.get_path("purelib")).splitlines()

    assert Path(place).parent.parent == elsewhere
    assert (missing, strangers) == ("[]", "[]")


def test_outside_the_checkout_the_first_minute_example_charges_once(elsewhere: Path, tmp_path: Path) -> None:
    program = tmp_path / "first_minute.py"
    program.write_bytes((ROOT / "examples" / "first_minute.py").read_bytes())

    assert run_in(elsewhere, str(program)) == "charging the card\nreceipt-1\nreceipt-1\n"


def test_outside_the_checkout_the_command_explains_errors(elsewhere: Path) -> None:
    text = run_in(elsewhere, "-m", "integr8s_idem", "errors", "docs/reference/errors.md#leaselosterror")

    assert text.startswith("LeaseLostError\n\nA run lost its reservation before it finished")


def test_outside_the_checkout_the_command_prints_its_version(elsewhere: Path) -> None:
    version = next(elsewhere.glob("*.dist-info")).stem.partition("-")[2]

    assert run_in(elsewhere, "-m", "integr8s_idem", "--version") == f"integr8s-idem {version}\n"
