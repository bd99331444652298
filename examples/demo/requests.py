"""The requests: one JSON object per line, with the fields of `ExecutionRequested` and the user."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, ValidationError

from examples.demo.errors import DemoError
from examples.demo.journal import Journal
from integr8s_idem import EventMetadata
from services.events import ExecutionRequested, ScriptRequest

FILE = Path(__file__).parents[1] / "requests.jsonl"


class DemoRequest(ScriptRequest):
    """One line of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    user_id: str | None = None


def read_requests(path: Path) -> list[DemoRequest]:
    """Read the requests in `path`.

    Raises:
        DemoError: The file cannot be read, or a line is not a valid request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DemoError(f"{path} cannot be read: {error.strerror}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(DemoRequest.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "line"
            raise DemoError(f"{path}, line {number}: {where}: {first['msg']}") from None
    if not requests:
        raise DemoError(f"{path} contains no requests")
    return requests


def as_events(requests: list[DemoRequest], run: str, journal: Journal) -> list[ExecutionRequested]:
    """Return the events of the requests, with ids of this run."""
    events = []
    for number, request in enumerate(requests, 1):
        execution_id = f"{run}-{number:03}"
        fields = request.model_dump(exclude={"user_id"})
        if request.language == "python":
            fields["script"] = journal.with_entry(execution_id, request.script)
        metadata = EventMetadata(service_name="demo", correlation_id=execution_id, user_id=request.user_id)
        events.append(ExecutionRequested(execution_id=execution_id, metadata=metadata, **fields))
    return events
