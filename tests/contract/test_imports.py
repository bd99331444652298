"""Importing the test kit imports neither pytest nor hypothesis before the contract suite is used."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
import integr8s_idem.testing, integr8s_idem.testing.reference_model
heavy = {"pytest", "hypothesis"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_test_kit_needs_neither_pytest_nor_hypothesis() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
