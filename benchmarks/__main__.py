"""Ask every question but that of the stores: `python -m benchmarks`, see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from benchmarks.machine import machine
from benchmarks.measuring import Flat
from benchmarks.questions import KEYS, QUESTIONS, Question
from benchmarks.rounds import Options, Tell, at_least_one
from integr8s_idem.cli.garbage_collection import collect_rarely


def asked(options: Options, file: Path | None) -> Flat:
    """Ask what `options` want, and save after each question: a run that is cut off has not been for nothing."""
    start = time.perf_counter()
    found = machine()
    # What is measured in part keeps the rest of its numbers; a whole run keeps nothing old.
    before = kept(file, found) if file and file.exists() and options.only else {}
    for name, question in QUESTIONS.items():
        if not options.wants(name, *question.keys):
            continue

        def tell(line: str, name: str = name) -> None:
            print(f"{time.perf_counter() - start:6.1f} s  {name}: {line}", file=sys.stderr, flush=True)

        tell("starting")
        found |= {f"{name}.rounds": options.rounds, f"{name}.turn_seconds": options.seconds}
        found |= uvloop.run(_answer(question, replace(options.of(name), known={**before, **found}), tell))
        found |= {f"{name}.measured_at": datetime.now(UTC).isoformat(timespec="minutes")}
        if file is not None:
            file.write_text(_sorted({**before, **found}), encoding="utf-8")
    return found


def kept(file: Path, here: Flat) -> Flat:
    """The numbers in `file`, which were found with what is here.

    Raises:
        SystemExit: They were not: beside each other such numbers would tell of no machine at all.
    """
    before: Flat = json.loads(file.read_text(encoding="utf-8"))
    if other := [f"{name} {before.get(name)!r}, here {value!r}" for name, value in here.items()
                 if before.get(name) != value]:  # fmt: skip
        raise SystemExit(
            f"{file} was written elsewhere or with other versions: {'; '.join(other)}. "
            "Give another file to --json, or measure everything anew, without --only."
        )
    return before


async def _answer(question: Question, options: Options, tell: Tell) -> Flat:
    collect_rarely()  # as a worker does, and for everybody who takes part
    return await question.measured(options, tell)


def _sorted(found: Flat) -> str:
    return json.dumps(dict(sorted(found.items())), indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="KEY",
        choices=(*QUESTIONS, *KEYS),
        help="only this figure, or all of this question with whoever takes part; can be given again.  "
        f"Questions: {', '.join(QUESTIONS)}.  Figures: {', '.join(KEYS)}",
    )
    parser.add_argument("--rounds", type=at_least_one, default=7, help="that are counted (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    told = parser.parse_args()
    found = asked(Options(told.rounds, told.seconds, frozenset(told.only or ())), told.json)
    if told.json is None:
        print(_sorted(found), end="")


if __name__ == "__main__":
    main()
