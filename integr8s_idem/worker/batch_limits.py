"""Maximum sizes of batches, and settings that keep them smaller than the handlers' `max_size`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from integr8s_idem.config import ServiceSettings
from integr8s_idem.handlers.handler_calls import RegisteredHandler

MOST_TOGETHER: Final = 250
"""Maximum work items of one request to the store: a few milliseconds of decoding, and of the store's time."""


def limits_of_batches(name: str, service: ServiceSettings, handlers: Sequence[RegisteredHandler]) -> Iterator[str]:
    """Yield a warning for each setting of the service `name` that keeps batches below the handlers' `max_size`."""
    sizes = {handler.name: handler.batch.most for handler in handlers if handler.batch and handler.batch.most > 1}
    if not sizes:
        return
    most = max(sizes.values())
    wanted = f"batch handlers ({', '.join(sorted(sizes))}) accept up to {most} events at once"
    if service.ordering == "partition":
        yield (
            f'{wanted}, but services.{name}.ordering = "partition" passes them one event of each partition at a time: '
            'set ordering = "key", or "none" if order does not matter'
        )
    for setting, limit in (("concurrency", service.concurrency), ("max_in_flight", service.max_in_flight)):
        if limit < most:
            yield (
                f"{wanted}, but services.{name}.{setting} = {limit}: raise it to {most}, or lower max_size in "
                "@router.on_batch(…)"
            )
