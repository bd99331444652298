"""Requirements of the tests with Kafka."""

from __future__ import annotations

import os

from tests.support.kafka.broker import ToolsMissingError, find_jars, find_java
from tests.support.kafka.fixtures import ADDRESS, skip_or_fail


def need_kafka(*, own: bool = False) -> None:
    """Skip the test, with instructions, if Kafka is not available.

    Args:
        own: Whether the test needs a broker that it may kill.
    """
    if os.environ.get(ADDRESS) and not own:
        return
    try:
        find_java()
        find_jars()
    except ToolsMissingError as missing:
        skip_or_fail(f"{missing}; or set {ADDRESS}=host:port to a running broker")
