"""Audit lines: before a change and behind it, whatever happens."""

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


def test_a_change_leaves_two_lines_of_one_run(tmp_path: Path) -> None:
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


def test_it_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_relative_folder_for_state_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert audit_file() == tmp_path / ".local" / "state" / "integr8s-idem" / "audit.jsonl"


def test_nothing_is_done_that_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="nothing was changed: no audit line can be written"):
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


def test_that_the_last_line_cannot_be_written_is_told_with_what_it_would_say(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r'it was done, but .* \{"records": 3\}'):
        purged(tmp_path / "audit.jsonl", spoiled=True)


def test_what_went_wrong_first_is_what_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the work") as caught:
        purged(tmp_path / "audit.jsonl", spoiled=True, error=ValueError("the work"))

    assert "no audit line can be written" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "says"), [(ValueError("no"), "failed: ValueError: no"), (KeyboardInterrupt(), "interrupted")]
)
def test_how_it_ended_is_told(tmp_path: Path, error: BaseException, says: str) -> None:
    file = tmp_path / "audit.jsonl"
    with pytest.raises(type(error)):
        purged(file, error=error)

    assert [(line["says"], line.get("counts")) for line in lines(file)] == [("begun", None), (says, {"records": 3})]


def test_lines_for_standard_error_go_there(capsys: pytest.CaptureFixture[str]) -> None:
    with audited("keys purge", {"keys": ["ü\n"]}, "-"):
        pass

    told = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["says"] for line in told] == ["begun", "ended"]
    assert json.loads(told[0])["asked"] == {"keys": ["ü\n"]}


def test_a_line_that_was_cut_short_is_no_part_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "audit.jsonl"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda to, line: write(to, line[:10]))
        with pytest.raises(ApplicationError, match="only 10 of"):
            purged(file)

    purged(file)

    assert [json.loads(line)["says"] for line in file.read_text().splitlines()[1:]] == ["begun", "ended"]


def test_who_it_was_is_asked_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "audit.jsonl"
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("SUDO_USER", "anna")

    with audited("keys purge", {}, str(file)):
        pass

    assert lines(file)[0]["user"] != "somebody-else"
    assert lines(file)[0]["sudo_user"] == "anna"


def test_a_store_is_told_without_its_credentials() -> None:
    url = "redis://idem:secret@redis.example:6379/3"
    settings = Settings.model_validate({"store": {"kind": "redis", "url": url, "password": "other"}})

    told = store_place(settings)

    assert told == {"kind": "redis", "url": "redis://***@redis.example:6379/3", "key_prefix": "idempotency"}
