"""`integr8s-idem dlq` with more dead letters than fit into memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.operating_dead_letters import figures
from tests.support.kafka import Kafka

DEAD_LETTERS, BYTES = 1_000, 60_000
MAX_MEGABYTES = 30.0
"""More than a replay of no dead letters uses; half the size of all dead letters."""


@pytest.mark.kafka
@pytest.mark.slow
async def test_a_topic_with_many_dead_letters_is_listed_and_replayed_in_bounded_memory(
    kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    found = await figures(kafka, topic_prefix, redis_url, tmp_path, DEAD_LETTERS, BYTES, ("nothing", "list", "replay"))

    bare = found["nothing"].megabytes
    more = {command: figure.megabytes - bare for command, figure in found.items()}
    assert DEAD_LETTERS * BYTES / 2**20 > 1.9 * MAX_MEGABYTES
    assert {command: size for command, size in more.items() if size > MAX_MEGABYTES} == {}
