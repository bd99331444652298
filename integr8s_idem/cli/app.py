"""The command line application: `run`, `settings`, and the commands of the other modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from integr8s_idem.cli.application_loader import (
    import_from_here,
    load_application,
    optional_application,
    select_services,
)
from integr8s_idem.cli.common import INVALID_INPUT, AppOption, Json, SettingsFile, exit_status_of
from integr8s_idem.cli.dlq_commands import dlq_app
from integr8s_idem.cli.doctor_command import DoctorCommand, doctor_command
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.errors_command import errors_command
from integr8s_idem.cli.graph_command import graph_command
from integr8s_idem.cli.keys_commands import keys_app
from integr8s_idem.cli.new_command import new_command
from integr8s_idem.cli.observe_command import observe_command
from integr8s_idem.cli.output import closable_output, echo, write_error, write_text
from integr8s_idem.cli.processes import (
    Processes,
    WorkerProcessOption,
    process_count,
    supervise,
    supervisor_link,
    worker_launch,
)
from integr8s_idem.cli.relay_command import relay_command
from integr8s_idem.cli.run_command import LogFormat, Run, run
from integr8s_idem.cli.store_commands import store_app
from integr8s_idem.cli.top_command import top_command
from integr8s_idem.config import Settings, settings_warnings
from integr8s_idem.config.example import example_settings
from integr8s_idem.config.loading import ignored_sections, settings_file, settings_source
from integr8s_idem.config.message_text import missing_extra
from integr8s_idem.errors import SettingsError, SettingsMistake
from integr8s_idem.handlers.failure_settings import check_failures
from integr8s_idem.runtime import Platform
from integr8s_idem.runtime.key_warnings import key_warnings
from integr8s_idem.runtime.observe_mode import mode_warnings
from integr8s_idem.telemetry.setup import check_exporter

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # its help calls every flag a <bool>
)
settings_app = typer.Typer(help="Check settings and print an example.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(settings_app, name="settings")
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(dlq_app, name="dlq")
app.command("doctor", cls=DoctorCommand)(doctor_command)
app.command("errors")(errors_command)
app.command("graph")(graph_command)
app.command("top")(top_command)
app.command("observe")(observe_command)
app.command("relay")(relay_command)
app.command("new")(new_command)

Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The platform, such as billing.workers:platform.")]


def _print_version(is_requested: bool) -> None:
    def show() -> int:
        echo(f"integr8s-idem {version('integr8s-idem')}")
        return 0

    if is_requested:
        raise typer.Exit(exit_status_of(show))


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
]


@app.callback()
def _common(show_version: Version = False) -> None:
    """Handle each event once, even if Kafka delivers it twice."""


@app.command("run")
def run_command(
    target: Target,
    service: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this service; can be repeated.")
    ] = None,
    settings: SettingsFile = None,
    embedded: Annotated[bool, typer.Option("--embedded", help="Start an embedded Kafka and Redis.")] = False,
    log: Annotated[
        LogFormat | None,
        typer.Option(
            "--log", help="Format of log lines.  [default: console on a terminal, otherwise json]", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --log json.")] = False,
    processes: Processes = "1",
    worker_process: WorkerProcessOption = None,
) -> None:
    """Run the services of a platform.

    Ctrl-C or SIGTERM drains them and exits.

    With --processes, several worker processes on one machine divide the partitions.  One that ends is started again,
    and /metrics, /healthz and /readyz report all of them as one.  On Kubernetes, keep one process per pod, and scale
    pods.
    """

    def start() -> int:
        link = supervisor_link(worker_process) if worker_process is not None else None
        number = 1 if link is not None else process_count(processes)
        # Before the application can change its folder and environment.
        launch = worker_launch() if number > 1 else None
        platform = load_application(target)
        services = select_services(platform, service or [])
        chosen = LogFormat.JSON if as_json else log
        options = Run(platform, services, settings, embedded, chosen, link)
        if launch is None:
            return run(options)
        arguments = [target, *(f"--service={name}" for name in service or [])]
        arguments += [f"--settings={settings}"] if settings is not None else []
        arguments += [f"--log={chosen.value}"] if chosen is not None else []
        return supervise(options, number, launch.adding(*arguments))

    raise typer.Exit(exit_status_of(start))


@settings_app.command("check")
def check_command(settings: SettingsFile = None, application: AppOption = None, as_json: Json = False) -> None:
    """Check the settings and report all mistakes at once."""

    def check() -> int:
        found = optional_application(application)
        mistakes, warnings = _check(settings, found)
        show = _print_json if as_json else _print_text
        with closable_output():
            show(settings_source(settings), mistakes, warnings)
        if found is None and settings_file(settings) is None:
            write_error("no settings.toml in this folder: environment variables and defaults were checked")
        ignored = [] if found or mistakes else ignored_sections(settings)
        if ignored:
            names = ", ".join(f"[{name}]" for name in ignored)
            write_error(f"{names}: not checked; use --app MODULE:APP to check the sections of an application")
        return INVALID_INPUT if mistakes else 0

    raise typer.Exit(exit_status_of(check))


@settings_app.command("example")
def example_command(application: AppOption = None) -> None:
    """Print a settings.toml with every setting, its default and its purpose."""

    def example() -> int:
        platform = optional_application(application)
        write_text(example_settings(platform.settings_type if platform else Settings))
        return 0

    raise typer.Exit(exit_status_of(example))


def _check(file: Path | None, platform: Platform | None) -> tuple[Sequence[SettingsMistake], Sequence[SettingsMistake]]:
    try:
        settings = command_settings(file, platform)
    except SettingsError as error:
        return error.mistakes, ()
    warnings = settings_warnings(settings, platform.services if platform else [])
    if platform is not None:
        warnings += key_warnings(platform, settings)
        warnings += mode_warnings(platform, settings)
    import_from_here()
    failures = check_failures(settings, platform.services if platform else None)
    return [*_missing_extras(settings), *failures], warnings


def _missing_extras(settings: Settings) -> Iterator[SettingsMistake]:
    if missing := missing_extra(settings.store.kind):
        yield SettingsMistake("store.kind", f'= "{settings.store.kind}" {missing}')
    try:
        check_exporter(settings.telemetry)
    except SettingsError as error:
        yield from error.mistakes


def _print_json(source: str, mistakes: Sequence[SettingsMistake], warnings: Sequence[SettingsMistake]) -> None:
    def plain(found: Sequence[SettingsMistake]) -> list[dict[str, Any]]:
        return [{"path": each.path, "message": each.message} for each in found]

    answer = {"source": source, "ok": not mistakes, "mistakes": plain(mistakes), "warnings": plain(warnings)}
    echo(json.dumps(answer, indent=2))


def _print_text(source: str, mistakes: Sequence[SettingsMistake], warnings: Sequence[SettingsMistake]) -> None:
    if mistakes:
        write_error(SettingsError(source, mistakes))
        return
    echo(f"{source}: ok")
    width = max((len(warning.path) for warning in warnings), default=0)
    for warning in warnings:
        echo(f"  warning  {warning.path:<{width}}  {warning.message}")
