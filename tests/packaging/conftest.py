"""What tests of texts and sources need."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_of_other_tests() -> None:
    """What they left to the garbage collector is gone before sources are parsed.

    A collection within `ast.parse` may log a traceback, which parses as well: Python 3.11 then ends the outer one with
    a SystemError (python/cpython#106905).
    """
    gc.collect()
