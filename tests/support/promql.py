"""Parse PromQL expressions, as far as the tests of dashboards and alerts need it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_TEXT: Final = re.compile(r'"[^"]*"')
_RECORDED: Final = re.compile(r"\b[a-z_]+(?::[a-z_]+)+\b")
_METRIC: Final = re.compile(r"\b(?:(?:idempotency|db_client|messaging)_[a-z_]+|up|ALERTS)\b(?!\s*\()")
_MATCHERS: Final = re.compile(r"\{([^}]*)\}")
_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LEGEND: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}|\$labels\.(\w+)")


@dataclass(frozen=True)
class Named:
    """The metrics, recorded series and labels that an expression uses."""

    metrics: frozenset[str]
    recorded: frozenset[str]
    labels: frozenset[str]


def named(expression: str) -> Named:
    """Return the names in an expression."""
    plain = _TEXT.sub('""', expression)
    recorded = frozenset(_RECORDED.findall(plain))
    labels = [label for group in _MATCHERS.findall(plain) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", group)]
    labels += [label for group in _GROUPING.findall(plain) for label in _words(group.split(","))]
    without = _MATCHERS.sub("", _GROUPING.sub("", _RECORDED.sub("", plain)))
    return Named(frozenset(_METRIC.findall(without)), recorded, frozenset(labels))


def labels_shown(text: str) -> frozenset[str]:
    """Return the labels in a legend or in the text of an alert."""
    return frozenset(label for pair in _LEGEND.findall(text) for label in pair if label)


def _words(texts: Iterable[str]) -> list[str]:
    return [text.strip() for text in texts if text.strip()]
