"""Passwords in URLs are neither in audit lines nor in settings as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.config import Settings
from integr8s_idem.config.urls import redacted, without_secret
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.audit import audited, store_place
from services.settings import PlatformSection

pytestmark = pytest.mark.scenario(131)

SECRET = "hunter2canary"
URLS = [
    f"redis://:{SECRET}@localhost:6379/0",
    f"redis://u:{SECRET}@localhost:6379/0",
    f"redis://u:p@{SECRET}@localhost:6379/0",
    f"redis://localhost:6379/0?password={SECRET}",
    f"redis://localhost:6379/0?db=1&password={SECRET}&health_check_interval=5",
    f"redis://localhost:6379/0?PASSWORD={SECRET}",
    f"redis://localhost:6379/0?pass%77ord={SECRET}",
    f"redis://u:{SECRET}/x@localhost:6379/0",
    f"postgresql://u:{SECRET}@localhost/db?sslpassword={SECRET}",
    f"mysql://u:{SECRET}@localhost/db",
    f"http://localhost:4318/v1?token={SECRET}&api_secret={SECRET}",
]


@pytest.mark.parametrize("url", URLS)
def test_passwords_in_urls_are_redacted_in_every_form(url: str) -> None:
    assert SECRET not in without_secret(url)
    assert SECRET not in redacted(f"cannot connect to {url}, again")
    assert "localhost" in without_secret(url)


@pytest.mark.parametrize(
    "store",
    [
        {"kind": "redis", "url": URLS[1]},
        {"kind": "redis", "url": URLS[3]},
        {"kind": "redis", "url": "redis://localhost:6379/0", "password": SECRET},
        {"kind": "redis-cluster", "urls": [URLS[1], URLS[0]]},
        {"kind": "postgresql", "url": f"postgresql://u:{SECRET}@localhost/db"},
        {"kind": "mysql", "url": f"mysql://u:{SECRET}@localhost/db"},
    ],
    ids=lambda store: f"{store['kind']} {'url' if 'password' not in store else 'password'}",
)
def test_settings_as_json_and_audit_lines_show_no_password(store: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings.model_validate({"store": store, "replay": {"secret": SECRET * 4}})
    assert SECRET not in settings.model_dump_json()
    assert SECRET not in json.dumps(store_place(settings))
    assert "localhost" in settings.model_dump_json()

    file = tmp_path / "audit.jsonl"
    with (
        pytest.raises(ApplicationError),
        audited("keys purge", {"store": store_place(settings)}, str(file)),
    ):
        raise ApplicationError(f"no answer from {store.get('url') or store['urls'][0]}")
    assert len(file.read_text().splitlines()) == 2
    assert SECRET not in file.read_text()


def test_the_database_settings_of_the_platform_show_no_password() -> None:
    platform = PlatformSection(database_url=f"postgresql+asyncpg://u:{SECRET}@localhost/db")
    assert SECRET not in platform.model_dump_json()
    assert SECRET in platform.model_dump()["database_url"]
