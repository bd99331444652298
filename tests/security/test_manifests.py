"""The Kubernetes manifests: network policies, and limits of scripts."""

from __future__ import annotations

import pytest

from services.k8s_worker.job_spec import PROGRAM_MEMORY_MB
from tests.packaging.test_deploy_kubernetes import SETTINGS, of_kind

pytestmark = pytest.mark.scenario(132, 135)


def test_only_named_namespaces_can_reach_the_port_of_a_worker() -> None:
    policy = of_kind("NetworkPolicy")["metrics-only"]
    assert policy["spec"]["ingress"]
    assert all(rule["from"] for rule in policy["spec"]["ingress"])


def test_the_quota_of_scripts_matches_the_settings() -> None:
    section = SETTINGS.platform
    [most] = of_kind("LimitRange")["script"]["spec"]["limits"]
    memory = section.max_memory_mb + PROGRAM_MEMORY_MB
    assert most["max"]["cpu"] == f"{section.max_cpu:g}"
    assert most["max"]["memory"] == f"{memory}Mi"

    quota = of_kind("ResourceQuota")["scripts"]
    assert quota["metadata"]["namespace"] == section.kubernetes.namespace
    hard = quota["spec"]["hard"]
    assert int(hard["pods"]) > section.max_running
    # A Job that is refused waits; one whose pod is refused fails.
    assert section.max_running < int(hard["count/jobs.batch"]) < int(hard["pods"])
    assert float(hard["limits.cpu"]) == int(hard["pods"]) * section.max_cpu
    assert int(hard["limits.memory"].removesuffix("Gi")) * 1_024 >= int(hard["pods"]) * memory


def test_scripts_in_the_cluster_have_no_network_access() -> None:
    policy = of_kind("NetworkPolicy")["scripts-alone"]
    assert policy["metadata"]["namespace"] == SETTINGS.platform.kubernetes.namespace
    # Both directions, for all pods, without a rule that allows traffic.
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
