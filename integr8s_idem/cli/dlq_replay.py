"""`integr8s-idem dlq replay`: count the dead letters, ask for confirmation, publish, and report."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from integr8s_idem.cli.common import FAILURE
from integr8s_idem.cli.confirmation import confirm
from integr8s_idem.cli.dlq_output import count_text, report_text
from integr8s_idem.cli.output import echo, write_error, write_report
from integr8s_idem.cli.progress import progress
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.audit import audited, store_place
from integr8s_idem.operations.dead_letter_reader import open_dead_letter_reader
from integr8s_idem.operations.dead_letter_records import open_record_lookup
from integr8s_idem.operations.dead_letter_replay import Replayer, ReplayStatus, Report
from integr8s_idem.operations.dead_letter_search import Search, SearchPlan, pages, plan_search
from integr8s_idem.operations.replay_rate import ReplayRate
from integr8s_idem.worker import EventPublisher


@dataclass
class ReplayCommand:
    """The options of `dlq replay`, and its execution."""

    search: Search
    again: bool
    """Also publish dead letters that have already been replayed, according to the store."""
    as_json: bool
    audit_file: str | None
    to: str | None = None
    """Topic to publish to instead of the original topics."""
    rate: float | None = None
    """Maximum replays per second."""

    def run(self, *, yes: bool, dry_run: bool) -> int:
        """Run the command and return its exit status.

        Raises:
            ApplicationError: There is no terminal to ask for confirmation; topic `to` does not exist; or the services
                refuse unsigned replays.
            BrokerUnavailableError: The dead letters cannot be read.
        """
        # The same offset ranges are counted, confirmed and published.
        plan = asyncio.run(self._plan())
        print_note(plan)
        self._check(plan)
        if dry_run or not yes:
            preview = Report()
            asyncio.run(self._replay(plan, preview, None, "counting"))
            if dry_run or not preview.published:
                self._print_preview(preview)
                return 0
            write_error(report_text(preview, "to replay"))
            if not confirm(f"Replay {count_text(preview.published)}?"):
                return FAILURE
        report = Report()
        brokers = self.search.settings.kafka.bootstrap_servers
        options = {
            **self.search.as_json(),
            "topics": plan.dead_letter_topics,
            "again": self.again,
            "to": self.to,
            "rate": self.rate,
            "brokers": brokers,
            "store": store_place(self.search.settings),
        }
        with audited("dlq replay", options, self.audit_file) as entry:
            try:
                asyncio.run(self._publish(plan, report))
            except BaseException:
                self._report(report, "replayed before the command was interrupted; run it again to replay the rest")
                raise
            finally:
                entry.counts.update(report.counts())
        is_written = self._report(report, "replayed")
        return FAILURE if ReplayStatus.NOT_CONFIRMED in report.skipped or not is_written else 0

    def _check(self, plan: SearchPlan) -> None:
        if self.to is not None and self.to not in plan.topics:
            near = get_close_matches(self.to, plan.topics, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ApplicationError(f'topic "{self.to}" not found{hint}; --to requires the full name of a topic')
        replay = self.search.settings.replay
        if replay.keys:
            return
        if replay.unsigned_policy == "refuse":
            raise ApplicationError(
                'the services would refuse this replay: [replay] sets unsigned = "refuse" and no secret to sign with. '
                "Set the secret of the services, for example in INTEGR8S_IDEM_REPLAY__SECRET"
            )
        if replay.unsigned_policy == "failed_only":
            write_error(
                "The replay is not signed, because [replay] has no secret: services handle again only events that "
                "their store has recorded as failed, and treat the others as ordinary deliveries"
            )

    async def _plan(self) -> SearchPlan:
        async with open_dead_letter_reader(self.search.settings.kafka) as reader:
            return await plan_search(self.search, reader)

    async def _publish(self, plan: SearchPlan, report: Report) -> None:
        publisher = EventPublisher(self.search.settings.kafka)
        try:
            await self._replay(plan, report, publisher, "replaying")
        finally:
            await publisher.close()

    async def _replay(self, plan: SearchPlan, report: Report, publisher: EventPublisher | None, title: str) -> None:
        """Replay all matching dead letters of the plan; without a publisher, count them."""
        settings = self.search.settings
        async with (
            open_dead_letter_reader(settings.kafka) as reader,
            open_record_lookup(settings, query=not self.again) as records,
        ):
            replayer = Replayer(plan.topics, records, publisher, report, settings, self.to)
            rate = ReplayRate(self.rate if publisher else None)
            with progress(title, plan.length) as advance:
                async for page in pages(self.search, plan, reader):
                    for part in rate.parts(page):
                        await rate.wait()
                        before = report.published
                        await replayer.replay(part.dead_letters)
                        rate.note(report.published - before)
                        advance(part.offsets_read)
        if records.problem:
            write_error(
                "Cannot query the store, so dead letters that have already been replayed are included; publishing them "
                f"again has no effect: {records.problem}"
            )

    def _print_preview(self, report: Report) -> None:
        echo(self._text(report, "to replay", dry_run=True))

    def _report(self, report: Report, done: str) -> bool:
        """Print the report of a replay and return whether standard output could be written."""
        return write_report(self._text(report, done, dry_run=False), report_text(report, done))

    def _text(self, report: Report, done: str, *, dry_run: bool) -> str:
        answer: dict[str, Any] = {"dry_run": dry_run, **report.as_json()}
        return json.dumps(answer, indent=2) if self.as_json else report_text(report, done)


def print_note(plan: SearchPlan) -> None:
    """Explain on standard error why there are no topics; wrong settings look the same as no dead letters."""
    if plan.note:
        write_error(plan.note)
