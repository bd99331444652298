"""Without its extra an integration says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from integr8s_idem.errors import ApplicationError


@pytest.mark.parametrize(
    ("extra", "missing"), [("confluent", "confluent_kafka"), ("faststream", "faststream"), ("httpx", "httpx")]
)
def test_an_integration_without_its_package_says_what_to_install(
    extra: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"integr8s_idem.integrations.{extra}"
    for loaded in [each for each in sys.modules if each == name or each.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(ApplicationError, match=rf"{name} needs {missing}; .*pip install '\.\[{extra}\]'"):
        importlib.import_module(name)
