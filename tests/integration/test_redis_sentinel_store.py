"""A Sentinel with a password, and TLS connections to it and to the primary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.config import RedisSentinelStoreSettings
from integr8s_idem.errors import StoreConfigurationError, StoreError
from integr8s_idem.records import Reserved
from integr8s_idem.stores.factory import open_store
from integr8s_idem.testing.store_under_test import wish
from tests.support.redis import RedisServer
from tests.support.redis_sentinel import NAME, SentinelServer
from tests.support.tls import Authority, TlsFront

DATA, WATCH = "data-password", "watch-password"


@pytest.fixture(scope="module")
def sentinel() -> Iterator[SentinelServer]:
    with RedisServer(tcp=True, config={"requirepass": DATA}) as primary:
        lines = f"sentinel auth-pass {NAME} {DATA}", f"requirepass {WATCH}"
        with SentinelServer(primary.port, 1, *lines) as sentinel:
            yield sentinel


def settings_of(*ports: int, **more: Any) -> RedisSentinelStoreSettings:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    kind = {"kind": "redis-sentinel", "sentinels": addresses, "master_name": NAME}
    return RedisSentinelStoreSettings.model_validate({**kind, "password": DATA, "sentinel_password": WATCH, **more})


async def test_sentinel_and_primary_get_their_own_passwords(sentinel: SentinelServer) -> None:
    async with open_store(settings_of(sentinel.port), key_prefix="idem") as store:
        (verdict,) = await store.reserve([wish("k")])

    assert isinstance(verdict, Reserved)


@pytest.mark.scenario(52)
@pytest.mark.parametrize("wrong", [{"password": "no"}, {"sentinel_password": "no"}, {"sentinel_password": None}])
async def test_a_refused_password_is_a_configuration_error(
    sentinel: SentinelServer, wrong: dict[str, str | None]
) -> None:
    async with open_store(settings_of(sentinel.port, **wrong), key_prefix="idem") as store:
        with pytest.raises(StoreConfigurationError, match="does not accept this user and password") as caught:
            await store.reserve([wish("k")])

    assert DATA not in str(caught.value)


async def test_errors_about_unavailable_sentinels_contain_no_password() -> None:
    async with open_store(settings_of(1, 2), key_prefix="idem") as store:
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: ") as caught:
            await store.reserve([wish("k")])

    assert WATCH not in str(caught.value) + repr(caught.value.__cause__)
    assert DATA not in str(caught.value) + repr(caught.value.__cause__)


async def test_sentinels_and_primary_are_reached_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with RedisServer(tcp=True) as primary:
        async with TlsFront(primary.port, authority.server_context()) as front:
            # A Sentinel without TLS knows the plain port of the primary, but the store must use the TLS port.
            monitor = f"sentinel monitor tls 127.0.0.1 {front.port} 1"
            with SentinelServer(primary.port, 1, monitor) as server:
                assert server.running
                async with TlsFront(server.port, authority.server_context()) as before:
                    more = {"password": None, "sentinel_password": None, "master_name": "tls"}
                    settings = settings_of(before.port, tls=True, tls_ca_file=str(authority.ca_file), **more)
                    async with open_store(settings, key_prefix="idem") as store:
                        verdict = await asyncio.wait_for(store.reserve([wish("k")]), 10)

    assert isinstance(verdict[0], Reserved)
