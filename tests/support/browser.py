"""A real browser without a window: Debian's Chromium, driven by its own chromedriver, stopped by quitting it.

    def test_a_page(browser):
        browser.open(tmp_path / "page.html")
        browser.screenshot(tmp_path / "page.png", width=400)
        assert browser.errors() == []

Starting takes about two seconds; nothing of it survives a stop.  It reaches 127.0.0.1 and files, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

WIDTH: Final = 1280
HEIGHT: Final = 900
"""CSS pixels of the page that is seen, if a test does not say otherwise."""
_PAGE_SECONDS: Final = 30
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # root may not have one
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
Colours: TypeAlias = Literal["light", "dark"]
_FAVICON: Final = "/favicon.ico"


def missing_programs() -> str:
    """Why no browser can be started here; empty if one can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}: apt-get install chromium chromium-driver" if missing else ""


class Browser:
    """One browser with one page.  All methods block.

    `driver` is selenium's own, for whatever is not here: finding elements, clicking, running scripts.
    """

    def __init__(self) -> None:
        self._folder = Path()

    def start(self) -> None:
        """Start it, with a profile of its own."""
        self._folder = Path(tempfile.mkdtemp(prefix="idem-browser-"))
        try:
            self.driver = Chrome(options=self._options(), service=self._service())
            self.driver.set_page_load_timeout(_PAGE_SECONDS)
            self.resize()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def stop(self) -> None:
        """End it, and forget its profile."""
        try:
            self.driver.quit()
        finally:
            # It may still be writing its last file: what is left is temporary, and nobody's business.
            shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, page: str | Path) -> None:
        """Load a page, by address or from a file, wait until it has loaded, and forget errors of pages before."""
        self._forget()
        self.driver.get(page.absolute().as_uri() if isinstance(page, Path) else page)

    def screenshot(self, path: Path, *, width: int | None = None, whole: bool = True) -> None:
        """Draw the page into a PNG file.

        Args:
            width: Of the page, in CSS pixels, from now on.
            whole: All of its height; otherwise what is seen without scrolling.
        """
        if width is not None:
            self.resize(width)
        if not whole:
            self.driver.save_screenshot(str(path))
            return
        height = int(self.script("return Math.ceil(document.documentElement.scrollHeight)"))
        before = int(self.script("return window.innerHeight"))
        self.resize(int(self.script("return window.innerWidth")), max(height, 1))
        self.driver.save_screenshot(str(path))
        self.resize(int(self.script("return window.innerWidth")), before)

    def resize(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Give the page so many CSS pixels, fewer than a window can have included."""
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, colours: Colours) -> None:
        """Whether its user likes pages light or dark."""
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])

    def errors(self) -> list[str]:
        """What the console said of the page since it was opened, or since this was last asked: errors and warnings."""
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        # A browser looks for a site's icon by itself.
        return [entry["message"] for entry in log if not entry["message"].split(" ")[0].endswith(_FAVICON)]

    def requests(self) -> list[str]:
        """What was asked for since the page was opened, or since this was last asked: addresses, the page's first."""
        log = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in log]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        addresses = [message["params"]["request"]["url"] for message in sent]
        return [address for address in addresses if not address.endswith(_FAVICON)]

    def script(self, text: str, *arguments: Any) -> Any:
        """What a JavaScript function of this body returns."""
        return self.driver.execute_script(text, *arguments)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _options(self) -> ChromeOptions:
        options = ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*_FLAGS, f"--user-data-dir={self._folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "WARNING", "performance": "ALL"})
        return options

    def _service(self) -> ChromeService:
        # Named, since selenium would otherwise look for one on the network.
        return ChromeService(
            shutil.which("chromedriver"),
            # What a profile leaves outside of its folder.
            env={**os.environ, "HOME": str(self._folder), "TMPDIR": str(self._folder)},
            # Of its own: Ctrl-C at the tests must not end it before its client.
            popen_kw={"start_new_session": True},
        )

    def _command(self, name: str, **arguments: Any) -> None:
        self.driver.execute_cdp_cmd(name, arguments)

    def _forget(self) -> None:
        self.errors()
        self.requests()


@pytest.fixture(scope="session")
def _running_browser() -> Iterator[Browser]:
    if why := missing_programs():
        pytest.skip(why)
    with Browser() as running:
        yield running


@pytest.fixture
def browser(_running_browser: Browser) -> Iterator[Browser]:
    """One browser for all tests, as if new: an empty page of the usual size, in light colors."""
    _running_browser.open("about:blank")
    _running_browser.resize()
    _running_browser.prefer("light")
    yield _running_browser
    # What a page's script is still doing ends with its test.
    _running_browser.open("about:blank")
