"""A replay on the command line: counted, agreed, done, told."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from integr8s_idem.cli.common import FAILURE
from integr8s_idem.cli.confirmation import agreed
from integr8s_idem.cli.dlq_output import counted, report_text
from integr8s_idem.cli.output import say, write_error
from integr8s_idem.cli.progress import progress
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.audit import audited, store_place
from integr8s_idem.operations.dead_letter_reader import open_letter_box
from integr8s_idem.operations.dead_letter_records import open_letter_records
from integr8s_idem.operations.dead_letter_replay import Fate, Replayer, Report
from integr8s_idem.operations.dead_letter_search import Found, Search, found_by, pages
from integr8s_idem.worker import EventPublisher


@dataclass
class ReplayCommand:
    """What was asked for, and how it is answered."""

    search: Search
    again: bool
    """Whether letters are published that the store says were replayed."""
    as_json: bool
    audit_file: str | None
    to: str | None = None
    """The topic to publish to, if it is not the one that a dead-letter topic is named after."""

    def run(self, *, yes: bool, dry_run: bool) -> int:
        """The exit status.

        Raises:
            ApplicationError: Nobody is there to be asked; there is no topic `to`; or the services refuse replays.
            BrokerUnavailableError: The letters cannot be read.
        """
        # What is there now is what is counted, asked about and published.
        found = asyncio.run(self._look())
        tell_note(found)
        self._check(found)
        if dry_run or not yes:
            plan = Report()
            asyncio.run(self._pass(found, plan, None, "counting"))
            if dry_run or not plan.published:
                self._tell(plan, "to be replayed", dry_run=True)
                return 0
            write_error(report_text(plan, "to be replayed"))
            if not agreed(f"Publish {counted(plan.published)} again?"):
                return FAILURE
        report = Report()
        brokers = self.search.settings.kafka.bootstrap_servers
        where = {"brokers": brokers, "store": store_place(self.search.settings)}
        asked = {**self.search.as_json(), "topics": found.named, "again": self.again, "to": self.to, **where}
        with audited("dlq replay", asked, self.audit_file) as entry:
            try:
                asyncio.run(self._publish(found, report))
            except BaseException:
                self._tell(
                    report, "replayed before it was cut short; what was not, can be replayed by the same command"
                )
                raise
            finally:
                entry.counts.update(report.counts())
        self._tell(report, "replayed")
        return FAILURE if Fate.NOT_CONFIRMED in report.left_out else 0

    def _check(self, found: Found) -> None:
        if self.to is not None and self.to not in found.topics:
            near = get_close_matches(self.to, found.topics, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ApplicationError(f'there is no topic "{self.to}"{hint}: --to takes the whole name of one')
        replay = self.search.settings.replay
        if replay.keys:
            return
        if replay.unsigned_policy == "refuse":
            raise ApplicationError(
                'the services refuse these replays: [replay] has unsigned = "refuse" and no secret to sign them with. '
                "Set the secret of the services, for example by INTEGR8S_IDEM_REPLAY__SECRET"
            )
        if replay.unsigned_policy == "failed_only":
            write_error(
                "not signed, as [replay] has no secret: services run again only what their store knows as failed, and "
                "take the rest for ordinary deliveries"
            )

    async def _look(self) -> Found:
        async with open_letter_box(self.search.settings.kafka) as box:
            return await found_by(self.search, box)

    async def _publish(self, found: Found, report: Report) -> None:
        publisher = EventPublisher(self.search.settings.kafka)
        try:
            await self._pass(found, report, publisher, "replaying")
        finally:
            await publisher.close()

    async def _pass(self, found: Found, report: Report, publisher: EventPublisher | None, title: str) -> None:
        """Take all letters that are meant; what comes while that goes on is not among them."""
        settings = self.search.settings
        async with open_letter_box(settings.kafka) as box, open_letter_records(settings, ask=not self.again) as records:
            replayer = Replayer(found.topics, records, publisher, report, settings, self.to)
            with progress(title, found.length) as advance:
                async for page in pages(self.search, found, box):
                    await replayer.take(page.letters)
                    advance(page.passed)
        if records.problem:
            write_error(
                f"the store tells nothing, so that letters which were replayed already count as well; published again, "
                f"they change nothing: {records.problem}"
            )

    def _tell(self, report: Report, done: str, *, dry_run: bool = False) -> None:
        told: dict[str, Any] = {"dry_run": dry_run, **report.as_json()}
        say(json.dumps(told, indent=2) if self.as_json else report_text(report, done))


def tell_note(found: Found) -> None:
    """A clean house and wrong settings look alike."""
    if found.note:
        write_error(found.note)
