"""The repository contains no registry address, and pins every package that it installs."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.packaging.installation import required_names
from tests.packaging.repository import ROOT, files, name_of

# Split up, so that this file does not contain the names itself.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"), ("yarnpkg", "com"),
        ("crates", "io"), ("proxy", "golang", "org"), ("maven", "org"), ("maven", "apache", "org"),
        ("rubygems", "org"), ("anaconda", "org"), ("jfrog", "io"),
    )
]  # fmt: skip
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text_of(path: Path) -> str | None:
    """Return the text of a file, or `None` if it is binary."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def requirements() -> list[Requirement]:
    """Return the requirements in pyproject.toml: runtime, extras, development, benchmarks and build."""
    project = PROJECT["project"]
    groups = PROJECT["dependency-groups"].values()
    # The extra `speedups` names a distribution of this repository.
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "speedups"}
    lists = [project["dependencies"], *extras.values(), *groups]
    return [Requirement(line) for line in sum(lists, start=list(PROJECT["build-system"]["requires"]))]


def installed_packages() -> set[str]:
    """Return the names of all packages that these requirements install."""
    return required_names(requirements(), without=PROJECT["project"]["name"])


@pytest.mark.parametrize("host", REGISTRIES)
def test_no_file_names_a_package_registry(host: str) -> None:
    named = re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])")

    assert [name_of(path) for path in files() if named.search(text_of(path) or "")] == []


def test_constraints_are_pinned_names_without_urls() -> None:
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.+!]*", line)] == []


def test_constraints_pin_every_installed_package() -> None:
    pinned = {canonicalize_name(line.partition("==")[0]) for line in CONSTRAINTS}

    assert installed_packages() - pinned == set()


def test_pinned_versions_satisfy_pyproject() -> None:
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in CONSTRAINTS)}

    for requirement in requirements():
        if requirement.name != PROJECT["project"]["name"]:
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_pinned_packages_install_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2: a pin that needs 3.11.5 stops `make setup` there."""
    metadata = {name: distribution(name).metadata for name in installed_packages()}
    requires = {name: each["Requires-Python"] for name, each in metadata.items() if "Requires-Python" in each}

    refused = {name: spec for name, spec in requires.items() if not SpecifierSet(spec).contains("3.11.0")}

    assert refused == {}


def test_compose_servers_use_loopback_and_redis_persists_without_eviction() -> None:
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    published = re.findall(r'^ +- "?([\d.:]+)"?$', compose, re.MULTILINE)

    assert published == ["127.0.0.1:9092:9092", "127.0.0.1:6379:6379"]
    assert re.findall(r'"--(appendonly|maxmemory-policy)", "(\w+)"', compose) == [
        ("appendonly", "yes"),
        ("maxmemory-policy", "noeviction"),
    ]
