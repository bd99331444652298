"""Writes `idempotency.json`: `python -m deploy.grafana.dashboard`.

The panels are defined in `panels.py`; this module adds their positions and the properties that Grafana requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from deploy.grafana.panels import ROWS, Panel, Row

FILE: Final = Path(__file__).with_name("idempotency.json")

SCHEMA_VERSION: Final = 41
"""Schema version of Grafana 12.0.  Older versions can read it, newer versions migrate it."""
WIDTH: Final = 24
"""Columns of Grafana's grid."""
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON for Grafana."""
    return {
        "annotations": {"list": [_alerts()]},
        "description": "Whether events are handled once, and what to do if not. See the description of each panel.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": list(_panels(ROWS)),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["integr8s-idem", "kafka", "idempotency"],
        "templating": {
            "list": [_source(), _variable("service"), _variable("instance", matcher='{service=~"$service"}')]
        },
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "Idempotency",
        "uid": "integr8s-idem",
        "version": 1,
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _alerts() -> dict[str, Any]:
    """Annotations for firing alerts on every panel."""
    return {
        "datasource": SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Idempotency.*", alertstate="firing", service=~"$service|"}',
        "iconColor": "red",
        "name": "Alerts",
        "titleFormat": "{{alertname}} {{service}}",
    }


def _source() -> dict[str, Any]:
    return {
        "current": {},
        "hide": 0,
        "includeAll": False,
        "label": "Prometheus",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }


def _variable(label: str, matcher: str = "") -> dict[str, Any]:
    query = f"label_values(idempotency_deliveries_total{matcher}, {label})"
    return {
        # Matches all values, including those of stopped workers, which a list would exclude.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": SOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": label.capitalize(),
        "multi": True,
        "name": label,
        "options": [],
        "query": {"query": query, "refId": f"{label}s"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Lay out rows from top to bottom, and the panels of each row from left to right."""
    number, top = 1, 0
    for row in rows:
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            "id": number,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        number, top, left, height = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            yield _panel(panel, number, place)
            number, left, height = number + 1, left + panel.width, max(height, panel.height)
        top += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "datasource": SOURCE,
        "description": panel.description,
        "fieldConfig": {"defaults": _stat_field(panel) if panel.is_stat else _graph_field(panel), "overrides": []},
        "gridPos": place,
        "id": number,
        "options": _stat_options(panel) if panel.is_stat else _graph_options(),
        "targets": [
            {
                "datasource": SOURCE,
                "editorMode": "code",
                "exemplar": query.exemplars,
                "expr": query.expr,
                "instant": panel.is_stat,
                "legendFormat": query.legend,
                "range": not panel.is_stat,
                "refId": chr(ord("A") + place_of_query),
            }
            for place_of_query, query in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": "stat" if panel.is_stat else "timeseries",
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    first, *more = panel.steps or ((None, "green"),)
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for value, color in (first, *more)]}


def _stat_field(panel: Panel) -> dict[str, Any]:
    mappings = [{"options": {value: {"text": name} for value, name in panel.texts.items()}, "type": "value"}]
    return {
        "color": {"mode": "thresholds"},
        "mappings": mappings if panel.texts else [],
        "thresholds": _thresholds(panel),
        "unit": panel.unit,
    }


def _graph_field(panel: Panel) -> dict[str, Any]:
    return {
        "color": {"mode": "palette-classic"},
        "custom": {
            "axisPlacement": "auto",
            "drawStyle": "bars" if panel.bars else "line",
            "fillOpacity": 60 if panel.bars else 10,
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.bars else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        },
        "mappings": [],
        "min": 0,
        "thresholds": _thresholds(panel),
        "unit": panel.unit,
    }


def _stat_options(panel: Panel) -> dict[str, Any]:
    return {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto" if len(panel.queries) == 1 else "value_and_name",
    }


def _graph_options() -> dict[str, Any]:
    return {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
