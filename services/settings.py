"""The platform's own section of settings.toml."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from integr8s_idem.config import WITHOUT_SECRET, Section

DATABASES = ("sqlite+aiosqlite", "postgresql+asyncpg")

Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Name of a Kubernetes namespace."""
ImageKey = Annotated[str, StringConstraints(pattern=r"^python(:[A-Za-z0-9._-]{1,40})?$")]
"""A language, or `language:version`."""


class KubernetesSection(Section):
    """The cluster that runs scripts with `runner = "kubernetes"`."""

    namespace: Label = "executions"
    """Namespace of the Jobs. It must exist."""
    kubeconfig: str | None = None
    """Kubeconfig file for the cluster; by default, the service account of the worker's pod."""
    context: str | None = None
    """Context of that file; by default, its current context."""
    images: Annotated[dict[ImageKey, Annotated[str, Field(min_length=1)]], Field(min_length=1)] = Field(
        default_factory=lambda: {"python": "docker.io/library/python:3.13-slim"}
    )
    """Image of each language, or "language:version". Versions without their own image are refused."""
    user_id: Annotated[int, Field(ge=1, le=2**31 - 1)] = 65_532
    """Numeric id of the user that runs scripts, never root."""
    tmp_mb: PositiveInt = 128
    """Size of the script's only writable folder, in MiB."""
    start_seconds: PositiveFloat = 120
    """How long a pod may wait for a node and its image before the execution fails as not_started."""
    ttl_seconds: PositiveInt = 3_600
    """Time after which the cluster removes a finished Job that no worker has removed. Longer than a takeover takes."""
    api_patience_seconds: PositiveFloat = 60
    """How long a request without an answer is repeated before the attempt fails and is retried."""


class PlatformSection(Section):
    """State and limits of the platform, and limits of scripts."""

    database_url: Annotated[str, WITHOUT_SECRET] = "sqlite+aiosqlite:///platform.db"
    """State of all four services: sqlite+aiosqlite:///file, or postgresql+asyncpg://user:password@host/database."""
    max_running: PositiveInt = 8
    """Maximum number of concurrent executions."""
    max_running_per_user: PositiveInt = 4
    """Maximum number of concurrent executions per user; requests without a user count as one user."""
    max_timeout_seconds: PositiveFloat = 300
    """Requests for more time are rejected."""
    max_memory_mb: PositiveInt = 2_048
    """Requests for more memory are rejected."""
    max_cpu: PositiveFloat = 4
    """Requests for more cores are rejected."""
    default_memory_mb: Annotated[int, Field(ge=16)] = 256
    """Memory of a script whose request specifies none."""
    runner: Literal["subprocess", "kubernetes"] | None = None
    """Required: kubernetes (Jobs of a cluster), or subprocess (child processes of the worker, with limits but without
    a sandbox: only for scripts that you trust)."""
    subprocess_user_id: Annotated[int, Field(ge=1, le=2**31 - 1)] = 65_532
    """Numeric id of the user that runs scripts if the worker is root, with runner = "subprocess"."""
    scripts_as_root: bool = False
    """Whether scripts of a worker that is root run as root, without restrictions, with runner = "subprocess"."""
    kubernetes: KubernetesSection = KubernetesSection()
    interpreter: str | None = None
    """Python interpreter for scripts; by default, that of the worker."""
    work_folder: str | None = None
    """Parent of the temporary folders of runs; by default, that of the system."""
    output_limit_bytes: Annotated[int, Field(ge=0, le=80_000)] = 65_536
    """Bytes kept of stdout, and of stderr; longer output is truncated, with a note."""
    output_flood_bytes: PositiveInt = 16_777_216
    """A script that writes more output is killed."""
    file_limit_bytes: PositiveInt = 67_108_864
    """Maximum size of a file that a script writes."""
    max_open_files: Annotated[int, Field(ge=16)] = 256
    """Maximum number of open files of a script."""
    pod_check_interval_seconds: PositiveFloat = 0.5
    """Interval at which a k8s worker reports its runs as alive, and looks for runs to delete."""
    pod_lost_seconds: PositiveFloat = 30
    """Time without a report after which a run whose deletion was requested is closed."""
    saga_timeout_seconds: PositiveFloat = 300
    """Time, in addition to the script's timeout, after which the pod of a scheduled execution is deleted."""
    sweep_interval_seconds: PositiveFloat = 5
    """Interval of the sweeps for stuck sagas and slots."""
    slot_reminder_seconds: PositiveFloat = 600
    """Time, in addition to the script's timeout, after which an execution that holds a slot is scheduled again."""
    decision_retention_seconds: PositiveFloat = 691_200
    """How long the coordinator keeps its decision about an event. Longer than the topics keep events."""

    @field_validator("database_url")
    @classmethod
    def _is_a_known_database(cls, url: str) -> str:
        try:
            driver = make_url(url).drivername
        except ArgumentError:
            driver = ""
        if driver not in DATABASES:
            # The URL itself is not shown, since it may contain a password.
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
