"""Files that are written atomically: links, folders and devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.atomic_file import open_atomically


def test_the_target_of_a_link_is_written_in_its_own_folder(tmp_path: Path) -> None:
    target, link = tmp_path / "data" / "export.jsonl", tmp_path / "link.jsonl"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("data/export.jsonl")

    with open_atomically(link, replace=True) as opened:
        opened.write("new")
        # Next to the target, since the link may point to another file system.
        assert len(list(target.parent.iterdir())) == 2

    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_link_to_another_file_system_is_followed(tmp_path: Path) -> None:
    target, link = Path(f"/dev/shm/integr8s-idem-{os.getpid()}.jsonl"), tmp_path / "link.jsonl"
    if not target.parent.is_dir() or target.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    target.write_text("old")
    link.symlink_to(target)

    try:
        with open_atomically(link, replace=True) as opened:
            opened.write("new")
        assert target.read_text() == "new"
    finally:
        target.unlink()


def test_the_missing_target_of_a_link_is_created(tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to("export.jsonl")

    with open_atomically(link) as opened:
        opened.write("new")

    assert link.is_symlink()
    assert (tmp_path / "export.jsonl").read_text() == "new"


@pytest.mark.parametrize("replace", [False, True])
def test_folders_and_devices_are_refused_before_anything_is_written(tmp_path: Path, replace: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()

    with pytest.raises(ApplicationError, match=r"folder is a folder; name a file in it, such as .*folder/"):
        open_atomically(tmp_path / "folder", replace=replace).__enter__()
    for path in (tmp_path / "pipe", Path("/dev/full")):
        with pytest.raises(ApplicationError, match="not a regular file; to write to a pipe or a device, omit --output"):
            open_atomically(path, replace=replace).__enter__()

    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "folder"}


def test_invalid_paths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")

    for path in (tmp_path / "one", tmp_path / ("x" * 300), tmp_path / ("x" * 250)):
        with pytest.raises(ApplicationError, match="cannot write"):
            open_atomically(path).__enter__()
