"""Loading the native code, and saying which code is used."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from integr8s_idem._util import speedups
from integr8s_idem._util.speedups import INTERFACE, MODULE, VARIABLE, load
from integr8s_idem.config import Settings
from integr8s_idem.diagnostics import Severity
from integr8s_idem.doctor.speedups_check import check_speedups


def module(**attributes: Any) -> ModuleType:
    made = ModuleType(MODULE)
    made.__dict__.update(attributes)
    return made


class Unloadable:
    """A finder whose module cannot be loaded, like a library that was built for another platform."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == MODULE:
            raise self.error


def test_python_code_is_used_if_the_distribution_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    missing = Unloadable(ModuleNotFoundError("No module", name=MODULE))
    monkeypatch.setattr(sys, "meta_path", [missing, *sys.meta_path])

    loaded = load()

    assert (loaded.native, loaded.problem) == (None, "")
    assert loaded.description == "not used: integr8s-idem-speedups is not installed"
    assert check_speedups(loaded).severity is Severity.INFO


def test_native_code_with_the_same_interface_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native = module(INTERFACE=INTERFACE, __version__="0.2.0")
    monkeypatch.setitem(sys.modules, MODULE, native)
    monkeypatch.delenv(VARIABLE, raising=False)

    loaded = load()

    assert loaded.native is native
    finding = check_speedups(loaded)
    assert (finding.code.value, finding.severity) == ("speedups-seen", Severity.INFO)
    assert finding.what == "used (integr8s-idem-speedups 0.2.0)"


@pytest.mark.parametrize("off", ["off", "OFF", "false", "no", "0"])
def test_native_code_can_be_disabled(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, module(INTERFACE=INTERFACE, __version__="0.2.0"))
    monkeypatch.setenv(VARIABLE, off)

    assert load() == (None, f"not used: INTEGR8S_IDEM_SPEEDUPS={off}", "", "")
    assert Settings() is not None, "the variable is not a setting"


def test_a_value_that_is_neither_on_nor_off_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, module(INTERFACE=INTERFACE, __version__="0.2.0"))
    monkeypatch.setenv(VARIABLE, "disabled")

    loaded = load()

    assert loaded.native is None
    finding = check_speedups(loaded)
    assert finding.severity is Severity.WARNING
    assert "INTEGR8S_IDEM_SPEEDUPS is 'disabled', which is neither on nor off" in finding.what
    assert finding.remedy == "set INTEGR8S_IDEM_SPEEDUPS to on or off, or remove it"


def test_native_code_with_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, module(INTERFACE=INTERFACE + 1, __version__="9"))
    monkeypatch.delenv(VARIABLE, raising=False)

    loaded = load()

    assert loaded.native is None
    finding = check_speedups(loaded)
    assert (finding.code.value, finding.severity) == ("speedups-unusable", Severity.WARNING)
    assert f"it has interface {INTERFACE + 1}, but this version of integr8s-idem needs {INTERFACE}" in finding.what
    assert finding.remedy


@pytest.mark.parametrize("error", [ImportError("wrong ELF class"), ModuleNotFoundError("no x", name="x")])
def test_native_code_that_cannot_be_loaded_is_reported(error: ImportError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Unloadable(error), *sys.meta_path])

    loaded = load()

    assert loaded.native is None
    assert loaded.problem == str(error)


def test_the_module_in_use_is_the_loaded_one() -> None:
    assert speedups.native is speedups.LOADED.native
