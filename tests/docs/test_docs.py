# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every code block and table of the documentation is still true."""

import ast
import asyncio
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    heartbeat_interval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import (
    manager,
    policy,
    quarantine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.stats import (
    COUNTERS,
    GAUGES,
    RELEASE_SECONDS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.ucx import (
    ucx_setting_problems,
)
from vllm_nixl_heartbeat.compatibility import TESTED_NIXL, TESTED_VLLM
from vllm_nixl_heartbeat.http import EXTENSION, NixlPeerAdmin

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "features" / "nixl_connector_usage.md"
OPERATIONS = ROOT / "docs" / "operations"
FEATURE = ROOT / "vllm/distributed/kv_transfer/kv_connector/v1"
PACKAGE = ROOT / "vllm_nixl_heartbeat"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PIP_FORM = re.compile(r"<!-- pip-form -->.*?<!-- /pip-form -->\n*", re.DOTALL)


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
    }
    programs = {words[0] for block in blocks_of("bash") for words in commands(block)}
    ours = {"curl", "export", "make", "nixl-peers", "pip", "python", "vllm"}
    assert programs == ours | {"vllm-router"}


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
        assert heartbeat_interval(args) == policy.DEFAULT_HEARTBEAT_INTERVAL_S
        assert args.worker_extension_cls in ("", EXTENSION)
    (export,) = commands_of("export")
    assert export[1] == f"VLLM_PLUGINS=nixl_heartbeat,{NixlPeerAdmin.name}"
    parser.parse_args(["--enable-cumem-allocator"])
    assert "`vllm serve --enable-cumem-allocator`" in GUIDE.read_text()


def test_the_calls_are_served():
    called = []

    async def collective_rpc(method: str, args: tuple = (), **_: Any) -> list:
        called.append((method, args))
        return []

    parallel = SimpleNamespace(worker_extension_cls=EXTENSION)
    engine = SimpleNamespace(
        collective_rpc=collective_rpc,
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )
    app, plugin = FastAPI(), NixlPeerAdmin()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, None))
    client = TestClient(app)
    for words in commands_of("curl"):
        (url,) = (word for word in words if word.startswith("http"))
        body = words[words.index("-d") + 1] if "-d" in words else None
        answer = client.request(
            "POST" if body else "GET",
            urlsplit(url).path,
            json=body and json.loads(body),
        )
        assert answer.status_code == 200 and "ranks" in answer.json()
    assert called == [
        ("list_nixl_peers", ()),
        ("release_nixl_peers", (None, "10.0.0.7:5600")),
    ]


def test_the_plugins_of_an_image_can_be_listed():
    (words,) = commands_of("python")
    ran = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_module_can_be_named():
    named = re.search(r'"kv_connector_module_path": "([\w.]+)"', GUIDE.read_text())
    assert named
    assert importlib.import_module(named[1]).NixlConnector


def test_the_metrics_are_all_in_the_guide():
    rows = re.findall(
        r"^\| `(\w+)` \| (counter|histogram|gauge)", GUIDE.read_text(), re.M
    )
    assert dict(rows) == {
        **dict.fromkeys(GAUGES, "gauge"),
        **{f"{name}_total": "counter" for name in COUNTERS},
        RELEASE_SECONDS: "histogram",
    }


def test_the_alerts_are_all_in_the_guide():
    (group,) = yaml.safe_load((OPERATIONS / "nixl_alerts.yml").read_text())["groups"]
    rows = re.findall(r"^\| `(Nixl\w+)` \|", GUIDE.read_text(), re.M)
    assert rows == [rule["alert"] for rule in group["rules"]]


