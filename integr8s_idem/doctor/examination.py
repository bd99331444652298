"""A whole examination: settings, store, brokers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from integr8s_idem.config import Settings, load_settings, settings_warnings
from integr8s_idem.config.urls import redacted
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.application_checks import ApplicationLook, look_at_application
from integr8s_idem.doctor.broker_checks import look_at_brokers
from integr8s_idem.doctor.check_runner import findings_of
from integr8s_idem.doctor.remedies import of_mistake, of_warning
from integr8s_idem.doctor.store_checks import OUTBOX, STORE, look_at_store
from integr8s_idem.embedded.discovery import load_embedded_settings
from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.runtime import Platform


@dataclass(frozen=True)
class Asked:
    """What is to be examined."""

    settings_file: Path | None = None
    platform: Platform | None = None
    embedded: bool = False
    """Whether the servers are those of the worker that runs them in this folder."""

    def settings(self) -> Settings:
        """Read the settings.

        Raises:
            SettingsError: As `load_settings`.
            ApplicationError: As `settings_of_running`.
        """
        settings_type = self.platform.settings_type if self.platform else Settings
        load = load_embedded_settings if self.embedded else load_settings
        return load(
            self.settings_file, settings_type, services=self.services, ignore_unknown_sections=self.platform is None
        )

    @property
    def services(self) -> list[str]:
        return list(self.platform.services) if self.platform else []


async def examined(asked: Asked, *, now: Callable[[], float] = time.time) -> list[Finding]:
    """All findings, the worst first; no secret is in any of them.

    `now`: this machine's clock, in seconds since 1970.
    """
    try:
        settings = asked.settings()
    except SettingsError as error:
        return [_mistaken(mistake) for mistake in error.mistakes]
    told_by_brokers: set[str] = set()

    known = ApplicationLook()

    async def application() -> list[Finding]:
        nonlocal known
        known = await look_at_application(asked.platform, settings, now)
        return known.findings

    async def store() -> list[Finding]:
        if not known.uses_store:
            told = "[store] is not looked at: every store of the application is its own"
            return [Finding(Code.STORE_SEEN, Severity.INFO, STORE, told, "", "")]
        return await look_at_store(settings, now)

    async def brokers() -> list[Finding]:
        look = await look_at_brokers(settings, known.readings)
        told_by_brokers.update(look.answered)
        return look.findings

    found = await findings_of({"application": application})
    found += await findings_of({"store": store, "brokers": brokers})
    warnings = [
        _warned(warning)
        for warning in settings_warnings(settings, asked.services)
        if warning.path not in told_by_brokers
    ]
    hidden = [_without_secrets(finding, list(_secrets(settings))) for finding in (*warnings, *_told_once(found))]
    return sorted(dict.fromkeys(hidden), key=lambda finding: list(Severity).index(finding.severity))


def _told_once(found: list[Finding]) -> list[Finding]:
    """Without what the outbox says as well as the store that it is part of."""
    told = {finding.code for finding in found if finding.where == STORE}
    return [finding for finding in found if finding.where != OUTBOX or finding.code not in told]


def _mistaken(mistake: SettingsMistake) -> Finding:
    what, mend = of_mistake(mistake.path, mistake.message)
    return Finding(Code.SETTINGS_MISTAKE, Severity.ERROR, mistake.path, what, "no worker starts", mend)


def _warned(warning: SettingsMistake) -> Finding:
    what, cost, mend = of_warning(warning.path, warning.message)
    return Finding(Code.SETTINGS_WARNING, Severity.WARNING, warning.path, what, cost, mend)


def _secrets(settings: Settings) -> Iterator[str]:
    for secret in (getattr(settings.store, "password", None), settings.kafka.sasl_password):
        if secret is not None and secret.get_secret_value():
            yield secret.get_secret_value()


def _without_secrets(finding: Finding, secrets: list[str]) -> Finding:
    def hidden(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return redacted(text)

    return replace(
        finding,
        where=hidden(finding.where),
        what=hidden(finding.what),
        cost=hidden(finding.cost),
        mend=hidden(finding.mend),
    )
