"""Audit lines before and after a change."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.audit import audit_file, audited, store_place


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_change_writes_two_lines_with_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"

    with audited("keys purge", {"service": ["billing"]}, str(file)) as entry:
        assert [line["says"] for line in lines(file)] == ["begun"]
        entry.counts["records"] = 3

    first, last = lines(file)
    assert (first["says"], last["says"]) == ("begun", "ended")
    assert first["run"] == last["run"]
    assert (last["command"], last["asked"], last["counts"]) == ("keys purge", {"service": ["billing"]}, {"records": 3})
    assert last["user"]
    assert last["host"]


def test_the_file_is_readable_only_by_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new" / "state"))
    before = os.umask(0)
    try:
        with audited("keys purge", {}):
            pass
    finally:
        os.umask(before)

    file = audit_file()
    assert file == tmp_path / "new" / "state" / "integr8s-idem" / "audit.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in list(file.parents)[:3]] == [0o700] * 3


def test_a_relative_state_directory_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert audit_file() == tmp_path / ".local" / "state" / "integr8s-idem" / "audit.jsonl"


def test_nothing_is_changed_if_the_first_line_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="nothing was changed: cannot write the audit line"):
        purged(tmp_path, error=AssertionError("it was done"))


def purged(file: Path, *, spoiled: bool = False, error: BaseException | None = None) -> None:
    """A command that counts three records; its file is spoiled meanwhile."""
    with audited("keys purge", {}, str(file)) as entry:
        entry.counts["records"] = 3
        if spoiled:
            file.unlink()
            file.mkdir()
        if error is not None:
            raise error


def test_a_failure_to_write_the_last_line_is_reported_with_the_counts(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r'the command succeeded, but .* \{"records": 3\}'):
        purged(tmp_path / "audit.jsonl", spoiled=True)


def test_the_original_error_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the work") as caught:
        purged(tmp_path / "audit.jsonl", spoiled=True, error=ValueError("the work"))

    assert "the audit line cannot be written" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "says"), [(ValueError("no"), "failed: ValueError: no"), (KeyboardInterrupt(), "interrupted")]
)
def test_the_last_line_contains_the_result(tmp_path: Path, error: BaseException, says: str) -> None:
    file = tmp_path / "audit.jsonl"
    with pytest.raises(type(error)):
        purged(file, error=error)

    assert [(line["says"], line.get("counts")) for line in lines(file)] == [("begun", None), (says, {"records": 3})]


def test_lines_can_be_written_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with audited("keys purge", {"keys": ["ü\n"]}, "-"):
        pass

    result = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["says"] for line in result] == ["begun", "ended"]
    assert json.loads(result[0])["asked"] == {"keys": ["ü\n"]}


def test_a_partial_line_is_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "audit.jsonl"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda to, line: write(to, line[:10]))
        with pytest.raises(ApplicationError, match="only 10 of"):
            purged(file)

    purged(file)

    assert [json.loads(line)["says"] for line in file.read_text().splitlines()[1:]] == ["begun", "ended"]


def test_the_user_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "audit.jsonl"
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("SUDO_USER", "anna")

    with audited("keys purge", {}, str(file)):
        pass

    assert lines(file)[0]["user"] != "somebody-else"
    assert lines(file)[0]["sudo_user"] == "anna"


def test_the_store_is_recorded_without_credentials() -> None:
    url = "redis://idem:secret@redis.example:6379/3"
    settings = Settings.model_validate({"store": {"kind": "redis", "url": url, "password": "other"}})

    result = store_place(settings)

    assert result == {"kind": "redis", "url": "redis://***@redis.example:6379/3", "key_prefix": "idempotency"}
