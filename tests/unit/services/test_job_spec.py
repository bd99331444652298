"""The Job that runs a script, without any server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes_validate.utils import all_versions, validate

from services.events import CreatePodCommand
from services.k8s_worker.job_spec import deadline_seconds, job_of, runs_the_same
from services.k8s_worker.runner import UnsupportedLanguageError
from services.settings import KubernetesSection, PlatformSection

SETTINGS = PlatformSection(runner="kubernetes")
OLDEST = 29
"""Kubernetes 1.29: the first with `podReplacementPolicy` unless asked."""
SUPPORTED = [version for version in all_versions() if int(version.split(".")[1]) >= OLDEST]


def command(**fields: object) -> CreatePodCommand:
    return CreatePodCommand.model_validate({"execution_id": "e1", "saga_id": "s1", "script": "print()", **fields})


def job(**fields: object) -> dict[str, Any]:
    return job_of("exec-1", command(**fields), SETTINGS)


def container(**fields: object) -> dict[str, Any]:
    (only,) = job(**fields)["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_job_is_valid_by_the_published_schema(version: str) -> None:
    assert validate(job(script="print()" * 20_000), version, strict=True) == version[:4]


def test_the_job_runs_once() -> None:
    spec = job()["spec"]

    assert (spec["backoffLimit"], spec["completions"], spec["parallelism"]) == (0, 1, 1)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["ttlSecondsAfterFinished"] == SETTINGS.kubernetes.ttl_seconds


def test_the_pod_satisfies_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, field by field."""
    pod = job()["spec"]["template"]["spec"]

    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert [set(volume) for volume in pod["volumes"]] == [{"name", "emptyDir"}]
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_limits_come_from_the_command() -> None:
    assert container(cpu_limit=0.25, memory_limit_mb=64)["resources"] == {"limits": {"cpu": "250m", "memory": "80Mi"}}
    assert container(cpu_limit=0.0001)["resources"]["limits"]["cpu"] == "1m"
    assert container()["resources"]["limits"]["memory"] == f"{SETTINGS.default_memory_mb + 16}Mi"


def test_the_jobs_own_deadline_is_behind_all_others() -> None:
    assert job(timeout_seconds=7.5)["spec"]["activeDeadlineSeconds"] == 128 + 35
    assert deadline_seconds(command(timeout_seconds=86_400), SETTINGS) > 86_400 + SETTINGS.kubernetes.start_seconds


def test_the_job_contains_no_variable_references() -> None:
    assert "$" not in json.dumps(job(script="print('$(HOME) $$')"))


def test_no_variable_is_longer_than_linux_takes() -> None:
    script = "".join(map(chr, range(0x10000, 0x10000 + 150_000)))

    pieces = container(script=script)["env"]

    assert len(pieces) > 1
    assert max(len(f"{piece['name']}={piece['value']}") for piece in pieces) < 131_072
    assert [piece["name"] for piece in pieces] == [f"EXECUTION_{number}" for number in range(len(pieces))]


@pytest.mark.parametrize(
    ("version", "image"), [("", "here/python:any"), ("3.12", "here/python:3.12")], ids=["any version", "3.12"]
)
def test_the_image_is_that_of_the_version(version: str, image: str) -> None:
    images = {"python": "here/python:any", "python:3.12": "here/python:3.12"}
    settings = PlatformSection(kubernetes=KubernetesSection(images=images))

    made = job_of("exec-1", command(language_version=version), settings)

    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize("fields", [{"language": "cobol"}, {"language_version": "2.7"}], ids=["language", "version"])
def test_a_language_without_an_image_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(UnsupportedLanguageError, match=r"unsupported language .*; supported: python"):
        job(**fields)


def test_equal_commands_make_the_same_job_and_others_do_not() -> None:
    assert runs_the_same(job(), job())
    assert not runs_the_same(job(), job(script="print(2)"))
    assert not runs_the_same(job(), job(timeout_seconds=3))
    assert not runs_the_same({"metadata": {"name": "exec-1"}}, job())
