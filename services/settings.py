"""The platform's own section of settings.toml."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from integr8s_idem.config import Section
from integr8s_idem.config.sections import WITHOUT_SECRET

DATABASES = ("sqlite+aiosqlite", "postgresql+asyncpg")

Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""As Kubernetes names a namespace."""
ImageKey = Annotated[str, StringConstraints(pattern=r"^python(:[A-Za-z0-9._-]{1,40})?$")]
"""A language, or `language:version`."""


class KubernetesSection(Section):
    """The cluster that runs scripts with `runner = "kubernetes"`."""

    namespace: Label = "executions"
    """Where the Jobs are made. It must be there."""
    kubeconfig: str | None = None
    """File that says how to reach the cluster; if not given, the service account of the pod that the worker runs in."""
    context: str | None = None
    """Which context of that file; its current one if not given."""
    images: Annotated[dict[ImageKey, Annotated[str, Field(min_length=1)]], Field(min_length=1)] = Field(
        default_factory=lambda: {"python": "docker.io/library/python:3.13-slim"}
    )
    """Image of each language, or "language:version". A version without an image of its own is refused."""
    user_id: Annotated[int, Field(ge=1, le=2**31 - 1)] = 65_532
    """Numeric user that scripts run as, never root."""
    tmp_mb: PositiveInt = 128
    """What a script may write into its one writable folder, in MiB."""
    start_seconds: PositiveFloat = 120
    """How long a pod may wait for a node and its image before the execution fails as not_started."""
    ttl_seconds: PositiveInt = 3_600
    """When the cluster removes a finished Job that no worker has removed. Longer than a takeover takes."""
    api_patience_seconds: PositiveFloat = 60
    """How long a request that got no answer is repeated before the attempt is given up, to be made again."""


class PlatformSection(Section):
    """Where the platform keeps its state, how much it runs, and what a script may use."""

    database_url: Annotated[str, WITHOUT_SECRET] = "sqlite+aiosqlite:///platform.db"
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
    runner: Literal["subprocess", "kubernetes"] | None = None
    """What runs scripts, to be chosen: kubernetes (Jobs of a cluster), or subprocess (children of the worker, with
    limits but without a sandbox: for scripts that you trust)."""
    subprocess_user_id: Annotated[int, Field(ge=1, le=2**31 - 1)] = 65_532
    """Numeric user that runs the scripts of a worker that is root, with runner = "subprocess"."""
    scripts_as_root: bool = False
    """Whether scripts run as root where the worker does, with runner = "subprocess": they may do everything."""
    kubernetes: KubernetesSection = KubernetesSection()
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

    @model_validator(mode="after")
    def _pods_start_before_their_saga_expires(self) -> Self:
        start = self.kubernetes.start_seconds
        if self.runner == "kubernetes" and start >= self.saga_timeout_seconds:
            raise ValueError(
                f"kubernetes.start_seconds = {start:g} is not below saga_timeout_seconds = "
                f"{self.saga_timeout_seconds:g}: a saga would delete pods that may still start"
            )
        return self
