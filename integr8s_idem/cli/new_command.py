"""`integr8s-idem new`: create a small working application with tests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.tree import Tree

from integr8s_idem.cli.common import FAILURE, exit_status_of
from integr8s_idem.cli.output import safe_console, write_report
from integr8s_idem.config.message_text import installing
from integr8s_idem.operations.application_template import Store, application_files, missing_extras, write_application


def new_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the application and its package, such as billing.")
    ],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="Write to FOLDER.  [default: ./NAME]")
    ] = None,
    store: Annotated[Store, typer.Option(help="Store for its records.")] = Store.REDIS,
) -> None:
    """Create a small working application with tests."""

    def write() -> int:
        folder = into or Path(name)
        files = application_files(name, store)
        write_application(folder, files)
        lines = [_tree(folder, list(files))]
        if missing := missing_extras(store):
            lines.append(f"\nNot installed yet: {installing(','.join(missing))}")
        lines += [
            "\nNext:",
            f"    cd {shlex.quote(str(folder))}",
            "    python -m pytest",
            f"    integr8s-idem run {name}.workers:platform --embedded",
        ]
        return 0 if write_report("\n".join(lines), f"{len(files)} files written to {folder}/") else FAILURE

    raise typer.Exit(exit_status_of(write))


def _tree(folder: Path, files: list[Path]) -> str:
    tree = Tree(f"{folder}/", guide_style="dim")
    branches: dict[Path, Tree] = {Path(): tree}
    for path in sorted(files, key=lambda path: (len(path.parts) == 1, path)):
        for parent in reversed(path.parents[:-1]):
            if parent not in branches:
                branches[parent] = branches[parent.parent].add(f"{parent.name}/")
        branches[path.parent].add(path.name)
    console = safe_console(color_system=None)  # `write_report` would escape styles
    with console.capture() as captured:
        console.print(tree)
    return captured.get().rstrip("\n")
