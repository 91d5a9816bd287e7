# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every code block of the documentation is what it says it is, and still true."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    heartbeat_interval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.admin import (
    EXTENSION,
    PATH,
    NixlPeerControl,
    PeerName,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    HEARTBEAT_INTERVAL_KEY,
    Verdict,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.stats import (
    CONNECTED,
    COUNTERS,
    RELEASE_SECONDS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.ucx import (
    ucx_setting_problems,
)

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "features" / "nixl_connector_usage.md"
KUBERNETES = GUIDE.with_name("nixl_connector_kubernetes.yaml")
SOURCES = "".join(
    path.read_text() for path in sorted((ROOT / "vllm").rglob("nixl_*.py"))
)
METRICS = {
    *(f"{name}_total" for name in COUNTERS),
    *(f"{RELEASE_SECONDS}{suffix}" for suffix in ("", "_bucket", "_count", "_sum")),
    CONNECTED,
}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return the language and text of every fenced block."""
    return _BLOCK.findall(path.read_text())


def blocks_of(language: str) -> list[str]:
    return [
        b for path in (README, GUIDE) for lang, b in blocks(path) if lang == language
    ]


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block."""
    pending = ""
    for line in block.splitlines(keepends=True):
        pending += line
        if pending.endswith("\\\n"):
            pending = pending[:-2]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue  # a quoted text goes on
        pending = ""
        if words:
            yield words


def commands_of(program: str) -> list[list[str]]:
    found = [words for block in blocks_of("bash") for words in commands(block)]
    return [words for words in found if words[0] == program]


def test_every_block_is_checked_here():
    assert {lang for path in (README, GUIDE) for lang, _ in blocks(path)} == {
        "bash",
        "text",
        "yaml",
    }
    programs = {words[0] for block in blocks_of("bash") for words in commands(block)}
    assert programs == {"make", "pip", "vllm", "curl", "export"}


@pytest.mark.parametrize("block", blocks_of("bash"))
def test_shell_blocks_parse(block: str):
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_make_targets_exist():
    text = README.read_text() + GUIDE.read_text()
    named = set(re.findall(r"`(?:make) ([a-z-]+)", text))
    named |= {words[1] for words in commands_of("make")}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named and named <= set(targets)


def test_vllm_takes_the_flags():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    serves = commands_of("vllm")
    assert len(serves) == 2
    for words in serves:
        assert words[1:3] == ["serve", "MODEL"]
        config = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
        flags = [config if w == "$KV_TRANSFER_CONFIG" else w for w in words[3:]]
        args = EngineArgs.from_cli_args(parser.parse_args(flags))
        assert args.kv_transfer_config.kv_connector == "NixlConnector"
        assert heartbeat_interval(args) == 2.0
        assert args.worker_extension_cls in ("", EXTENSION)
    (export,) = commands_of("export")
    assert export[1] == f"VLLM_PLUGINS=nixl_heartbeat,{NixlPeerControl.name}"


def test_the_calls_are_the_routes():
    listing, release = commands_of("curl")
    assert listing[-1].endswith(f":8000{PATH}")
    (url,) = (word for word in release if word.startswith("http"))
    assert url.endswith(f":8000{PATH}/release")
    assert PeerName(**json.loads(release[-1])).address == "10.0.0.7:5600"


def test_alerts_name_our_metrics():
    (block,) = blocks_of("yaml")
    (group,) = yaml.safe_load(block)["groups"]
    for rule in group["rules"]:
        promql_parser.parse(rule["expr"])
        names = re.findall(r"vllm:nixl_(\w+)", rule["expr"])
        assert names and set(names) <= METRICS


def test_the_metrics_are_all_in_the_guide():
    rows = re.findall(
        r"^\| `(\w+)` \| (counter|histogram|gauge)", GUIDE.read_text(), re.M
    )
    assert dict(rows) == {
        **{f"{name}_total": "counter" for name in COUNTERS},
        RELEASE_SECONDS: "histogram",
        CONNECTED: "gauge",
    }


def test_the_log_lines_are_the_code_s():
    rows = re.findall(r"^\| `(NIXL [^`]*)`", GUIDE.read_text(), re.M)
    assert len(rows) > 10
    for row in rows:
        text = row.removesuffix(" ENGINE").removesuffix(" UCX_...").removesuffix(" ...")
        verdict = text.removeprefix("NIXL peer ").removesuffix(":")
        if verdict not in {v.value for v in Verdict}:
            assert f"{text} %s" in SOURCES, text
    assert {f"NIXL peer {v.value}: ENGINE" for v in Verdict} <= set(rows)


def test_the_knob_and_the_settings_are_the_code_s():
    text = GUIDE.read_text()
    assert f"| `{HEARTBEAT_INTERVAL_KEY}` |" in text
    table = "".join(re.findall(r"^\| `UCX_.*$", text, re.M))
    for problem in ucx_setting_problems({}):
        name, wanted = re.match(
            r"(\w+) is not set, should be '(\w+)'", problem
        ).groups()
        assert f"`{name}={wanted}`" in table


@pytest.mark.parametrize("path", [README, GUIDE])
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", path.read_text()):
        if target and "://" not in target:
            assert (path.parent / target).exists(), target


# -- Kubernetes ----------------------------------------------------------------------


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
    assert plugins == f"nixl_heartbeat,{NixlPeerControl.name}"
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
