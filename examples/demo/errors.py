"""Errors that end the demo before its verdict."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot continue."""
