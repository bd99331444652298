"""Find Kafka's compression codecs that the installed client cannot read."""

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
"""Keys are values of `compression.type`."""


def unreadable_codecs() -> tuple[str, ...]:
    """Return the codecs for which a package is missing.

    A complete installation has all of them, since cramjam is a dependency.  aiokafka needs cramjam, but does not
    require it.
    """
    return tuple(name for name, is_readable in _READERS.items() if not is_readable())
