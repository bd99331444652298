"""Collectors for the tests of exporters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.collectors import Collector, grpc_collecting, http_collecting


@pytest.fixture
def http_collector() -> Iterator[Collector]:
    with http_collecting() as collector:
        yield collector


@pytest.fixture
def grpc_collector() -> Iterator[Collector]:
    with grpc_collecting() as collector:
        yield collector
