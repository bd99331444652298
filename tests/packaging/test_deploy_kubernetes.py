"""The Kubernetes manifests match the published schemas and the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as published

from integr8s_idem.cli import run_command
from integr8s_idem.config import ServiceSettings, settings_warnings
from integr8s_idem.config.loading import load_settings
from integr8s_idem.runtime import endpoints, service_group
from integr8s_idem.worker import consumer
from integr8s_idem.worker.retry_topics import RetryTopics
from providers import platform
from providers.settings import PlatformSettings
from services import events
from services.events import ExecutionEvent
from tests.packaging.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
FILES = [
    file
    for file in sorted(FOLDER.rglob("*.yaml"))
    if file.name != "kustomization.yaml" and file.name != "prometheus-adapter.yaml"  # values of a chart
]
OF_OTHERS = {"ScaledObject", "PodMonitor"}
"""Custom resources of KEDA and the Prometheus operator, for which Kubernetes does not publish schemas."""
SERVICES = ["coordinator", "k8s-worker", "result-processor", "saga-orchestrator"]
SETTINGS = load_settings(BASE / "settings.toml", PlatformSettings)
PAGE = (ROOT / "docs" / "how-to" / "deploy-on-kubernetes.md").read_text(encoding="utf-8")


def objects(file: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


@cache
def everything() -> list[dict[str, Any]]:
    return [found for file in FILES for found in objects(file)]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in everything() if found["kind"] == kind}


def deployment(name: str) -> dict[str, Any]:
    return of_kind("Deployment")[name]


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = deployment(name)["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    assert isinstance(found, dict)
    return found


def validate(found: dict[str, Any]) -> None:
    """Raise `published.ValidationError` for an invalid object."""
    published.validate(found, published.latest_version(), strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_manifests_match_the_schemas_of_kubernetes(file: Path) -> None:
    for found in objects(file):
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] in ("integr8s", "executions")
        if found["kind"] not in OF_OTHERS:
            validate(found)


def test_an_unknown_field_in_a_manifest_is_rejected() -> None:
    wrong = deepcopy(deployment("coordinator"))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 90

    with pytest.raises(published.ValidationError):
        validate(wrong)


def test_every_service_has_a_deployment_and_a_disruption_budget_of_one_pod() -> None:
    assert sorted(platform.services) == SERVICES
    assert sorted(of_kind("Deployment")) == sorted(of_kind("PodDisruptionBudget")) == SERVICES
    for name, budget in of_kind("PodDisruptionBudget").items():
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["selector"] == deployment(name)["spec"]["selector"]


def test_deployments_differ_only_in_name_and_service_account() -> None:
    def plain(name: str) -> str:
        file = (BASE / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[2]
        own = {"serviceAccountName: k8s-worker": "serviceAccountName: worker"} if name == "k8s-worker" else {}
        own |= {"automountServiceAccountToken: true": "automountServiceAccountToken: false"} if own else {}
        for old, new in own.items():
            assert file.count(old) == 1
            file = file.replace(old, new)
        return file.replace(name, "SERVICE")

    assert len({plain(name) for name in SERVICES}) == 1


@pytest.mark.parametrize("name", SERVICES)
def test_a_pod_runs_its_service_with_the_mounted_settings(name: str) -> None:
    found = container(name)
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}

    assert found["args"] == [
        "run", "providers:platform", "--service", name, "--settings", f"{mounts['settings']}/settings.toml", "--json"
    ]  # fmt: skip
    assert found["env"] == [{"name": "INTEGR8S_IDEM_SECRETS_DIR", "value": mounts["secrets"]}]
    assert {volume["name"] for volume in pod(name)["volumes"]} == mounts.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_probes_use_the_port_that_the_worker_listens_on(name: str) -> None:
    found = container(name)
    probes = {kind: found[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}

    assert SETTINGS.telemetry.metrics_enabled
    assert SETTINGS.telemetry.metrics_host == "0.0.0.0"
    assert found["ports"] == [{"name": "metrics", "containerPort": SETTINGS.telemetry.metrics_port}]
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"
    }  # fmt: skip
    assert {probe["port"] for probe in probes.values()} == {"metrics"}


def draining() -> dict[str, float]:
    """Return the maximum seconds of each shutdown step with the settings of the ConfigMap, as listed on the page."""
    request = SETTINGS.kafka.request_timeout_seconds
    return {
        "running handlers": max(SETTINGS.service(name).drain_timeout_seconds for name in SERVICES),
        "cancelled handlers": 3 * consumer.LAST_GRACE,
        "offsets": request,
        "the worker leaves": request,
        "the outbox": request,
        "the service's container": service_group.CLOSE_SECONDS,
        "the endpoints": endpoints.CLOSE_SECONDS + run_command._THREADS_SECONDS,
    }


def test_the_grace_period_of_a_pod_exceeds_the_documented_shutdown_time() -> None:
    rows = re.findall(r"^\| (.+) \| (\d+) \|$", PAGE[PAGE.index("## Stopping") :], re.MULTILINE)
    steps, (_, together) = rows[:-1], rows[-1]

    assert [float(seconds) for _, seconds in steps] == list(draining().values())
    for (step, _), meant in zip(steps, draining(), strict=True):
        assert step.startswith(meant)
    assert float(together) == sum(draining().values())
    for name in SERVICES:
        assert pod(name)["terminationGracePeriodSeconds"] > sum(draining().values())
        assert f"is {pod(name)['terminationGracePeriodSeconds']}, more than" in PAGE


def test_the_default_drain_timeout_is_used() -> None:
    assert draining()["running handlers"] == ServiceSettings().drain_timeout_seconds


@pytest.mark.parametrize("template", [*of_kind("Deployment").values(), *of_kind("Job").values()])
def test_pods_comply_with_the_restricted_pod_security_standard(template: dict[str, Any]) -> None:
    found = template["spec"]["template"]["spec"]
    (inner,) = found["containers"]

    assert found["securityContext"]["runAsNonRoot"] is True
    assert found["securityContext"]["runAsUser"] > 0
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inner["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"cpu", "memory"} == inner["resources"]["requests"].keys()
    assert "memory" in inner["resources"]["limits"]
    for namespace in of_kind("Namespace").values():
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_pods_run_as_the_user_of_the_image() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")

    for name in SERVICES:
        context = pod(name)["securityContext"]
        assert f"\nUSER {context['runAsUser']}:{context['runAsGroup']}\n" in dockerfile


def test_only_the_k8s_worker_may_call_the_cluster_and_only_to_run_scripts() -> None:
    (role,), (binding,) = of_kind("Role").values(), of_kind("RoleBinding").values()
    rights = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}

    assert rights == {
        ("jobs", "create"), ("jobs", "get"), ("jobs", "delete"),
        ("pods", "list"), ("pods", "watch"), ("pods/log", "get"),
    }  # fmt: skip
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "executions"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(who["kind"], who["name"]) for who in binding["subjects"]] == [("ServiceAccount", "k8s-worker")]
    assert {name for name in SERVICES if pod(name)["automountServiceAccountToken"]} == {"k8s-worker"}
    assert {pod(name)["serviceAccountName"] for name in SERVICES} == of_kind("ServiceAccount").keys()


def topics() -> dict[str, str]:
    (job,) = of_kind("Job").values()
    (inner,) = job["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable["value"] for variable in inner["env"]}


def test_the_job_creates_all_topics_as_the_settings_require() -> None:
    types = {
        kind.model_fields["event_type"].default
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, ExecutionEvent) and kind is not ExecutionEvent
    }

    assert set(topics()["TOPICS"].split()) == types
    commands = ("create_pod_command", "delete_pod_command")
    retries = RetryTopics("k8s-worker", SETTINGS.service("k8s-worker").retry_topics, commands)
    assert topics()["RETRY_TOPICS"].split() == [topic.name for topic in retries.all()]
    assert SETTINGS.kafka.topic_prefix == ""
    assert SETTINGS.kafka.dead_letter_suffix == ".dlq"
    assert topics()["KAFKA"] == SETTINGS.kafka.bootstrap_servers
    assert int(topics()["RETENTION_MS"]) / 1000 < SETTINGS.idempotency.default_ttl_seconds


def test_no_service_scales_beyond_its_number_of_partitions() -> None:
    partitions = int(topics()["PARTITIONS"])
    scaled, other = of_kind("ScaledObject"), of_kind("HorizontalPodAutoscaler")

    assert sorted(scaled) == sorted(other) == SERVICES
    assert {found["spec"]["maxReplicaCount"] for found in scaled.values()} == {partitions}
    assert {found["spec"]["maxReplicas"] for found in other.values()} == {partitions}
    assert all("replicas" not in deployment(name)["spec"] for name in SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_both_autoscalers_use_the_lag_of_their_service(name: str) -> None:
    scaled, other = of_kind("ScaledObject")[name]["spec"], of_kind("HorizontalPodAutoscaler")[name]["spec"]
    (trigger,), (metric,) = scaled["triggers"], other["metrics"]
    section, service = SETTINGS.service(name), platform.services[name]

    assert scaled.keys() == {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
    assert scaled["scaleTargetRef"] == {"name": name}
    assert trigger["type"] == "kafka"
    assert trigger["metadata"]["consumerGroup"] == (section.group_id or service.group_id or name)
    assert trigger["metadata"]["bootstrapServers"] == SETTINGS.kafka.bootstrap_servers
    assert trigger["metadata"]["offsetResetPolicy"] == SETTINGS.kafka.auto_offset_reset
    assert other["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    assert metric["external"]["metric"]["selector"] == {"matchLabels": {"service": name}}
    assert metric["external"]["target"]["averageValue"] == trigger["metadata"]["lagThreshold"]
    assert scaled["minReplicaCount"] == other["minReplicas"]
    # KEDA passes this on to Kubernetes; the other autoscaler is validated with the manifests.
    assert scaled["advanced"] == {"horizontalPodAutoscalerConfig": {"behavior": other["behavior"]}}


def test_the_adapter_provides_the_metric_of_the_autoscalers() -> None:
    rules = yaml.safe_load((FOLDER / "components/hpa/prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]
    asked = {
        metric["external"]["metric"]["name"]
        for found in of_kind("HorizontalPodAutoscaler").values()
        for metric in found["spec"]["metrics"]
    }

    assert {rule["name"]["as"] for rule in rules["external"]} == asked


def test_the_pod_monitor_scrapes_the_workers_with_the_job_name_of_the_alerts() -> None:
    (monitor,) = of_kind("PodMonitor").values()
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    (chosen,) = spec["selector"]["matchExpressions"]

    assert spec.keys() == {"jobLabel", "selector", "podMetricsEndpoints"}
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}
    assert (chosen["key"], chosen["operator"], sorted(chosen["values"])) == ("app.kubernetes.io/name", "In", SERVICES)
    for name in SERVICES:
        labels = deployment(name)["spec"]["template"]["metadata"]["labels"]
        assert labels[spec["jobLabel"]] == "integr8s-idem"
        assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_the_secret_is_loaded_as_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (secret,) = of_kind("Secret").values()
    for name, text in secret["stringData"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(tmp_path))

    settings = load_settings(BASE / "settings.toml", PlatformSettings, services=platform.services)

    assert settings.platform.database_url == secret["stringData"]["INTEGR8S_IDEM_PLATFORM__DATABASE_URL"]
    assert settings.store.kind == "redis"
    assert settings.store.password is not None
    assert settings_warnings(settings, platform.services) == []


def test_kustomizations_list_all_files_of_their_folders() -> None:
    for file in FOLDER.rglob("kustomization.yaml"):
        (kustomization,) = objects(file)
        named = {*kustomization["resources"], *kustomization.get("components", ())}
        named |= {name for made in kustomization.get("configMapGenerator", ()) for name in made["files"]}
        beside = {found.name for found in file.parent.iterdir()} - {"kustomization.yaml", "prometheus-adapter.yaml"}

        assert [name for name in named if not (file.parent / name).exists()] == []
        assert beside <= named


def test_kubectl_renders_the_overlay_to_valid_manifests() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: install 1.21 or newer")
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / "example")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr

    made = [found for found in yaml.safe_load_all(ran.stdout) if found]

    for found in made:
        if found["kind"] not in OF_OTHERS:
            validate(found)
    (settings,) = [found for found in made if found["kind"] == "ConfigMap"]
    assert settings["data"] == {"settings.toml": (BASE / "settings.toml").read_text(encoding="utf-8")}
    volumes = [found["spec"]["template"]["spec"]["volumes"] for found in made if found["kind"] == "Deployment"]
    named = {volume["configMap"]["name"] for each in volumes for volume in each if "configMap" in volume}
    assert named == {settings["metadata"]["name"]} != {"integr8s-idem"}
