"""Who is the primary, as Sentinels tell it, and connections to it."""

from __future__ import annotations

from typing import Any

from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004  # the driver's
    NoPermissionError,
    TimeoutError,  # noqa: A004  # the driver's
)

from integr8s_idem.stores.redis.errors import PrimaryUnknownError
from integr8s_idem.stores.redis.pools import QuickPool


class Sentinels(Sentinel):
    """Asks one after the other.  Unlike the driver's own, it shows no password, and one that is refused is told."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the primary.

        Raises:
            AuthenticationError: None names one, and one does not take our password.
            NoPermissionError: One does not let us ask.
            PrimaryUnknownError: None that answers knows this name.
            MasterNotFoundError: None names one.
        """
        refused: AuthenticationError | NoPermissionError | None = None
        known: set[bool] = set()
        said: list[str] = []
        for place, sentinel in enumerate(self.sentinels):
            address = sentinel.connection_pool.connection_kwargs
            try:
                masters: Any = await sentinel.sentinel_masters()
            except (ConnectionError, TimeoutError, NoPermissionError) as error:
                refused = error if isinstance(error, AuthenticationError | NoPermissionError) else refused
                said.append(f"{address['host']}:{address['port']}: {error}")
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):
                # It is asked first the next time.
                self.sentinels[0], self.sentinels[place] = sentinel, self.sentinels[0]
                return state["ip"], state["port"]
            known.add(bool(state))
            said.append(f"{address['host']}:{address['port']}: {'it is down' if state else 'unknown'}")
        if refused is not None:
            raise refused
        if known == {False}:
            raise PrimaryUnknownError(f"no Sentinel knows {service_name!r}, as master_name says ({'; '.join(said)})")
        raise MasterNotFoundError(f"no Sentinel names a primary for {service_name!r} ({'; '.join(said)})")


class PrimaryPool(SentinelConnectionPool, QuickPool):
    """Connections to the primary, for which callers wait; closed together with those to the Sentinels."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()
