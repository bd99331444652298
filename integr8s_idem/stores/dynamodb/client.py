"""Create DynamoDB clients with the timeouts, connection limit and retry settings that the store needs."""

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
from integr8s_idem.stores.dynamodb.errors import translate_driver_error

APP_ID: Final = "integr8s-idem"
"""Application ID in the user agent of requests, as CloudTrail shows it."""

_models = cache(create_loader)
"""The service models of the driver, cached because loading them takes a tenth of a second for each client."""


@asynccontextmanager
async def dynamo_client(settings: DynamodbStoreSettings) -> AsyncIterator[Any]:
    """Open an aiobotocore client and close it at the end of the block; it connects on first use.

    Credentials come from the usual sources: environment, profile, web identity, container, instance.  Retries of the
    driver are disabled, because the store retries within its own timeout.

    Raises:
        StoreConfigurationError: The region is missing, or the profile does not exist.
    """
    config = AioConfig(
        connect_timeout=settings.timeout_seconds,
        read_timeout=settings.timeout_seconds,
        max_pool_connections=settings.max_connections,
        # Only this mode verifies the checksum of a response; without it, a corrupt response may look empty.
        retries={"total_max_attempts": 1, "mode": "legacy"},
        # Validation would take a fifth of the time of a call, and the store builds all parameters itself.
        parameter_validation=False,
        tcp_keepalive=True,
        user_agent_appid=APP_ID,
    )
    session = AioSession()
    session.register_component("data_loader", _models())
    opening = session.create_client(
        "dynamodb", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config
    )
    try:
        client = await opening.__aenter__()
    except BotoCoreError as error:
        raise translate_driver_error("start", error) from error
    try:
        yield client
    finally:
        await client.close()