def logged(*paths: Path) -> set[str]:
    """Return the constant beginning of every line logged above debug level."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "logger"
                and node.func.attr
                in ("info", "warning", "warning_once", "error", "exception")
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(beginning(str(node.args[0].value)))
    return found


def beginning(line: str) -> str:
    return re.split(r"%|ENGINE|AGENT|NAME|UCX_|\.\.\.", line)[0].rstrip(" :")


def rows_of_lines(text: str) -> list[str]:
    cells = re.findall(r"^\| ([^|]*NIXL [^|]*) \|", text, re.M)
    lines = [line for cell in cells for line in re.findall(r"`([^`]*)`", cell)]
    return [beginning(line) for line in lines if "NIXL " in line]


def test_the_log_lines_are_the_code_s():
    text = GUIDE.read_text()
    worker = rows_of_lines(_PIP_FORM.sub("", text))
    assert len(worker) == len(set(worker))
    assert set(worker) == logged(
        FEATURE / "nixl_connector.py", *(FEATURE / "nixl_peers").glob("*.py")
    )
    package = [row for row in rows_of_lines(text) if row not in worker]
    assert set(package) == logged(
        *(p for p in PACKAGE.glob("*.py") if not p.is_symlink())
    )


def test_vllm_s_own_warning_is_quoted_right():
    from vllm import plugins

    quoted = re.search(
        r"`(Found endpoint plugin\(s\)) \[.*?\] (but[^`]*)`", GUIDE.read_text()
    )
    assert quoted
    assert f"{quoted[1]} %s {quoted[2]}" in Path(plugins.__file__).read_text()


def test_the_numbers_are_the_code_s():
    text = re.sub(r"\s+", " ", GUIDE.read_text())
    for said in (
        f"| `{policy.HEARTBEAT_INTERVAL_KEY}` | seconds: 0, or at least "
        f"{policy.MIN_HEARTBEAT_INTERVAL_S} | {policy.DEFAULT_HEARTBEAT_INTERVAL_S} |",
        f"at the default interval of {policy.DEFAULT_HEARTBEAT_INTERVAL_S:.0f} s",
        f"for t seconds is sent a heartbeat every t/{policy.IDLE_FRACTION} s",
        f"at least every {policy.MAX_IDLE_INTERVAL_S:.0f} s",
        f"spread over {policy.JITTER * 100:.0f} % of an interval",
        f"has been in flight for {policy.SUSPECT_AFTER_S:.0f} s",
        f"at once for {quarantine.MIN_QUARANTINE_S:.0f} s, doubling up to "
        f"{quarantine.MAX_QUARANTINE_S:.0f} s",
        f"sends at most {manager.MAX_SENDS_PER_ROUND} heartbeats",
    ):
        assert said in text, said


def test_the_settings_are_the_start_up_check_s(tmp_path: Path):
    (tmp_path / "channel0").touch()
    problems = ucx_setting_problems({}, imex_channels=tmp_path)
    for problem in problems:
        setting = re.match(r"(\w+) is not set, should be '(\w+)'", problem)
        assert setting and f"`{setting[1]}={setting[2]}`" in GUIDE.read_text()
    assert len(problems) == 5


def test_what_a_fork_takes_knows_no_package():
    text = GUIDE.read_text()
    assert text.count("<!-- pip-form -->") == text.count("<!-- /pip-form -->")
    taken = _PIP_FORM.sub("", text)
    assert "pip-form" not in taken
    # Blank lines after it are cut out as well: the one before keeps paragraphs apart.
    assert not re.findall(r"[^\n]\n<!-- pip-form -->", text)
    for word in (
        "pip install",
        "plugin",
        "PLUGINS",
        "`make ",
        "nixl-peers",
        "/v1/nixl",
    ):
        assert word not in taken
    links = re.findall(r"\]\(([^)]*)\)", taken)
    assert all(link.startswith(("#", "https://")) for link in links)
    assert {link[1:] for link in links if link[0] == "#"} <= anchors(taken)


def anchors(text: str) -> set[str]:
    """Return what GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text), re.M)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", [README, GUIDE])
def test_links_lead_somewhere(path: Path):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" in target:
            continue
        page = path.parent / target if target else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page.read_text()), anchor


def test_the_readme_names_the_tested_versions():
    text = README.read_text()
    assert f"| vLLM | {TESTED_VLLM[0][:4]} to {TESTED_VLLM[-1][:4]} | " in text
    assert f" | {', '.join(TESTED_VLLM)} (`make matrix`" in text
    assert f"| NIXL | {TESTED_NIXL[0]} and newer, UCX backend | " in text
    assert f" | {', '.join(TESTED_NIXL)} |" in text
