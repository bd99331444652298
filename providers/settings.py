"""The settings of the platform: those of the library, and the section `[platform]`."""

from __future__ import annotations

import os
from typing import Final, Self

from pydantic import model_validator
from sqlalchemy.engine import URL, make_url

from integr8s_idem import Settings
from integr8s_idem.config import PostgresqlStoreSettings, ServiceSettings, SqliteStoreSettings
from services.settings import PlatformSection

K8S_WORKER: Final = "k8s-worker"
RETRY_TOPICS: Final = ("5s",)
"""Where commands wait for room in the cluster, unless the settings of the k8s worker name other topics."""


class PlatformSettings(Settings):
    """The settings of the library with the section `[platform]`."""

    platform: PlatformSection = PlatformSection()

    def service(self, name: str) -> ServiceSettings:
        """Return the settings of a service; the k8s worker has `RETRY_TOPICS` by default."""
        section = super().service(name)
        if name == K8S_WORKER and "retry_topics" not in section.model_fields_set:
            return section.model_copy(update={"retry_topics": RETRY_TOPICS})
        return section

    @model_validator(mode="after")
    def _jobs_outlive_a_takeover(self) -> Self:
        ttl = self.platform.kubernetes.ttl_seconds
        lease, session = self.idempotency.processing_timeout_seconds, self.kafka.session_timeout_seconds
        if self.platform.runner == "kubernetes" and ttl <= lease + session:
            raise ValueError(
                f"platform.kubernetes.ttl_seconds = {ttl} must exceed idempotency.processing_timeout_seconds = "
                f"{lease:g} plus kafka.session_timeout_seconds = {session:g}: otherwise a finished Job is gone when a "
                "dead worker's executions are taken over, and its script runs again; raise ttl_seconds"
            )
        return self

    @property
    def records_are_in_the_platforms_database(self) -> bool:
        """Whether `[store]` and `[platform]` name the same database, so that transactions can include both.

        Addresses are compared literally: localhost and 127.0.0.1 are different.
        """
        return self._kinds_agree and len({*self.places}) == 1

    @property
    def may_be_one_database(self) -> bool:
        """Whether both name databases of the same kind with different addresses, which may be aliases."""
        return self._kinds_agree and not self.records_are_in_the_platforms_database

    @property
    def places(self) -> tuple[str, str]:
        """The databases of `[store]` and `[platform]` without secrets; for other stores, the kind."""
        platform_url = make_url(self.platform.database_url)
        match self.store:
            case SqliteStoreSettings(path=path):
                store_place = os.path.realpath(path)
            case PostgresqlStoreSettings(url=url):
                store_place = _place(make_url(url))
            case other:
                store_place = other.kind
        return store_place, os.path.realpath(
            platform_url.database or ""
        ) if platform_url.get_backend_name() == "sqlite" else _place(platform_url)

    @property
    def _kinds_agree(self) -> bool:
        return self.store.kind == make_url(self.platform.database_url).get_backend_name()


def _place(url: URL) -> str:
    return f"{url.host or url.query.get('host')}:{url.port or 5432}/{url.database}"
