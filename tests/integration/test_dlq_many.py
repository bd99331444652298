"""`integr8s-idem dlq` on more letters than fit into its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.operating_letters import figures
from tests.support.kafka import Kafka

LETTERS, BYTES = 1_000, 60_000
MOST_MEGABYTES = 30.0
"""Beside what a replay of nothing takes: half of what all the letters hold."""


@pytest.mark.kafka
@pytest.mark.slow
async def test_a_topic_with_many_letters_is_listed_and_replayed_in_bounded_memory(
    kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    found = await figures(kafka, topic_prefix, redis_url, tmp_path, LETTERS, BYTES, ("nothing", "list", "replay"))

    bare = found["nothing"].megabytes
    more = {command: figure.megabytes - bare for command, figure in found.items()}
    assert LETTERS * BYTES / 2**20 > 1.9 * MOST_MEGABYTES
    assert {command: size for command, size in more.items() if size > MOST_MEGABYTES} == {}
