"""Options that the `dlq` commands share, and the searches that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_filter import DeadLetterFilter, parse_time
from integr8s_idem.operations.dead_letter_groups import checked_group_id
from integr8s_idem.operations.dead_letter_search import Search
from integr8s_idem.operations.dead_letters import Place

App = Annotated[
    str | None, typer.Option("--app", metavar="MODULE:APP", help="Search only the dead-letter topics of this platform.")
]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="NAME", help="Search only this dead-letter topic, or that of this topic."),
]
Services = Annotated[
    list[str] | None, typer.Option("--service", metavar="NAME", help="Match only events that this service gave up.")
]
Reasons = Annotated[
    list[str] | None, typer.Option("--reason", metavar="NAME", help="Match only this reason, such as handler_failed.")
]
Errors = Annotated[
    list[str] | None,
    typer.Option("--error", metavar="TEXT", help="Match only this class of error, or part of its message."),
]
Types = Annotated[list[str] | None, typer.Option("--event-type", metavar="NAME", help="Match only this event type.")]
Keys = Annotated[
    list[str] | None, typer.Option("--key", metavar="KEY", help="Match only this idempotency key or Kafka key.")
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Match only dead letters since TIME: an age such as 2h, or ISO 8601 (UTC by default)."
    ),
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help="Match only dead letters before TIME; format as for --since.")
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after N dead letters.")]
InGroups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="ID", help="Match only this group, as `dlq list --group` prints it."),
]


@dataclass(frozen=True)
class Filters:
    """Filter options as typed."""

    services: Sequence[str] | None = None
    reasons: Sequence[str] | None = None
    errors: Sequence[str] | None = None
    event_types: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    since: str | None = None
    until: str | None = None
    groups: Sequence[str] | None = None

    def parsed(self) -> DeadLetterFilter:
        if "" in (self.errors or ()):  # every message contains it
            raise ApplicationError("--error is empty; omit it to match all errors")
        now = datetime.now(UTC)
        return DeadLetterFilter(
            services=tuple(self.services or ()),
            reasons=tuple(self.reasons or ()),
            errors=tuple(self.errors or ()),
            event_types=tuple(self.event_types or ()),
            keys=tuple(self.keys or ()),
            groups=tuple(map(checked_group_id, self.groups or ())),
            since=parse_time(self.since, now) if self.since is not None else None,
            until=parse_time(self.until, now) if self.until is not None else None,
        )


@dataclass(frozen=True)
class Source:
    """Where to search."""

    settings_file: Path | None
    embedded: bool
    application: str | None


def search_of(
    source: Source,
    topics: Sequence[str] | None,
    filters: Filters,
    limit: int | None,
    places: Sequence[str] | None = None,
) -> Search:
    platform = optional_application(source.application)
    return Search(
        command_settings(source.settings_file, platform, embedded=source.embedded),
        platform,
        tuple(topics or ()),
        tuple(dict.fromkeys(map(Place.of, places or ()))),
        filters.parsed(),
        limit,
    )
