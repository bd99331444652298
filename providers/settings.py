"""The settings of the platform: the library's, and a section of its own."""

from __future__ import annotations

import os

from sqlalchemy.engine import URL, make_url

from integr8s_idem import Settings
from integr8s_idem.config import PostgresqlStoreSettings, SqliteStoreSettings
from services.settings import PlatformSection


class PlatformSettings(Settings):
    """What settings.toml holds for the platform: `[platform]` beside the library's sections."""

    platform: PlatformSection = PlatformSection()

    @property
    def records_are_in_the_platforms_database(self) -> bool:
        """Whether `[store]` and `[platform]` name one database: then records can commit with what handlers write."""
        ours = make_url(self.platform.database_url)
        match self.store:
            case SqliteStoreSettings(path=path):
                return ours.get_backend_name() == "sqlite" and _same_file(path, ours.database)
            case PostgresqlStoreSettings(url=url):
                theirs = make_url(url)
                return ours.get_backend_name() == "postgresql" and _place(ours) == _place(theirs)
        return False


def _same_file(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _place(url: URL) -> tuple[object, ...]:
    return url.host or url.query.get("host"), url.port or 5432, url.database
