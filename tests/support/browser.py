"""A real headless browser: Debian's Chromium, driven by its chromedriver.

    def test_a_page(browser):
        browser.open(tmp_path / "page.html")
        browser.screenshot(tmp_path / "page.png", width=400)
        assert browser.errors() == []

Starting takes about two seconds. Its profile is deleted when it stops. It can only load files and pages of 127.0.0.1.
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
"""Default size of the window in CSS pixels."""
_PAGE_SECONDS: Final = 30
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # not available to root
    "--disable-gpu",
    "--disable-dev-shm-usage",  # too small in containers
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
    """Return why no browser can be started here; empty if one can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}: apt-get install chromium chromium-driver" if missing else ""


class Browser:
    """A browser with one page. All methods block.

    `driver` is the selenium driver, for everything else: finding elements, clicking, running scripts.
    """

    def __init__(self) -> None:
        self._folder = Path()

    def start(self) -> None:
        """Start the browser with a temporary profile."""
        self._folder = Path(tempfile.mkdtemp(prefix="idem-browser-"))
        try:
            self.driver = Chrome(options=self._options(), service=self._service())
            self.driver.set_page_load_timeout(_PAGE_SECONDS)
            self.resize()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def stop(self) -> None:
        """Quit the browser and delete its profile."""
        try:
            self.driver.quit()
        finally:
            # It may still be writing a file; leftovers in the temporary folder do no harm.
            shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, page: str | Path) -> None:
        """Load a page from an address or file, wait until it has loaded, and discard earlier errors."""
        self._forget()
        self.driver.get(page.absolute().as_uri() if isinstance(page, Path) else page)

    def screenshot(self, path: Path, *, width: int | None = None, whole: bool = True) -> None:
        """Write a screenshot of the page to a PNG file.

        Args:
            width: New width of the page in CSS pixels.
            whole: Include the whole height; otherwise only the visible part.
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
        """Set the size of the page in CSS pixels; it can be smaller than the minimum size of a window."""
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, colours: Colours) -> None:
        """Set the preferred color scheme of the user."""
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])

    def errors(self) -> list[str]:
        """Return console errors and warnings since the page was opened or since the last call."""
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        # The browser requests the favicon on its own.
        return [entry["message"] for entry in log if not entry["message"].split(" ")[0].endswith(_FAVICON)]

    def requests(self) -> list[str]:
        """Return the requested addresses since the page was opened or since the last call, the page first."""
        log = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in log]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        addresses = [message["params"]["request"]["url"] for message in sent]
        return [address for address in addresses if not address.endswith(_FAVICON)]

    def script(self, text: str, *arguments: Any) -> Any:
        """Run `text` as the body of a JavaScript function, and return its result."""
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
        # Without this path selenium would look for a driver on the network.
        return ChromeService(
            shutil.which("chromedriver"),
            # For files that the browser writes outside its profile.
            env={**os.environ, "HOME": str(self._folder), "TMPDIR": str(self._folder)},
            # A process group of its own: Ctrl-C in the tests must not end it before its client.
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
    """Return the shared browser, reset to an empty page of default size in light colors."""
    _running_browser.open("about:blank")
    _running_browser.resize()
    _running_browser.prefer("light")
    yield _running_browser
    # Stop scripts of the page at the end of the test.
    _running_browser.open("about:blank")
