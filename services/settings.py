"""The platform's own section of settings.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from integr8s_idem.config import Section

DATABASES = ("sqlite+aiosqlite", "postgresql+asyncpg")


class PlatformSection(Section):
    """Where the platform keeps its state, how much it runs, and what a script may use."""

    database_url: str = "sqlite+aiosqlite:///platform.db"
    """State of all four services: sqlite+aiosqlite:///file, or postgresql+asyncpg://user:password@host/database."""
    max_running: PositiveInt = 8
    """Executions running at once."""
    max_running_per_user: PositiveInt = 4
    """Of one user; those without a user count as one."""
    max_timeout_seconds: PositiveFloat = 300
    """A request for more time is rejected."""
    max_memory_mb: PositiveInt = 2_048
    """A request for more memory is rejected."""
    max_cpu: PositiveFloat = 4
    """A request for more cores is rejected."""
    default_memory_mb: Annotated[int, Field(ge=16)] = 256
    """Memory of a script that asks for no amount."""
    runner: Literal["subprocess"] = "subprocess"
    """What runs scripts."""
    interpreter: str | None = None
    """Python for the scripts; the worker's own if not given."""
    work_folder: str | None = None
    """Where each run gets a temporary folder; the system's if not given."""
    output_limit_bytes: Annotated[int, Field(ge=0, le=80_000)] = 65_536
    """Kept of stdout, and as much of stderr; the rest is cut off and says so."""
    output_flood_bytes: PositiveInt = 16_777_216
    """A script that writes more than this is ended."""
    file_limit_bytes: PositiveInt = 67_108_864
    """Largest file that a script may write."""
    max_open_files: Annotated[int, Field(ge=16)] = 256
    """Files that a script may hold open."""
    pod_check_interval_seconds: PositiveFloat = 0.5
    """How often a k8s worker reports its runs as alive, and looks for those to be deleted."""
    pod_lost_seconds: PositiveFloat = 30
    """A run that nobody has reported for this long is closed, once its deletion is asked for."""
    saga_timeout_seconds: PositiveFloat = 300
    """Beside its script's own timeout, how long a scheduled execution may take before its pod is deleted."""
    sweep_interval_seconds: PositiveFloat = 5
    """How often sagas and slots are looked through for what got stuck."""
    slot_reminder_seconds: PositiveFloat = 600
    """Beside its script's timeout, how long a slot may be taken before its execution is scheduled once more."""
    decision_retention_seconds: PositiveFloat = 691_200
    """How long the coordinator remembers what it decided about an event. Longer than the topics keep events."""

    @field_validator("database_url")
    @classmethod
    def _is_a_known_database(cls, url: str) -> str:
        try:
            driver = make_url(url).drivername
        except ArgumentError:
            driver = ""
        if driver not in DATABASES:
            # The URL itself is not shown: it may hold a password.
            raise ValueError(f"starts with {driver or 'no driver'}; write one of {', '.join(DATABASES)}")
        return url
