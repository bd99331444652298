"""`integr8s-idem observe`: report what services in observe mode have observed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Final

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import FAILURE, AppOption, Embedded, Json, SettingsFile, exit_status_of
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.output import closable_output, echo, run_async, write_error
from integr8s_idem.operations.keys.next_delivery import format_duration
from integr8s_idem.operations.observe_report import (
    ObserveReport,
    ServiceObservations,
    observe_report,
)
from integr8s_idem.operations.worker_addresses import address_in, address_of
from integr8s_idem.telemetry import Observed

_KINDS: Final = {
    Observed.REDELIVERED: "the same message again",
    Observed.REPUBLISHED: "another message with the same key",
    Observed.CONCURRENT: "while the first was being handled",
    Observed.UNKNOWN: "of an event that was not observed first",
}


def observe_command(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS]...",
            help="host:port or URL of a worker's metrics; a host name with several addresses is one worker for each. "
            "[default: the address in the settings, on this machine]",
        ),
    ] = None,
    settings: SettingsFile = None,
    application: AppOption = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Report the duplicates that services in observe mode have seen.

    Adds up the metrics of all workers since they were started: how many deliveries were duplicates, of which kind, how
    far apart, how many with another payload, and which ttl would have caught 99 % and 99.9 % of them.  Gaps are upper
    bounds.  Duplicates that come after the ttl are invisible.  The exit status is 1 if no worker answers, or none
    observes.
    """

    def report() -> int:
        if addresses:
            chosen = [address_of(text) for text in addresses]
        else:
            chosen = [address_in(command_settings(settings, optional_application(application), embedded=embedded))]
        found = run_async(observe_report(chosen))
        with closable_output():
            if as_json:
                echo(json.dumps(found.as_json(), indent=2))
            else:
                _print(found)
        return 0 if found.services else FAILURE

    raise typer.Exit(exit_status_of(report))


def _print(report: ObserveReport) -> None:
    for number, service in enumerate(report.services):
        if number:
            echo()
        for line in report_lines(service, report.enforcing.get(service.service, 0)):
            echo(line)
    for address, reason in sorted(report.silent.items()):
        write_error(f"{address} does not answer: {reason}")
    if report.answering and not report.services:
        write_error('no service observes; set mode = "observe" in [services.NAME], and restart its workers')


def report_lines(service: ServiceObservations, enforcing: int = 0) -> Iterator[str]:
    """Yield the lines of the report about one service.  `enforcing`: number of its workers that enforce."""
    kept = "" if service.ttl_seconds is None else f", keeps records for {_duration(service.ttl_seconds)}"
    yield f"{service.service}: observes{kept}"
    if enforcing:
        yield f"  its modes are mixed: {enforcing:,} of its workers enforce, so that nothing is guaranteed yet"
    rows = [("deliveries", service.deliveries, "since its workers were started")]
    rows += [("duplicates", service.duplicates, _percent(service.duplicates, service.deliveries))]
    rows += [(f"  {kind.value}", service.count(kind), meaning) for kind, meaning in _KINDS.items()]
    rows += [("  other payload", service.other_payloads, "a guard would dead-letter them as key_reused")]
    rows += [("retried", service.count(Observed.RETRIED), "after a failure or a crash; a guard runs them again, too")]
    rows += [("not observed", service.count(Observed.FAILED), "the store did not answer, or there was no key")]
    if service.count(Observed.UNRECORDED):
        rows += [("unrecorded", service.count(Observed.UNRECORDED), "their later duplicates are not found")]
    width = max(len(f"{number:,}") for _, number, _ in rows)
    for name, number, meaning in rows:
        yield f"  {name:<16}{number:>{width},}  {meaning}".rstrip()
    yield from _gap_lines(service)


def _gap_lines(service: ServiceObservations) -> Iterator[str]:
    if not service.measured:
        yield "  no duplicates with a known gap yet: nothing can be said about a ttl"
    else:
        median, most = service.gap_of(0.5), service.gap_of(0.9)
        yield f"  half of them came {_bound(median)} after the first had ended, 90 % {_bound(most)}"
        for share in (0.99, 0.999):
            yield f"  a ttl of {_bound(service.gap_of(share))} would have caught {share * 100:g} % of them"
    if service.ttl_seconds is not None:
        yield f"  duplicates that come more than {_duration(service.ttl_seconds)} later are invisible: they look new"


def _bound(seconds: float | None) -> str:
    """Format an upper bound of a gap."""
    assert seconds is not None, "gaps are known"
    if math.isinf(seconds):
        return "more than 90 d"
    return f"at most {_duration(max(seconds, 1.0))}"


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else format_duration(timedelta(seconds=seconds))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} % of the deliveries" if whole else ""
