"""Measure the calls to a store, where all stores are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from integr8s_idem.stores import DatabaseStore, IdempotencyRepository, PurgeSupport
from integr8s_idem.telemetry import Observer, StoreTimer

P = ParamSpec("P")
T = TypeVar("T")


def measured(repository: IdempotencyRepository, observer: Observer) -> IdempotencyRepository:
    """Return a repository that calls `repository` and reports the duration of each call to `observer`.

    It is `repository` itself if that is not in a database server, or if the observer measures no calls.  It supports
    purging like `repository`, but no other optional protocol.  `scan` is not measured: it lasts as long as its caller
    takes.
    """
    if not isinstance(repository, DatabaseStore):
        return repository
    timer = observer.store_timer(lambda: repository.database)
    if timer is None:
        return repository
    return (_MeasuredPurging if isinstance(repository, PurgeSupport) else _Measured)(repository, timer)


class _Measured:
    """The methods of a repository, each measured."""

    def __init__(self, repository: IdempotencyRepository, timer: StoreTimer) -> None:
        # Made once: a method that made its call each time would take twice as long.
        self.reserve = _timed("reserve", repository.reserve, timer)
        self.renew = _timed("renew", repository.renew, timer)
        self.complete = _timed("complete", repository.complete, timer)
        self.fail = _timed("fail", repository.fail, timer)
        self.release = _timed("release", repository.release, timer)
        self.get = _timed("get", repository.get, timer)
        self.delete = _timed("delete", repository.delete, timer)
        self.scan = repository.scan
        self.count_active = _timed("count_active", repository.count_active, timer)
        self.ping = _timed("ping", repository.ping, timer)


class _MeasuredPurging(_Measured):
    """A repository that is purged."""

    def __init__(self, repository: IdempotencyRepository, timer: StoreTimer) -> None:
        super().__init__(repository, timer)
        assert isinstance(repository, PurgeSupport)
        self._purging = repository
        self.purge = _timed("purge", repository.purge, timer)

    @property
    def purge_every(self) -> timedelta:
        return self._purging.purge_every


def _timed(operation: str, call: Callable[P, Awaitable[T]], timer: StoreTimer) -> Callable[P, Coroutine[Any, Any, T]]:
    async def timed(*args: P.args, **kwargs: P.kwargs) -> T:
        since = perf_counter()
        try:
            answer = await call(*args, **kwargs)
        except BaseException as error:
            timer(operation, since, error)
            raise
        timer(operation, since)
        return answer

    return timed
