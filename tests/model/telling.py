"""Format explorations and counterexamples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.model.delivery import TOKENS_OF_A_TASK
from tests.model.explorer import Counterexample, Exploration
from tests.model.state import Lease, Phase, Record, Setup, State, Step, Task

KEYS = "abcdefgh"


def tell(exploration: Exploration) -> str:
    """Summarize an exploration in a line."""
    return (
        f"{exploration.states:,} states, {exploration.steps:,} steps, depth {exploration.depth}, "
        f"{exploration.seconds:.1f} s"
    )


def table(found: Counterexample, setup: Setup) -> str:
    """Format the path to a broken rule: a line per step with its change and the records afterwards."""
    records = [f"record {KEYS[key]}" for key in range(len(found.start.keys))]
    rows = [("", "who", "does", "and then", *records, "offsets")]
    before = found.start
    for number, (step, after) in enumerate(found.moves, 1):
        rows.append((str(number), who(step), what(step, setup), _change(step, before, after), *_standing(after, setup)))
        before = after
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"broken: {found.rule.value}"])


def as_json(found: Counterexample, setup: Setup) -> dict[str, Any]:
    """Return a counterexample as JSON data."""
    steps = []
    for step, after in found.moves:
        *records, offsets = _standing(after, setup)
        steps.append({"who": who(step), "does": what(step, setup), "records": records, "offsets": offsets})
    return {"rule": found.rule.name, "says": found.rule.value, "steps": steps}


def who(step: Step) -> str:
    """Return the worker or the key of a step."""
    return f"W{step.worker + 1}" if step.worker >= 0 else f"key {KEYS[step.key]}"


def what(step: Step, setup: Setup) -> str:
    if step.worker < 0 or step.message < 0:
        return step.what
    message = setup.messages[step.message]
    return f"{KEYS[message.key]}@{message.offset}: {step.what}"


def _change(step: Step, before: State, after: State) -> str:
    """Return the phase of the delivery after a step, if the step changed it."""
    if step.worker < 0 or step.message < 0:
        return ""
    task, was = after.workers[step.worker][step.message], before.workers[step.worker][step.message]
    return "" if task.phase is was.phase else _phase(task)


def _phase(task: Task) -> str:
    if task.phase is Phase.RUNNING and task.held is not None:
        return f"running, attempt {task.held.attempt}, fence {task.held.fence}"
    return task.phase.value


def _standing(state: State, setup: Setup) -> Sequence[str]:
    records = [_record(key.record, setup) for key in state.keys]
    return (*records, " ".join(str(partition.committed) for partition in state.partitions))


def _record(record: Record | None, setup: Setup) -> str:
    if record is None:
        return "-"
    run = f"attempt {record.attempt}, fence {record.fence}"
    if record.lease in (Lease.SCHEDULED, Lease.DUE):
        return f"{record.lease.value}: {run}"
    if not record.token:
        return f"{record.status.value}: {run}"
    worker = (record.token - 1) // TOKENS_OF_A_TASK // len(setup.messages)
    return f"W{worker + 1} {record.lease.value}: {run}"
