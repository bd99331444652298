"""The browser for tests renders pages, reports their errors, has no network, and leaves no processes or files."""

from __future__ import annotations

import struct
from pathlib import Path

import psutil
import pytest

from tests.support.browser import Browser, missing_programs

PAGE = """<!doctype html><html lang="en"><title>A page</title><link rel="icon" href="data:,">
<style>body, p { margin: 0 } body { height: 2000px }
@media (prefers-color-scheme: dark) { body { color: rgb(1, 2, 3) } }</style>
<p>Hello</p>%s</html>"""


def page(folder: Path, more: str = "") -> Path:
    """Write a page 2000 pixels high that contains `more`."""
    file = folder / "page.html"
    file.write_text(PAGE % more)
    return file


def size(image: Path) -> tuple[int, int]:
    """Return the size of a PNG file from its header."""
    width, height = struct.unpack(">II", image.read_bytes()[16:24])
    return width, height


def test_a_screenshot_has_the_requested_width_and_the_height_of_the_page(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path))

    browser.screenshot(tmp_path / "whole.png", width=400)
    browser.screenshot(tmp_path / "seen.png", whole=False)

    assert browser.driver.title == "A page"
    assert size(tmp_path / "whole.png") == (400, 2000)
    assert size(tmp_path / "seen.png") == (400, 900)
    assert browser.errors() == []


def test_an_error_on_a_page_is_reported_once(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, "<script>nobody.knows()</script>"))

    (error,) = browser.errors()
    assert "nobody is not defined" in error
    assert browser.errors() == []


def test_the_browser_has_no_access_to_other_hosts(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, '<img src="http://elsewhere.example/image.png" alt="">'))

    assert browser.requests() == [(tmp_path / "page.html").as_uri(), "http://elsewhere.example/image.png"]
    (error,) = browser.errors()
    assert "ERR_NAME_NOT_RESOLVED" in error


def test_the_preferred_color_scheme_is_applied(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path))
    light = browser.script("return getComputedStyle(document.body).color")

    browser.prefer("dark")

    assert (light, browser.script("return getComputedStyle(document.body).color")) == ("rgb(0, 0, 0)", "rgb(1, 2, 3)")


@pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())
def test_a_stopped_browser_leaves_no_processes_or_files() -> None:
    with Browser() as browser:
        driver = psutil.Process(browser.driver.service.process.pid)
        processes = [driver, *driver.children(recursive=True)]
        folder = browser._folder
        assert any("chrom" in process.name() for process in processes[1:])

    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert not folder.exists()
