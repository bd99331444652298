"""The specification of the Job that runs a command's script, and its comparison with an existing Job.  Pure."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from integr8s_idem.keys.fingerprints import fingerprint_of
from integr8s_idem.records import is_other_payload
from services.events import CreatePodCommand
from services.k8s_worker.runner import UnsupportedLanguageError
from services.settings import PlatformSection

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "integr8s-idem-platform"
EXECUTION: Final = "integr8s-idem/execution-id"
FINGERPRINT: Final = "integr8s-idem/fingerprint"
CONTAINER: Final = "script"
"""Name of the pod's container."""

REPORT_FILE: Final = "/dev/termination-log"
PIECE_CHARACTERS: Final = 98_304
"""Size of one environment variable.  Linux limits a variable to 131,072 bytes."""
PROGRAM_MEMORY_MB: Final = 16
"""Memory of the program that runs the script, in addition to the script's own."""
GRACE_SECONDS: Final = 5
"""Time between SIGTERM and SIGKILL; the program needs a fraction of it."""
DEADLINE_SLACK_SECONDS: Final = 30
"""Added to all other limits for the Job's own deadline, which deletes the pod and its output."""

_PROGRAM: Final = Path(__file__).with_name("pod_program.py").read_text(encoding="utf-8")
_FOLDER: Final = "/tmp"  # noqa: S108  # in the container


def job_of(pod_name: str, command: CreatePodCommand, settings: PlatformSection) -> dict[str, Any]:
    """Return the Job for the API.

    Raises:
        UnsupportedLanguageError: No image is configured for the command's language and version.
    """
    image = image_of(command, settings.kubernetes.images)
    labels = {MANAGED_BY: MANAGER}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": pod_name,
            "labels": labels,
            "annotations": {EXECUTION: command.execution_id, FINGERPRINT: fingerprint_of(command).hex()},
        },
        "spec": {
            "backoffLimit": 0,  # only the platform decides whether a script runs again
            "completions": 1,
            "parallelism": 1,
            # A terminating pod has not failed yet, so its output can still be read.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                # Equivalent to backoffLimit 0, but the Job distinguishes an eviction from a failed script.
                "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "activeDeadlineSeconds": deadline_seconds(command, settings),
            "ttlSecondsAfterFinished": settings.kubernetes.ttl_seconds,
            "template": {"metadata": {"labels": labels}, "spec": _pod(command, settings, image)},
        },
    }


def image_of(command: CreatePodCommand, images: Mapping[str, str]) -> str:
    """Return the image for the command's language and version.

    Raises:
        UnsupportedLanguageError: No image is configured.
    """
    wanted = f"{command.language}:{command.language_version}" if command.language_version else command.language
    if wanted not in images:
        raise UnsupportedLanguageError(wanted, tuple(sorted(images)))
    return images[wanted]


def deadline_seconds(command: CreatePodCommand, settings: PlatformSection) -> int:
    """Return the Job's deadline, counted from its creation."""
    slack = GRACE_SECONDS + DEADLINE_SLACK_SECONDS
    return math.ceil(settings.kubernetes.start_seconds + command.timeout_seconds) + slack


def belongs_to_platform(job: Mapping[str, Any]) -> bool:
    """Return whether a k8s worker of this platform created the Job."""
    return bool(_metadata(job, "labels").get(MANAGED_BY) == MANAGER)


def runs_the_same(job: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether the existing Job was created from the same command as `wanted`."""
    existing, own = _fingerprint_in(job), _fingerprint_in(wanted)
    return belongs_to_platform(job) and len(existing) == len(own) and not is_other_payload(existing, own)


def _fingerprint_in(job: Mapping[str, Any]) -> bytes:
    """Return the fingerprint of the command that a Job was created from; empty if it has no valid one."""
    try:
        return bytes.fromhex(_metadata(job, "annotations")[FINGERPRINT])
    except (KeyError, ValueError):
        return b""


def _metadata(job: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    return job["metadata"].get(field) or {}


def _pod(command: CreatePodCommand, settings: PlatformSection, image: str) -> dict[str, Any]:
    user = settings.kubernetes.user_id
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": f"{settings.kubernetes.tmp_mb}Mi"}}],
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": ["python", "-I", "-S", "-c", _PROGRAM],
                "args": [REPORT_FILE],
                "env": list(_environment(command, settings)),
                "workingDir": _FOLDER,
                "terminationMessagePath": REPORT_FILE,
                "terminationMessagePolicy": "File",
                "volumeMounts": [{"name": "tmp", "mountPath": _FOLDER}],
                "resources": {"limits": _limits(command, settings)},  # and requests of the same size, by default
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }


def _limits(command: CreatePodCommand, settings: PlatformSection) -> dict[str, str]:
    memory = (command.memory_limit_mb or settings.default_memory_mb) + PROGRAM_MEMORY_MB
    return {"cpu": f"{math.ceil(command.cpu_limit * 1_000)}m", "memory": f"{memory}Mi"}


def _environment(command: CreatePodCommand, settings: PlatformSection) -> Iterator[dict[str, str]]:
    """Yield the input of pod_program.py, in base64 so that the cluster expands no variables in it."""
    spec = {
        "script": command.script,
        "timeout": command.timeout_seconds,
        "keep": settings.output_limit_bytes,
        "flood": settings.output_flood_bytes,
        "limits": {
            "RLIMIT_FSIZE": settings.file_limit_bytes,
            "RLIMIT_NOFILE": settings.max_open_files,
            "RLIMIT_CORE": 0,
        },
    }
    packed = base64.b64encode(zlib.compress(json.dumps(spec, ensure_ascii=False).encode())).decode()
    for number, start in enumerate(range(0, len(packed), PIECE_CHARACTERS)):
        yield {"name": f"EXECUTION_{number}", "value": packed[start : start + PIECE_CHARACTERS]}
