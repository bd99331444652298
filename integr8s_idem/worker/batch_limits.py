"""How large batches get, and which settings keep them smaller than handlers ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from integr8s_idem.config import ServiceSettings
from integr8s_idem.handlers.router import RegisteredHandler

MOST_TOGETHER: Final = 250
"""Work items of one exchange with the store: a few milliseconds of decoding, and of the store's time."""


def limits_of_batches(name: str, service: ServiceSettings, handlers: Sequence[RegisteredHandler]) -> Iterator[str]:
    """What keeps batches of the service `name` below the size that its handlers ask for, and what to set."""
    sizes = {handler.name: handler.batch.most for handler in handlers if handler.batch and handler.batch.most > 1}
    if not sizes:
        return
    most = max(sizes.values())
    told = f"batch handlers ({', '.join(sorted(sizes))}) take up to {most} events at once"
    if service.ordering == "partition":
        yield (
            f'{told}, and services.{name}.ordering = "partition" gives them one of each partition at a time: '
            'set ordering = "key", or "none" if no order matters'
        )
    for setting, limit in (("concurrency", service.concurrency), ("max_in_flight", service.max_in_flight)):
        if limit < most:
            yield (
                f"{told}, and services.{name}.{setting} = {limit} is less: raise it to {most}, or lower "
                "max_size in @router.on_batch(…)"
            )
