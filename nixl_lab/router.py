# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's router in front of the lab's servers, in place of the lab's own proxy."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from nixl_lab.client import new_session
from nixl_lab.processes import ask_for_sigterm_when_parent_dies
from nixl_lab.servers import HOST, ServerError, VllmServer, free_port, is_healthy

# Where `make drill ROUTER=...` installs it; nothing else needs it.
FOLDER = Path(sys.prefix) / "router"
_FLAGS = (
    # One policy for both sides has one turn for both: a prefill then always meets the
    # same decoder.
    "--prefill-policy=round_robin",
    "--decode-policy=random",
)
ROUTERS: dict[str, tuple[str, ...]] = {
    # Its health checks take a dead prefill out within two seconds.
    "vllm-router": (
        *_FLAGS,
        "--health-check-interval-secs=1",
        "--health-check-timeout-secs=2",
        "--health-failure-threshold=1",
        "--health-success-threshold=1",
    ),
    "vllm-router-defaults": _FLAGS,
}
_START_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def running_router(
    name: str,
    prefills: Sequence[VllmServer],
    decoders: Sequence[VllmServer],
    log: Path,
) -> AsyncIterator[str]:
    """Runs a router in front of servers that are up; yields its URL."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", *ROUTERS[name]]
    for role, servers in (("prefill", prefills), ("decode", decoders)):
        for server in servers:
            command += [f"--{role}", server.url]
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdout=output,
            stderr=output,
            preexec_fn=ask_for_sigterm_when_parent_dies,
        )
    url = f"http://{HOST}:{port}"
    deadline = time.monotonic() + _START_TIMEOUT_S
    try:
        async with new_session() as session:
            while not await is_healthy(session, url):
                if process.returncode is not None or time.monotonic() > deadline:
                    raise ServerError(f"{name} does not serve; see {log}")
                await asyncio.sleep(0.1)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
