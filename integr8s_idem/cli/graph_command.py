"""`integr8s-idem graph`: what the containers hold, and who gets which dispatcher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from integr8s_idem.cli.application_loader import chosen_services, load_application
from integr8s_idem.cli.common import SettingsFile, answered
from integr8s_idem.cli.output import write_error, write_text
from integr8s_idem.config import load_settings
from integr8s_idem.operations.atomic_file import whole_file

if TYPE_CHECKING:
    from integr8s_idem.operations.graphs import ServiceGraph


class Format(str, Enum):
    """What to draw as."""

    MERMAID = "mermaid"
    HTML = "html"
    JSON = "json"


_BY_SUFFIX: Final = {".html": Format.HTML, ".htm": Format.HTML, ".json": Format.JSON}


def graph_command(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The platform, as in billing.workers:platform.")],
    service: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one; can be repeated.")] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="[default: as the end of FILE says, else mermaid]", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; - or nothing prints it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    settings: SettingsFile = None,
) -> None:
    """Draw what containers hold, and who gets which dispatcher.

    Service by service: as Mermaid, as an HTML page that needs no network, or as JSON.  The containers are made with
    these settings, looked at and closed; nothing is connected.
    """

    def draw() -> int:
        from integr8s_idem.operations.graphs import (
            drawn,  # it knows Dishka's plotter and a driver: other commands do not
        )

        platform = load_application(target)
        names = [each.name for each in chosen_services(platform, service or [])]
        read = load_settings(settings, platform.settings_type, services=platform.services)
        graphs = asyncio.run(drawn(platform, read, names))
        file = None if output is None or str(output) == "-" else output
        _write(_as(form or _form_of(file), graphs, target), file, replace=force)
        return 0

    raise typer.Exit(answered(draw))


def _form_of(file: Path | None) -> Format:
    return _BY_SUFFIX.get(file.suffix.lower(), Format.MERMAID) if file is not None else Format.MERMAID


def _as(form: Format, graphs: Sequence[ServiceGraph], target: str) -> str:
    match form:
        case Format.MERMAID:
            from integr8s_idem.operations.graphs.mermaid import as_mermaid

            return as_mermaid(graphs)
        case Format.HTML:
            from integr8s_idem.operations.graphs.page import as_page

            return as_page(graphs, target)
        case Format.JSON:
            return json.dumps({"application": target, "services": [asdict(graph) for graph in graphs]}, indent=2) + "\n"


def _write(text: str, file: Path | None, *, replace: bool) -> None:
    if file is None:
        write_text(text)
        return
    with whole_file(file, replace=replace) as opened:
        opened.write(text)
    write_error(f"{file} is written")
