"""`integr8s-idem graph`: draw the dependency graphs of the services' containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from integr8s_idem.cli.application_loader import load_application, select_services
from integr8s_idem.cli.common import SettingsFile, exit_status_of
from integr8s_idem.cli.output import write_error, write_text
from integr8s_idem.config import load_settings
from integr8s_idem.operations.atomic_file import open_atomically

if TYPE_CHECKING:
    from integr8s_idem.operations.graphs import ServiceGraph


class Format(str, Enum):
    """Output format."""

    MERMAID = "mermaid"
    HTML = "html"
    JSON = "json"


_BY_SUFFIX: Final = {".html": Format.HTML, ".htm": Format.HTML, ".json": Format.JSON}


def graph_command(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="The platform, such as billing.workers:platform.")
    ],
    service: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Draw only this service; can be repeated.")
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="[default: by the suffix of FILE, otherwise mermaid]", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of standard output.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    settings: SettingsFile = None,
) -> None:
    """Draw the dependency graph of each service's container.

    The graph shows which dispatcher each service gets.  It is drawn as Mermaid, as an HTML page that needs no network,
    or as JSON.  The containers are created with these settings and closed again; no connection is opened.
    """

    def draw() -> int:
        from integr8s_idem.operations.graphs import (
            make_graphs,  # imported here, since it needs Dishka's plotter and a driver
        )

        platform = load_application(target)
        names = [each.name for each in select_services(platform, service or [])]
        loaded = load_settings(settings, platform.settings_type, services=platform.services)
        graphs = asyncio.run(make_graphs(platform, loaded, names))
        file = None if output is None or str(output) == "-" else output
        _write(_render(form or _format_of(file), graphs, target), file, replace=force)
        return 0

    raise typer.Exit(exit_status_of(draw))


def _format_of(file: Path | None) -> Format:
    return _BY_SUFFIX.get(file.suffix.lower(), Format.MERMAID) if file is not None else Format.MERMAID


def _render(form: Format, graphs: Sequence[ServiceGraph], target: str) -> str:
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
    with open_atomically(file, replace=replace) as opened:
        opened.write(text)
    write_error(f"wrote {file}")
