"""The built distributions: builds are reproducible, and the base install works."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.packaging.installation import MEGABYTE, make_environment, required_names, sizes
from tests.packaging.repository import ROOT, code_blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "docs/reference/errors.md", "integr8s_idem")
EPOCH = "1767225600"
MOST_PACKAGES, MOST_MEGABYTES = 36, 50

pytestmark = pytest.mark.timeout(300)

RUN_WITH_SPANS_AND_METRICS = """
import asyncio
from prometheus_client import generate_latest
from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import TelemetrySettings
from integr8s_idem.telemetry.setup import configure_telemetry, observer_for

async def main():
    settings = TelemetrySettings(spans="console")
    async with configure_telemetry(settings, service_name="shop"):
        store, observer = MemoryIdempotencyRepository(), observer_for(settings, "shop")
        manager = IdempotencyManager(repository=store, scope="shop", observer=observer)
        await manager.run("order:1", lambda: asyncio.sleep(0, "receipt"))
    print(generate_latest().decode())

asyncio.run(main())
"""


def build(checkout: Path, folder: Path) -> dict[str, Path]:
    """Build the sdist, and the wheel from it; return them by suffix."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(checkout)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def programs(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with only the base install."""
    names = required_names(map(Requirement, PROJECT["dependencies"]), without=PROJECT["name"])
    return make_environment(tmp_path_factory.mktemp("installed") / "base", names, built[".whl"])


def type_in(folder: Path, programs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of that environment, without access to the packages of this one."""
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}", "HOME": str(folder)}
    program = str(programs / command[0])
    return subprocess.run(
        [program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def hashes(files: dict[str, Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.values()}


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def test_another_checkout_builds_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():  # timestamps and permissions are not preserved
            shutil.copytree(source, target, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    shutil.copyfile(ROOT / ".gitignore", copy / ".gitignore")

    assert hashes(build(copy, tmp_path / "dist")) == hashes(built)


def test_an_index_accepts_the_distributions(built: dict[str, Path]) -> None:
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]

    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("PASSED") == 2


def test_the_sdist_contains_the_changelog(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "docs/reference/errors.md"} <= names


def test_the_metadata_has_python_versions_urls_and_extras(built: dict[str, Path]) -> None:
    found = metadata(built[".whl"])
    classifiers = found.get_all("Classifier", [])

    assert found["Version"] == PROJECT["version"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(classifiers)
    addresses = {line.partition(",")[0] for line in found.get_all("Project-URL", [])}
    assert addresses == {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
    assert set(found.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_extra_all_includes_every_extra_except_native_code() -> None:
    """`make setup` installs `all`, and the native code needs a compiler: it is built by `make speedups`."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])

    assert everything.extras == extras.keys() - {"all", "speedups"}


def test_the_readme_lists_every_extra() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| extra | contents |")[2].partition("\n\n")[0]

    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in table] == []


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## {PROJECT['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_base_install_is_small(programs: Path) -> None:
    installed = sizes(programs.parent)

    assert PROJECT["name"] in installed
    assert not {"grpcio", "uvloop", "protobuf", "requests"} & installed.keys()
    assert len(installed) <= MOST_PACKAGES, sorted(installed)
    assert sum(installed.values()) <= MOST_MEGABYTES * MEGABYTE, installed


def test_the_first_snippet_runs_on_the_base_install(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(code_blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")[0])

    ran = type_in(tmp_path, programs, "python", "first.py")

    assert (ran.stdout, ran.stderr) == ("charging the card\nreceipt-1\nreceipt-1\n", "")


def test_the_second_snippet_defines_a_platform_on_the_base_install(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(code_blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")[1])

    checked = type_in(tmp_path, programs, "integr8s-idem", "settings", "check", "--app", "shop:platform")
    drawn = type_in(tmp_path, programs, "integr8s-idem", "graph", "shop:platform")

    assert (checked.returncode, checked.stderr) == (0, "")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert '["Payments"]' in drawn.stdout


def test_the_base_install_can_check_an_application_created_by_new(programs: Path, tmp_path: Path) -> None:
    written = type_in(tmp_path, programs, "integr8s-idem", "new", "shop")
    check = ("integr8s-idem", "settings", "check", "--app", "shop.workers:platform")
    checked = type_in(tmp_path / "shop", programs, *check)

    assert (written.returncode, written.stderr) == (0, "")
    assert "Not installed yet: install the extra" in written.stdout
    assert (checked.returncode, checked.stderr) == (0, "")


def test_spans_and_metrics_work_on_the_base_install(programs: Path, tmp_path: Path) -> None:
    ran = type_in(tmp_path, programs, "python", "-c", RUN_WITH_SPANS_AND_METRICS)

    assert ran.returncode == 0, ran.stderr
    assert '"name": "idempotency.' in ran.stderr
    assert "idempotency_processing_seconds" in ran.stdout


@pytest.mark.parametrize(("protocol", "port"), [("http", 4318), ("grpc", 4317)])
def test_the_base_install_names_the_extra_for_a_collector(
    protocol: str, port: int, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(f'[telemetry]\notlp_endpoint = "http://localhost:{port}"\n')
    (tmp_path / "shop.py").write_text(code_blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")[1])

    for command in (("settings", "check"), ("run", "shop:platform")):
        refused = type_in(tmp_path, programs, "integr8s-idem", *command)

        assert refused.returncode == 2
        assert f'pip install "integr8s-idem[otlp-{protocol}]"' in refused.stderr
