"""Commands that are ended by signals: what they print, remove and return."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.cli import main
from tests.support.conditions import wait_until


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_export_removes_its_temporary_file(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # a broker that does not answer
        settings = f'[kafka]\nbootstrap_servers = "127.0.0.1:{mute.getsockname()[1]}"\n'
        (tmp_path / "settings.toml").write_text(settings)
        export = subprocess.Popen(
            [sys.executable, "-m", "integr8s_idem", "dlq", "export", "--output", "export.jsonl"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
        )
        assert export.stderr is not None
        with export:
            wait_until(lambda: list(tmp_path.glob(".export.jsonl.*.part")))
            connection, _ = mute.accept()  # its event loop is running: asyncio reports an exit while it is created
            connection.close()
            export.send_signal(number)
            assert export.wait(timeout=60) == 128 + number
            assert export.stderr.read() == b""

    assert [each.name for each in tmp_path.iterdir()] == ["settings.toml"]
