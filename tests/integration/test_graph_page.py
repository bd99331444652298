"""Graphs of the applications in this repository, and the page in a browser."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

import providers
from examples.billing.workers import platform as billing
from integr8s_idem import Platform
from integr8s_idem.config import load_settings
from integr8s_idem.operations.graphs import ServiceGraph, make_graphs
from integr8s_idem.operations.graphs.page import as_page
from tests.support.browser import Browser, Colours

CONTRAST: Final = """
// Find the visible text with the least contrast, by the formula of WCAG 2.
const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
let least = [99, ""];
for (const element of document.querySelectorAll("body *:not(script):not(style)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility()) continue;
  let below = element;
  while ((colour(getComputedStyle(below).backgroundColor)[3] ?? 1) === 0) below = below.parentElement;
  const pair = [colour(getComputedStyle(element).color), colour(getComputedStyle(below).backgroundColor)].map(light);
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (ratio < least[0]) least = [ratio, element.outerHTML.slice(0, 120)];
}
return least;
"""
HIGHLIGHTED: Final = """
const name = (part) => part.querySelector("button").textContent;
return Object.fromEntries(["is-chosen", "is-needed", "asks"].map((kind) =>
  [kind, [...document.querySelectorAll(".part." + kind)].map(name).sort()]));
"""


def graphs_of(platform: Platform, overrides: dict[str, Any] | None = None) -> list[ServiceGraph]:
    settings = load_settings(Path("/dev/null"), platform.settings_type, overrides=overrides)
    return asyncio.run(make_graphs(platform, settings))


def test_the_graphs_show_the_dispatcher_of_each_service() -> None:
    found = {
        graph.name: (
            graph.dispatcher.type,
            graph.dispatcher.strategy,
            graph.dispatcher.ttl_seconds,
            graph.dispatcher.store,
        )
        for graph in graphs_of(providers.platform)
    }

    assert found == {
        "coordinator": ("IdempotentEventDispatcher", "event_based", 7_200, "redis"),
        "k8s-worker": ("IdempotentEventDispatcher", "content_hash of execution_id, saga_id", 3_600, "redis"),
        "result-processor": ("IdempotentEventDispatcher", "content_hash of execution_id", 7_200, "redis"),
        "saga-orchestrator": ("EventDispatcher", None, None, None),
    }


def test_a_store_in_the_database_of_the_platform_makes_the_results_transactional(tmp_path: Path) -> None:
    file = str(tmp_path / "platform.db")
    overrides = {
        "store": {"kind": "sqlite", "path": file},
        "platform": {"database_url": f"sqlite+aiosqlite:///{file}"},
    }

    found = {graph.name: graph.dispatcher.is_transactional for graph in graphs_of(providers.platform, overrides)}

    assert found == {
        "coordinator": False,
        "k8s-worker": False,
        "result-processor": True,
        "saga-orchestrator": False,
    }
    assert list(tmp_path.iterdir()) == []  # nothing was opened


def test_in_the_billing_example_billing_is_guarded_and_audit_is_not() -> None:
    found = {graph.name: (graph.dispatcher.is_idempotent, graph.dispatcher.ttl_seconds) for graph in graphs_of(billing)}

    assert found == {"billing": (True, 691_200), "audit": (False, None)}


def test_making_graphs_opens_no_connections() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        graphs_of(billing, {"kafka": {"bootstrap_servers": address}, "store": {"url": f"redis://{address}/0"}})

        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the page of the platform and return its address."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "graph.html").write_text(as_page(graphs_of(providers.platform), "providers:platform"), encoding="utf-8")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/graph.html"
        server.shutdown()
        serving.join()


def button(browser: Browser, service: int, name: str) -> Any:
    """Return the button of a component."""
    (match,) = [
        each
        for each in browser.driver.find_elements(By.CSS_SELECTOR, f"#service-{service} .part button")
        if each.text == name
    ]
    return match


def test_the_page_loads_no_other_resources_and_has_no_errors(browser: Browser, address: str) -> None:
    browser.open(address)

    assert browser.requests() == [address]
    assert browser.errors() == []
    rows = browser.script(
        "return [...document.querySelectorAll('tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.innerText))"
    )
    assert [row[:4] for row in rows] == [
        ["coordinator", "idempotent", "event_based", "2 hours"],
        ["k8s-worker", "idempotent", "content_hash of execution_id, saga_id", "1 hour"],
        ["result-processor", "idempotent", "content_hash of execution_id", "2 hours"],
        ["saga-orchestrator", "plain", "no keys", "not at all"],
    ]
    assert rows[1][4].splitlines() == [
        "create_pod ← create_pod_command",
        "if it fails: retry_later(NoCapacityError, attempts=1000, delay=5)",
        "delete_pod ← delete_pod_command",
    ]


def test_focusing_a_component_highlights_its_dependencies_and_dependents(browser: Browser, address: str) -> None:
    browser.open(address)
    manager = button(browser, 1, "IdempotencyManager")

    browser.script("arguments[0].focus()", manager)

    assert browser.script(HIGHLIGHTED) == {
        "is-chosen": ["IdempotencyManager"],
        "is-needed": ["IdempotencyConfig", "IdempotencyRepository", "Observer", "ServiceName", "Settings"],
        "asks": ["EventDispatcher", "Steps", "TransactionResources"],
    }
    # Four direct dependencies, and the dependencies of three of them.
    assert browser.script("return document.querySelectorAll('#service-1 .wires path.needs').length") == 4 + 2 + 2 + 2
    assert browser.script("return document.querySelectorAll('#service-1 .wires path.asks').length") == 3

    browser.script("arguments[0].focus()", button(browser, 1, "Steps"))
    assert browser.script(HIGHLIGHTED) == {
        "is-chosen": ["Steps"],
        "is-needed": [
            "IdempotencyConfig",
            "IdempotencyManager",
            "IdempotencyRepository",
            "Observer",
            "ServiceMode",
            "ServiceName",
            "Settings",
        ],
        "asks": [],
    }

    browser.script("document.activeElement.blur()")
    assert browser.script(HIGHLIGHTED) == {"is-chosen": [], "is-needed": [], "asks": []}


def test_a_click_keeps_the_highlight_until_escape(browser: Browser, address: str) -> None:
    browser.open(address)
    dispatcher = button(browser, 4, "EventDispatcher")

    dispatcher.click()
    browser.script("arguments[0].blur()", dispatcher)
    assert browser.script(HIGHLIGHTED)["is-chosen"] == ["EventDispatcher"]
    assert dispatcher.get_attribute("aria-pressed") == "true"

    dispatcher.send_keys(Keys.ESCAPE)
    assert browser.script(HIGHLIGHTED)["is-chosen"] == []
    assert dispatcher.get_attribute("aria-pressed") == "false"


def test_all_text_has_sufficient_contrast(browser: Browser, address: str) -> None:
    for scheme in get_args(Colours):
        browser.prefer(scheme)
        browser.open(address)

        ratio, where = browser.script(CONTRAST)

        assert ratio >= 4.5, (scheme, where)  # WCAG 2, level AA


def test_nothing_overflows_the_page(browser: Browser, address: str) -> None:
    browser.open(address)
    for width in (400, 1280):
        browser.resize(width)

        assert browser.script("return document.documentElement.scrollWidth") == width
        beyond = browser.script(
            "return [...document.querySelectorAll('.part, td, h1, h2, h4, .badge')].filter((each) =>"
            " each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')"
            ".map((each) => each.textContent)"
        )
        assert beyond == [], width


def test_the_page_has_an_outline_of_headings_and_landmarks(browser: Browser, address: str) -> None:
    browser.open(address)

    levels = browser.script(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map((heading) => Number(heading.tagName[1]))"
    )

    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    regions = browser.driver.find_elements(By.CSS_SELECTOR, "main > section[aria-labelledby]")
    assert [region.accessible_name for region in regions] == [
        "Who gets which dispatcher",
        "coordinator",
        "k8s-worker",
        "result-processor",
        "saga-orchestrator",
    ]
