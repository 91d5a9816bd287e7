# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Kubernetes example fits Kubernetes, and says what the guide says."""

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.ucx import (
    ucx_setting_problems,
)

KUBERNETES = (
    Path(__file__).parents[2] / "docs" / "features" / "nixl_connector_kubernetes.yaml"
)
PATH = "/v1/nixl/peers"
EXTENSION = "vllm_nixl_heartbeat.nixl_peers.admin.NixlPeerWorkerExtension"


def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all(KUBERNETES.read_text())
    return {f"{d['kind']}/{d['metadata']['name']}": d for d in documents}


def container(name: str) -> dict[str, Any]:
    spec = manifests()[f"Deployment/{name}"]["spec"]["template"]["spec"]
    (only,) = spec["containers"]
    return only


def environment(name: str) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container(name)["env"]}


def test_the_manifests_fit_the_schema():
    assert len(manifests()) == 4
    for manifest in manifests().values():
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_manifests_say_what_the_guide_says():
    for name in ("vllm-prefill", "vllm-decode"):
        assert ucx_setting_problems(environment(name)) == []
    plugins = environment("vllm-decode")["VLLM_PLUGINS"]
    assert plugins == "nixl_heartbeat,nixl_peer_admin"
    assert f"--worker-extension-cls={EXTENSION}" in container("vllm-decode")["args"]


def test_the_pre_stop_hook_calls_every_decoder(tmp_path: Path):
    calls = tmp_path / "calls"
    for name, script in {
        "sleep": "",
        "getent": "echo 10.0.0.1 STREAM; echo 10.0.0.1 DGRAM; echo 10.0.0.2 RAW",
        "curl": f'printf "%s\\n" "$@" >> {calls}',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    hook = container("vllm-prefill")["lifecycle"]["preStop"]["exec"]["command"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": "10.0.0.9"}
    port = environment("vllm-prefill")["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    subprocess.run(hook, env=env | {"VLLM_API_KEY": "k"}, check=True)
    said = calls.read_text().splitlines()
    urls = [word for word in said if word.startswith("http")]
    assert urls == [f"http://10.0.0.{n}:8000{PATH}/release" for n in (1, 2)]
    bodies = [json.loads(word) for word in said if word.startswith("{")]
    assert bodies == [{"address": f"10.0.0.9:{port}"}] * 2
    assert said.count("Authorization: Bearer k") == 2
