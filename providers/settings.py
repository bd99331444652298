"""The settings of the platform: the library's, and a section of its own."""

from __future__ import annotations

import os
from typing import Self

from pydantic import model_validator
from sqlalchemy.engine import URL, make_url

from integr8s_idem import Settings
from integr8s_idem.config import PostgresqlStoreSettings, SqliteStoreSettings
from services.settings import PlatformSection


class PlatformSettings(Settings):
    """What settings.toml holds for the platform: `[platform]` beside the library's sections."""

    platform: PlatformSection = PlatformSection()

    @model_validator(mode="after")
    def _jobs_outlive_a_takeover(self) -> Self:
        ttl = self.platform.kubernetes.ttl_seconds
        lease, session = self.idempotency.processing_timeout_seconds, self.kafka.session_timeout_seconds
        if self.platform.runner == "kubernetes" and ttl <= lease + session:
            raise ValueError(
                f"platform.kubernetes.ttl_seconds = {ttl} is not above idempotency.processing_timeout_seconds = "
                f"{lease:g} and kafka.session_timeout_seconds = {session:g} together: a finished Job would be gone "
                "when a dead worker's executions are taken over, and its script would run again; raise the first"
            )
        return self

    @property
    def records_are_in_the_platforms_database(self) -> bool:
        """Whether `[store]` and `[platform]` name one database: then records can commit with what handlers write.

        Addresses are compared as they are written: localhost and 127.0.0.1 are two.
        """
        return self._kinds_agree and len({*self.places}) == 1

    @property
    def may_be_one_database(self) -> bool:
        """Whether both name a database of one kind, and not the same: perhaps it is one by two names."""
        return self._kinds_agree and not self.records_are_in_the_platforms_database

    @property
    def places(self) -> tuple[str, str]:
        """Where `[store]` and `[platform]` are, without secrets; the kind of a store that is in no such database."""
        ours = make_url(self.platform.database_url)
        match self.store:
            case SqliteStoreSettings(path=path):
                theirs = os.path.realpath(path)
            case PostgresqlStoreSettings(url=url):
                theirs = _place(make_url(url))
            case other:
                theirs = other.kind
        return theirs, os.path.realpath(ours.database or "") if ours.get_backend_name() == "sqlite" else _place(ours)

    @property
    def _kinds_agree(self) -> bool:
        return self.store.kind == make_url(self.platform.database_url).get_backend_name()


def _place(url: URL) -> str:
    return f"{url.host or url.query.get('host')}:{url.port or 5432}/{url.database}"
