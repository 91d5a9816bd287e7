# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The drill on real servers that it did not start, and that ask for an API key."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest
from aiohttp import web

from nixl_lab.model import ensure_model
from nixl_lab.servers import Deployment, ServerOptions

KEY = "secret"


@pytest.mark.servers
@pytest.mark.timeout(900)
async def test_the_drill_runs_on_a_deployment_of_ones_own(tmp_path: Path):
    # A release then takes a fraction of what the drill allows for the default
    # interval: four servers on few cores may be slow.
    options = ServerOptions(
        model=ensure_model(),
        log_dir=tmp_path,
        interval=0.5,
        env={"VLLM_API_KEY": KEY},
    )
    async with Deployment(options) as deployment:
        for name in ("p1", "p2"):
            deployment.add(name, "prefill")
        for name in ("d1", "d2"):
            deployment.add(name, "decode")
        await deployment.start_all()

        # Whoever runs the deployment: the drill has commands for them, no handle.
        async def kill(request: web.Request) -> web.Response:
            deployment.servers[request.match_info["name"]].kill_now()
            return web.Response()

        async def start(request: web.Request) -> web.Response:
            await deployment.servers[request.match_info["name"]].start()
            return web.Response()

        app = web.Application()
        app.add_routes([web.get("/kill/{name}", kill), web.get("/start/{name}", start)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        call = "curl --fail --silent --show-error"
        arguments = ["--cycles", "1", "--output", str(tmp_path / "drill")]
        for verb in ("kill", "start"):
            arguments += [f"--{verb}", f'{call} "{site.name}/{verb}/$INSTANCE"']
        for server in deployment.servers.values():
            arguments += [f"--{server.role}", f"{server.name}={server.url}"]
        drill = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "nixl_lab.drill", *arguments],
            env=os.environ | {"VLLM_API_KEY": KEY},
            stdout=PIPE,
            stderr=STDOUT,
        )
        output, _ = await drill.communicate()
        await runner.cleanup()
    assert drill.returncode == 0, output.decode()
    record = json.loads((tmp_path / "drill" / "record.json").read_text())
    (killed,) = [f for f in record["faults"] if f["instances"] == ["p2"]]
    assert killed["releases"].keys() == {"d1", "d2"}
