"""Which of Kafka's compression codecs the installed client can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from aiokafka import codec

_READERS: Final[Mapping[str, Callable[[], bool]]] = {
    "gzip": codec.has_gzip,
    "snappy": codec.has_snappy,
    "lz4": codec.has_lz4,
    "zstd": codec.has_zstd,
}
"""By the names that Kafka gives them in `compression.type`."""


def unreadable_codecs() -> tuple[str, ...]:
    """Codecs for which a package is missing: a batch compressed with one of them cannot be read.

    Nothing is missing in a complete installation, since cramjam is a dependency.  aiokafka needs it and does not
    declare it as required.
    """
    return tuple(name for name, is_readable in _READERS.items() if not is_readable())
