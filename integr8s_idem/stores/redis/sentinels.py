"""Find the primary through Sentinels, and pool connections to it."""

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
    """Asks the Sentinels in turn; unlike the class of the driver, it hides passwords and reports refusals."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the primary.

        Raises:
            AuthenticationError: No Sentinel reports a primary, and at least one rejects the password.
            NoPermissionError: No Sentinel reports a primary, and at least one rejects the command.
            PrimaryUnknownError: Every Sentinel that answers does not know this name.
            MasterNotFoundError: No Sentinel reports a primary.
        """
        refused: AuthenticationError | NoPermissionError | None = None
        known: set[bool] = set()
        replies: list[str] = []
        for index, sentinel in enumerate(self.sentinels):
            address = sentinel.connection_pool.connection_kwargs
            try:
                masters: Any = await sentinel.sentinel_masters()
            except (ConnectionError, TimeoutError, NoPermissionError) as error:
                refused = error if isinstance(error, AuthenticationError | NoPermissionError) else refused
                replies.append(f"{address['host']}:{address['port']}: {error}")
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):
                # Ask this Sentinel first the next time.
                self.sentinels[0], self.sentinels[index] = sentinel, self.sentinels[0]
                return state["ip"], state["port"]
            known.add(bool(state))
            replies.append(f"{address['host']}:{address['port']}: {'down' if state else 'unknown'}")
        if refused is not None:
            raise refused
        if known == {False}:
            raise PrimaryUnknownError(f"no Sentinel knows master_name = {service_name!r} ({'; '.join(replies)})")
        raise MasterNotFoundError(f"no Sentinel reports a primary for {service_name!r} ({'; '.join(replies)})")


class PrimaryPool(SentinelConnectionPool, QuickPool):
    """Connections to the primary; disconnecting also closes the connections to the Sentinels."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()
