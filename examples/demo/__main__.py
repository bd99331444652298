"""`python -m examples.demo`: exits with 0 for a good verdict, 1 for a bad one, and 2 without a verdict."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integr8s_idem.errors import IdempotencyError

try:
    from examples.demo.display import Display
    from examples.demo.errors import DemoError
    from examples.demo.play import DemoOptions, Outcome, play
    from examples.demo.requests import FILE, read_requests
    from examples.demo.settings import STORES
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"no verdict: this needs {error.name}: pip install '.[embedded,sql]' in the checkout", file=sys.stderr)
    sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    options = _options(arguments)
    try:
        demo_options = DemoOptions(
            read_requests(options.requests), options.settings, options.store, options.deadline, options.keep
        )
        with Display() as display:
            outcome = asyncio.run(_play(demo_options, display))
            _print_verdict(display, outcome)
    except (DemoError, IdempotencyError) as error:
        print(f"no verdict: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(outcome), indent=2) + "\n", encoding="utf-8")
    return 0 if outcome.verdict.good else 1


async def _play(demo_options: DemoOptions, display: Display) -> Outcome:
    """Handle SIGTERM like Ctrl-C, so that everything is cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await play(demo_options, display)


def _print_verdict(display: Display, outcome: Outcome) -> None:
    for line in outcome.verdict.lines():
        display.say(line)
    for line in outcome.complaints[:20]:
        display.say(f"logged      {line}")
    good = "good: nothing lost, nothing run twice unnecessarily" if outcome.verdict.good else "NOT good"
    display.say(f"verdict     {good}; {outcome.broker}, {outcome.store}, {outcome.seconds:.0f} s")


def _as_json(outcome: Outcome) -> dict[str, Any]:
    servers = {"broker": outcome.broker, "store": outcome.store, "seconds": round(outcome.seconds, 1)}
    return {**outcome.verdict.numbers(), **servers}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="Run the reference platform under faults."
    )
    parser.add_argument("--requests", type=Path, default=FILE, metavar="FILE", help="requests, as JSON lines")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings file of a Kafka and a Redis to use")
    parser.add_argument(
        "--store",
        choices=STORES,
        default="redis",
        help="where to keep records; with sqlite and postgresql, next to the platform's own tables",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict to this file, as JSON")
    parser.add_argument("--deadline", type=float, default=110.0, metavar="SECONDS", help="when to stop waiting")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs, database and journal")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
