"""Commands that are ended by signals: what they print, remove and return."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from integr8s_idem.cli import main


def test_ctrl_c_while_the_command_is_imported_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "integr8s_idem.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "integr8s_idem.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
