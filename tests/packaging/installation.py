"""Measure an installation: `python -m tests.packaging.installation VENV` prints its packages and their sizes.

The files that pip installed are counted, without pip, setuptools and compiled bytecode.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_COUNTED: Final = {"pip", "setuptools"}
MEGABYTE: Final = 1_000_000


def required_names(requirements: Iterable[Requirement], *, without: str) -> set[str]:
    """Return the names of all packages that `requirements` install here, except the project `without`."""
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen and name != without:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in distribution(name).requires or ()]
    return {name for name, _ in seen}


def make_environment(folder: Path, names: Iterable[str], wheel: Path) -> Path:
    """Create a virtual environment with `wheel` and copies of the packages `names`, without a package index.

    Returns:
        The folder with its programs.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    packages = site_packages(folder)
    for name in names:
        _copy(distribution(name), packages)
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=100)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder / "bin"


def site_packages(environment: Path) -> Path:
    """Return the folder that packages are installed into."""
    return next(environment.glob("lib/python*/site-packages"))


def sizes(environment: Path) -> dict[str, int]:
    """Return the size in bytes of each package in an environment."""
    found = distributions(path=[str(site_packages(environment))])
    named = {canonicalize_name(each.name): each for each in found}
    return {name: _size(each) for name, each in sorted(named.items()) if name not in NOT_COUNTED}


def _copy(package: Distribution, folder: Path) -> None:
    for file in package.files or ():
        # Scripts are outside the package folder, and their first line names the Python of this environment.
        if ".." not in file.parts and file.suffix != ".pyc":
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


def _size(package: Distribution) -> int:
    paths = [Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.exists())


def main(environment: Path) -> None:
    counted = sizes(environment)
    for name, size in sorted(counted.items(), key=lambda each: -each[1]):
        print(f"{size / MEGABYTE:8.2f} MB  {name}")
    print(f"{len(counted)} packages, {sum(counted.values()) / MEGABYTE:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
