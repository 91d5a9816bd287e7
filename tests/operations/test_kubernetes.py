# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Kubernetes examples: valid, complete, and in step with the code."""

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_nixl_heartbeat.http import EXTENSION, NixlPeerAdmin
from vllm_nixl_heartbeat.nixl_peers.ucx import ucx_setting_problems

DIRECTORY = Path(__file__).parents[2] / "docs" / "kubernetes"
EXAMPLES = ("rdma.yaml", "gb200-mnnvl.yaml")
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
HOOK = DIRECTORY / "release-on-stop.sh"
# Of NVIDIA's DRA driver, for which the validator has no schema.
CUSTOM = {"ComputeDomain"}

example = pytest.mark.parametrize("name", EXAMPLES)
example_and_role = pytest.mark.parametrize(
    ("name", "role"), [(name, role) for name in EXAMPLES for role in ROLES]
)

Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((DIRECTORY / name).read_text()))


def manifest(name: str, kind: str, of: str) -> Manifest:
    (found,) = [
        each
        for each in manifests(name)
        if (each["kind"], each["metadata"]["name"]) == (kind, of)
    ]
    return found


def pod(name: str, role: str) -> Manifest:
    return manifest(name, "Deployment", f"vllm-{role}")["spec"]["template"]


def container(name: str, role: str) -> Manifest:
    (only,) = pod(name, role)["spec"]["containers"]
    return only


def environment(name: str, role: str) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container(name, role)["env"]}


@example
def test_every_manifest_fits_its_schema(name: str):
    kinds = set()
    for each in manifests(name):
        kinds.add(each["kind"])
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, "1.37", strict=True)
    assert kinds >= {
        *("Secret", "Service", "PodDisruptionBudget", "Deployment", "NetworkPolicy")
    }


@example
def test_every_selector_finds_pods(name: str):
    labels = [pod(name, role)["metadata"]["labels"] for role in ROLES]
    selectors = []
    for each in manifests(name):
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector:
            selectors.append(selector.get("matchLabels", selector))
    assert len(selectors) == 8
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels)


@example_and_role
def test_a_rollout_needs_no_free_gpu(name: str, role: str):
    spec = manifest(name, "Deployment", f"vllm-{role}")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    budget = manifest(name, "PodDisruptionBudget", f"vllm-{role}")["spec"]
    assert budget["maxUnavailable"] == 1 < spec["replicas"]


@example_and_role
def test_a_busy_server_survives_its_probes(name: str, role: str):
    spec = container(name, role)
    startup, ready, live = (
        spec[f"{probe}Probe"] for probe in ("startup", "readiness", "liveness")
    )
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert ready["timeoutSeconds"] >= 5
    assert live["timeoutSeconds"] >= 10
    assert live["periodSeconds"] * live["failureThreshold"] >= 60
    assert {p["httpGet"]["path"] for p in (startup, ready, live)} == {"/health"}


@example_and_role
def test_every_instance_is_started_as_the_guide_says(name: str, role: str):
    spec, env = container(name, role), environment(name, role)
    assert ucx_setting_problems(env) == []
    assert env["VLLM_PLUGINS"] == f"nixl_heartbeat,{NixlPeerAdmin.name}"
    assert f"--worker-extension-cls={EXTENSION}" in spec["args"]
    transfer = spec["args"][spec["args"].index("--kv-transfer-config") + 1]
    assert json.loads(transfer) == {
        "kv_connector": "NixlConnector",
        "kv_role": ROLES[role],
    }
    (key,) = [e for e in spec["env"] if e["name"] == "VLLM_API_KEY"]
    secret = key["valueFrom"]["secretKeyRef"]
    assert secret["key"] in manifest(name, "Secret", secret["name"])["stringData"]
    assert pod(name, role)["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "8000",
        "prometheus.io/path": "/metrics",
    }


@example_and_role
def test_every_instance_has_shared_memory_and_a_fabric(name: str, role: str):
    spec = container(name, role)
    assert spec["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert "rdma/ib" in spec["resources"]["limits"]
    (shm,) = [m["name"] for m in spec["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    volumes = {v["name"]: v for v in pod(name, role)["spec"]["volumes"]}
    assert volumes[shm]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("role", ROLES)
def test_on_gb200_every_instance_can_map_the_others_memory(role: str):
    name = "gb200-mnnvl.yaml"
    spec = container(name, role)
    assert "--enable-cumem-allocator" in spec["args"]
    assert environment(name, role)["UCX_CUDA_IPC_ENABLE_MNNVL"] == "y"
    template = manifest(name, "ComputeDomain", "vllm-pd")["spec"]["channel"]
    claims = {
        claim["name"]: claim["resourceClaimTemplateName"]
        for claim in pod(name, role)["spec"]["resourceClaims"]
    }
    (claim,) = spec["resources"]["claims"]
    assert claims[claim["name"]] == template["resourceClaimTemplate"]["name"]
    affinity = pod(name, role)["spec"]["affinity"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    assert affinity["podAffinity"][required][0]["topologyKey"] == (
        "nvidia.com/gpu.clique"
    )
    assert affinity["podAntiAffinity"][required][0]["topologyKey"] == (
        "kubernetes.io/hostname"
    )


@example
def test_the_hook_is_where_the_prefill_looks_for_it(name: str):
    spec = container(name, "prefill")
    (command,) = spec["lifecycle"]["preStop"]["exec"]["command"]
    path = Path(command)
    (volume,) = [
        m["name"] for m in spec["volumeMounts"] if m["mountPath"] == str(path.parent)
    ]
    volumes = {v["name"]: v for v in pod(name, "prefill")["spec"]["volumes"]}
    config_map = volumes[volume]["configMap"]
    assert path.name == HOOK.name and os.access(HOOK, os.X_OK)
    assert config_map["defaultMode"] & 0o111
    made = f"create configmap {config_map['name']} --from-file={HOOK.name}"
    assert made in " ".join((DIRECTORY / "README.md").read_text().split())


@example
def test_the_hook_reaches_decoders_that_are_not_ready_within_the_grace(name: str):
    env = environment(name, "prefill")
    matched = re.fullmatch(r"http://([\w-]+):(\d+)", env["DECODERS_URL"])
    assert matched is not None
    service = manifest(name, "Service", matched[1])["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert (
        service["selector"].items() <= pod(name, "decode")["metadata"]["labels"].items()
    )
    assert {port["port"] for port in service["ports"]} == {int(matched[2])}
    grace = pod(name, "prefill")["spec"]["terminationGracePeriodSeconds"]
    assert int(env["STOP_WITHIN_S"]) + 30 <= grace


def test_every_setting_of_the_hook_is_described_in_it():
    code = HOOK.read_text()
    comment = "\n".join(line for line in code.splitlines() if line.startswith("#"))
    settings = set(re.findall(r"\$\{([A-Z_]+)", code)) - {"LOG"}
    assert len(settings) >= 9
    assert all(setting in comment for setting in settings)
    for name in EXAMPLES:
        hook_only = {
            setting
            for setting in environment(name, "prefill")
            if setting not in environment(name, "decode")
        }
        assert hook_only <= settings
