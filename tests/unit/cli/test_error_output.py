"""What becomes of the errors of a command."""

from __future__ import annotations

import errno
import os
from typing import Never

import pytest

from integr8s_idem.cli.common import FAILURE, answered


def raising(error: BaseException) -> Never:
    raise error


@pytest.fixture(autouse=True)
def _output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard output of this process is not ours to turn away."""
    monkeypatch.setattr("integr8s_idem.cli.common.drop_output", lambda: None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_place_that_is_full_is_named(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    why = os.strerror(number)

    assert answered(lambda: raising(OSError(number, why, "export.jsonl"))) == FAILURE
    assert capsys.readouterr().err == f"export.jsonl: {why}: nothing more can be written\n"


def test_another_error_of_the_system_is_not_swallowed() -> None:
    with pytest.raises(OSError, match="Input/output"):
        answered(lambda: raising(OSError(errno.EIO, os.strerror(errno.EIO))))
