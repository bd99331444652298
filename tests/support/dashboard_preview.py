"""Render a Grafana dashboard as HTML: each panel at its place, with data from Prometheus.

This is not Grafana: it supports the grid, titles, queries and legends, but not themes, zoom or tooltips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isnan
from typing import Any, Final

from tests.support.prometheus import Prometheus

SECONDS: Final = 60
"""Time range of graphs."""
VARIABLES: Final[Mapping[str, str]] = {"$__rate_interval": "1m", "$service": ".*", "$instance": ".*"}
"""Values that Grafana substitutes for the variables if everything is selected."""
_STYLE: Final = """
body { margin: 0; padding: 8px; background: #f4f5f5; font: 12px sans-serif; color: #24292e }
main { display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 30px; gap: 8px }
section { background: #fff; border: 1px solid #ddd; overflow: hidden; padding: 4px 8px; min-width: 0 }
section.row { background: none; border: 0; font-weight: bold }
h2 { font-size: 12px; margin: 0 0 4px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
b.value { font-size: 30px } .none { color: #999 }
table { width: 100%; border-collapse: collapse } td:last-child { text-align: right }
svg { width: 100%; height: 90px }
"""


def filled(expression: str) -> str:
    """Replace the variables of the dashboard in an expression."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the panels with queries, without rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def page(dashboard: Mapping[str, Any], prometheus: Prometheus) -> str:
    """Return the dashboard as HTML. Raises `AssertionError` if Prometheus rejects a query."""
    drawn = "\n".join(_panel(panel, prometheus) for panel in dashboard["panels"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(dashboard["title"])}</title>'
        f"<style>{_STYLE}</style><p>A preview of idempotency.json, rendered by the tests. This is not Grafana.</p>"
        f"<main>{drawn}</main></html>"
    )


def _panel(panel: Mapping[str, Any], prometheus: Prometheus) -> str:
    place = panel["gridPos"]
    style = f"grid-column: {place['x'] + 1} / span {place['w']}; grid-row: {place['y'] + 1} / span {place['h']}"
    kind, title = panel["type"], escape(panel["title"])
    if kind == "row":
        return f'<section class="row" style="{style}">{title}</section>'
    body = {"stat": _stat, "timeseries": _graph}[kind](panel, prometheus)
    description = escape(panel["description"], quote=True)
    return f'<section class="panel" style="{style}" title="{description}"><h2>{title}</h2>{body}</section>'


def _stat(panel: Mapping[str, Any], prometheus: Prometheus) -> str:
    found = [series for target in panel["targets"] for series in prometheus.query(filled(target["expr"]))]
    if not found:
        return _NO_DATA
    value = found[0]["value"][1]
    words = {
        number: word["text"]
        for mapping in panel["fieldConfig"]["defaults"]["mappings"]
        for number, word in mapping["options"].items()
    }
    return f'<b class="value">{escape(words.get(value, _short(value)))}</b>'


def _graph(panel: Mapping[str, Any], prometheus: Prometheus) -> str:
    series = [
        (_legend(target["legendFormat"], found["metric"]), [float(value) for _, value in found["values"]])
        for target in panel["targets"]
        for found in prometheus.query_range(filled(target["expr"]), seconds=SECONDS, step=1)
    ]
    if not series:
        return _NO_DATA
    rows = "".join(f'<tr><td>{escape(name)}<td class="value">{_short(values[-1])}' for name, values in sorted(series))
    return f"{_lines([values for _, values in series])}<table>{rows}</table>"


_NO_DATA: Final = '<p class="none">no data</p>'


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form)


def _lines(series: Sequence[Sequence[float]]) -> str:
    top = max((value for values in series for value in values if not isnan(value)), default=0.0) or 1.0
    drawn = "".join(
        f'<polyline fill="none" stroke="#3274d9" points="{" ".join(_points(each, top))}"/>' for each in series
    )
    return f'<svg viewBox="0 0 {SECONDS} 100" preserveAspectRatio="none">{drawn}</svg>'


def _points(values: Sequence[float], top: float) -> Iterator[str]:
    first = SECONDS - len(values)
    for place, value in enumerate(values):
        if not isnan(value):  # such as 0 / 0
            yield f"{first + place},{100 - 100 * value / top:.1f}"


def _short(value: str | float) -> str:
    return f"{float(value):.4g}"
