"""Errors of commands, as printed on standard error."""

from __future__ import annotations

import errno
import os
from typing import Never

import pytest

from integr8s_idem.cli.common import FAILURE, exit_status_of


def raising(error: BaseException) -> Never:
    raise error


@pytest.fixture(autouse=True)
def _output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the standard output of the test process."""
    monkeypatch.setattr("integr8s_idem.cli.common.drop_output", lambda: None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_with_the_file(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    reason = os.strerror(number)

    assert exit_status_of(lambda: raising(OSError(number, reason, "export.jsonl"))) == FAILURE
    assert capsys.readouterr().err == f"export.jsonl: {reason}\n"


def test_other_operating_system_errors_are_raised() -> None:
    with pytest.raises(OSError, match="Input/output"):
        exit_status_of(lambda: raising(OSError(errno.EIO, os.strerror(errno.EIO))))
