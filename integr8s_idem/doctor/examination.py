"""Run all checks: settings, application, store and brokers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from integr8s_idem._util import speedups
from integr8s_idem.config import Settings, load_settings, settings_warnings
from integr8s_idem.config.urls import redacted
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.application_checks import ApplicationReport, check_application
from integr8s_idem.doctor.broker_checks import check_brokers
from integr8s_idem.doctor.check_runner import findings_of
from integr8s_idem.doctor.remedies import mistake_remedy, warning_remedy
from integr8s_idem.doctor.speedups_check import check_speedups
from integr8s_idem.doctor.store_checks import OUTBOX, STORE, check_store
from integr8s_idem.embedded.discovery import load_embedded_settings
from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.runtime import Platform


@dataclass(frozen=True)
class Examination:
    """What to examine."""

    settings_file: Path | None = None
    platform: Platform | None = None
    embedded: bool = False
    """Use the embedded servers of the worker that runs in this folder."""

    def settings(self) -> Settings:
        """Load the settings.

        Raises:
            SettingsError: See `load_settings`.
            ApplicationError: See `load_embedded_settings`.
        """
        settings_type = self.platform.settings_type if self.platform else Settings
        load = load_embedded_settings if self.embedded else load_settings
        return load(
            self.settings_file, settings_type, services=self.services, ignore_unknown_sections=self.platform is None
        )

    @property
    def services(self) -> list[str]:
        return list(self.platform.services) if self.platform else []


async def examine(examination: Examination, *, now: Callable[[], float] = time.time) -> list[Finding]:
    """Run all checks and return their findings, the worst first, without secrets.

    Args:
        examination: What to examine.
        now: This machine's clock, in seconds since 1970.
    """
    try:
        settings = examination.settings()
    except SettingsError as error:
        return [_mistake_finding(mistake) for mistake in error.mistakes]
    checked_by_brokers: set[str] = set()

    known = ApplicationReport()

    async def application() -> list[Finding]:
        nonlocal known
        known = await check_application(examination.platform, settings, now)
        return known.findings

    async def store() -> list[Finding]:
        if not known.uses_store:
            what = "[store] is not checked: the application provides all of its stores itself"
            return [Finding(Code.STORE_SEEN, Severity.INFO, STORE, what, "", "")]
        return await check_store(settings, now)

    async def brokers() -> list[Finding]:
        report = await check_brokers(settings, known.readings)
        checked_by_brokers.update(report.checked)
        return report.findings

    found = await findings_of({"application": application})
    found += await findings_of({"store": store, "brokers": brokers})
    warnings = [
        _warning_finding(warning)
        for warning in settings_warnings(settings, examination.services)
        if warning.path not in checked_by_brokers
    ]
    all_found = (*warnings, *_deduplicated(found), check_speedups(speedups.LOADED))
    hidden = [_without_secrets(finding, list(_secrets(settings))) for finding in all_found]
    return sorted(dict.fromkeys(hidden), key=lambda finding: list(Severity).index(finding.severity))


def _deduplicated(found: list[Finding]) -> list[Finding]:
    """Remove findings about the outbox that the store reports as well."""
    codes = {finding.code for finding in found if finding.where == STORE}
    return [finding for finding in found if finding.where != OUTBOX or finding.code not in codes]


def _mistake_finding(mistake: SettingsMistake) -> Finding:
    what, remedy = mistake_remedy(mistake.path, mistake.message)
    return Finding(Code.SETTINGS_MISTAKE, Severity.ERROR, mistake.path, what, "workers cannot start", remedy)


def _warning_finding(warning: SettingsMistake) -> Finding:
    what, cost, remedy = warning_remedy(warning.path, warning.message)
    return Finding(Code.SETTINGS_WARNING, Severity.WARNING, warning.path, what, cost, remedy)


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
        remedy=hidden(finding.remedy),
    )
