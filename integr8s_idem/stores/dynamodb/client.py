"""A DynamoDB client that fits the store: bounded in time, connections and retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError
from botocore.loaders import create_loader

from integr8s_idem.config import DynamodbStoreSettings
from integr8s_idem.stores.dynamodb.errors import of_driver

APP_ID: Final = "integr8s-idem"
"""What CloudTrail shows in the user agent of our requests."""

_models = cache(create_loader)
"""What the driver knows of AWS, read from its files once for all services of a process: a tenth of a second each."""


@asynccontextmanager
async def dynamo_client(settings: DynamodbStoreSettings) -> AsyncIterator[Any]:
    """A client of aiobotocore, closed at the end of the block; it connects at its first use.

    Credentials are looked for where every AWS program does: environment, profile, web identity, container, instance.
    The store repeats calls by itself, within its own deadline: the driver is told not to.

    Raises:
        StoreConfigurationError: No region, or a profile that is not there.
    """
    config = AioConfig(
        connect_timeout=settings.timeout_seconds,
        read_timeout=settings.timeout_seconds,
        max_pool_connections=settings.max_connections,
        # Of the modes only this one compares an answer's checksum; without, a damaged one passes for an empty one.
        retries={"total_max_attempts": 1, "mode": "legacy"},
        # We send what we built: to look at every field again costs a fifth of a call.
        parameter_validation=False,
        tcp_keepalive=True,
        user_agent_appid=APP_ID,
    )
    session = AioSession()
    session.register_component("data_loader", _models())
    making = session.create_client(
        "dynamodb", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config
    )
    try:
        client = await making.__aenter__()
    except BotoCoreError as error:
        raise of_driver("start", error) from error
    try:
        yield client
    finally:
        await client.close()
