# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The installed entry point, in processes of its own, as vLLM loads it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OURS = "vllm_nixl_heartbeat.nixl_connector"

LOAD = """
import json, sys
import vllm.engine.arg_utils
before = set(sys.modules)
from vllm_nixl_heartbeat.plugin import register
register()
imported = sorted(set(sys.modules) - before)
# vLLM's own way of loading it must do without the call above.
sys.meta_path = [f for f in sys.meta_path if "nixl" not in type(f).__module__]
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

def module_of(name, path=None):
    config = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=path
    )
    return KVConnectorFactory.get_connector_class(config).__module__

print(json.dumps({
    "imported": imported,
    "pull": [module_of("NixlConnector"), module_of("NixlPullConnector")],
    "push": module_of("NixlPushConnector"),
    "by hand": module_of("NixlConnector", OURS),
}))
"""


def load_plugins(**env: str) -> dict[str, Any]:
    """Let a new process load vLLM's plugins and say which connectors it got."""
    done = subprocess.run(
        [sys.executable, "-c", f"OURS = {OURS!r}\n{LOAD}"],
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return load_plugins()


def test_installing_the_package_swaps_the_connectors(loaded: dict[str, Any]):
    assert loaded["pull"] == [OURS, OURS]
    assert loaded["push"] == OURS


def test_loading_it_imports_nothing_of_vllm(loaded: dict[str, Any]):
    """The factory, for one, costs a process that parses arguments a second."""
    assert loaded["imported"] == ["vllm_nixl_heartbeat", "vllm_nixl_heartbeat.plugin"]


def test_vllm_plugins_leaves_it_out_and_a_module_path_picks_it_by_hand():
    loaded = load_plugins(VLLM_PLUGINS="")
    assert loaded["pull"] == [f"{V1}.nixl.connector"] * 2
    assert loaded["by hand"] == OURS
