# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real vLLM servers on a CPU: started, watched, killed, none left behind."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiohttp
import psutil

from nixl_lab.processes import (
    ask_for_sigterm_when_parent_dies,
    settle_threads,
    wait_until_ended,
)

Role = Literal["prefill", "decode"]

HOST = "127.0.0.1"
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_SERVER_FLAGS = (
    "--enforce-eager",
    # Some virtual CPUs announce bfloat16 instructions that they then refuse.
    "--dtype=float32",
    "--block-size=128",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    # 16 times what these requests can hold, instead of a whole GiB a server.
    "--num-gpu-blocks-override=1024",
    "--no-enable-prefix-caching",
)
_SERVER_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
    "PYTHONUNBUFFERED": "1",
}
# Outside the range that Linux takes ports for outgoing connections from: else
# one of them may hold the port of a killed server when its replacement starts.
_PORTS = range(20000, 30000)
_SUMMARY_LINES = 12
_SUMMARY_WIDTH = 150
_FATAL_LINES = r"ERROR|Error\b|[Ff]atal|[Ss]ignal|died|Killed"
_LOG_POLL_S = 0.02
_READY_POLL_S = 0.25
_IN_SERVER = Path(__file__).with_name("in_server")
_EXTENSION = "lab_worker.LabWorkerExtension"
_PLUGINS = "nixl_heartbeat,nixl_peer_admin"
# The shell leads the server's process group. The kernel sends it SIGTERM when
# this process dies, however that happens, and it then takes the group along.
_GROUP_LEADER = 'trap "kill -KILL 0" TERM; "$@" & wait $!'


class ServerError(RuntimeError):
    """A server did not do what it was asked to do; the message says how to see why."""


@dataclass(frozen=True)
class ServerOptions:
    """What the servers of one deployment have in common.

    Attributes:
        model: Folder of the model to serve.
        log_dir: Folder for one log file per server start.
        stock: Leave the plugin out, so that vLLM's own connector runs.
        interval: The connector's `peer_heartbeat_interval`; None for its default.
        vllm: The release to run, out of `.venv/server-VERSION`; None for the one that
            is installed.
        env: Further environment variables.
        start_timeout: Seconds that a server may take until it is healthy.
        connector: Name of the connector.
    """

    model: Path
    log_dir: Path
    stock: bool = False
    interval: float | None = None
    vllm: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 600.0
    connector: str = "NixlConnector"


class VllmServer:
    """One vLLM API server with its engine and worker, in a process group of its own.

    Killed and started again it keeps its name and ports, as a replacement does.
    """

    def __init__(self, name: str, role: Role, options: ServerOptions) -> None:
        self.name = name
        self.role = role
        self.options = options
        self.port = free_port()
        self.side_channel_port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.has_log = True
        self.starts = 0
        self.tensor_parallel = 1
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: list[psutil.Process] = []

    @property
    def log_path(self) -> Path:
        """The log of the latest start."""
        return self.log_of(self.starts)

    def log_of(self, start: int) -> Path:
        """The log of one start, counted from 1."""
        return self.options.log_dir / f"{self.name}.{start}.log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts the server, on the ports that it had; returns when it serves."""
        self.spawn()
        await self.wait_ready()

    async def kill(self) -> None:
        """Sends SIGKILL to every process of the server and waits until all are gone."""
        self.kill_now()

    async def alive(self) -> bool:
        """Whether the server's first process runs."""
        return self.running

    async def lines(self) -> AsyncIterator[str]:
        """Each start's log, line by line as it is written, one after the other."""
        for start in itertools.count(1):
            while self.starts < start:
                await asyncio.sleep(_LOG_POLL_S)
            with self.log_of(start).open(errors="replace") as log:
                rest = ""
                while True:
                    # Asked before reading: nothing follows once there is a new log.
                    over = self.starts > start
                    *lines, rest = (rest + log.read()).split("\n")
                    for line in lines:
                        yield line
                    if over:
                        break
                    await asyncio.sleep(_LOG_POLL_S)

    def spawn(self) -> None:
        """Starts the server's processes; to be called in the main thread.

        The kernel takes the end of the calling thread for the death of the parent.
        """
        if self.running:
            raise ServerError(f"{self.name} is already running")
        self.starts += 1
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GROUP_LEADER, "sh", *self._command()],
                env=self._environment(),
                cwd=self.options.log_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Not a session of its own: the kernel weighs nice values only
                # between processes of one session.
                process_group=0,
                preexec_fn=ask_for_sigterm_when_parent_dies,
            )

    async def wait_ready(self) -> None:
        """Waits until the server is healthy, then settles its threads."""
        deadline = time.monotonic() + self.options.start_timeout
        async with aiohttp.ClientSession() as session:
            while not await is_healthy(session, self.url):
                if not self.running:
                    raise ServerError(
                        f"{self.name} ended while starting\n{self.log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"{self.name} is not healthy after"
                        f" {self.options.start_timeout:.0f} s\n{self.log_tail()}"
                    )
                await asyncio.sleep(_READY_POLL_S)
        for worker in self.workers():
            settle_threads(worker.pid)

    def kill_now(self) -> None:
        """Kills the server, also what a crash of its engine alone left of it."""
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until_ended(self._stopped)
        self._stopped = []
        if self._process is None:
            return
        members = list(self._members())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait_until_ended(members)
        self._process = None

    def go_dark(self) -> None:
        """Ends the server so that its peers see nothing of it.

        Its workers, which hold the connections, stop instead of ending.
        """
        assert self._process is not None
        self._stopped = self.workers()
        for process in self._stopped:
            process.suspend()
        rest = [p for p in self._members() if p not in self._stopped]
        for process in rest:
            process.kill()
        self._process.wait()
        wait_until_ended(rest)
        self._process = None

    def workers(self) -> list[psutil.Process]:
        """The processes that hold the NIXL agents."""
        return self.processes("VLLM::Worker")

    def processes(self, title: str) -> list[psutil.Process]:
        """The server's processes of a title: VLLM::Worker or VLLM::EngineCore."""
        found = []
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def log_lines(self, pattern: str) -> list[str]:
        """The lines of the latest log that match."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if re.search(pattern, line)]

    def log_tail(self, lines: int = 25) -> str:
        """The end of the log under a heading with its path, for error messages."""
        if not self.log_path.exists():
            return f"--- {self.name}: no log"
        text = self.log_path.read_text(errors="replace")
        return "\n".join([f"--- {self.log_path}", *text.splitlines()[-lines:]])

    def crash_summary(self) -> str:
        """How a server that nobody killed ended, in a few lines."""
        if self.starts == 0:
            return f"{self.name} was never started"
        status = self._process.poll() if self._process else None
        lines = [line[:_SUMMARY_WIDTH] for line in self.log_lines(_FATAL_LINES)]
        # The first errors are the cause, the last ones name the exception.
        if len(lines) > _SUMMARY_LINES:
            lines[_SUMMARY_LINES // 2 : -_SUMMARY_LINES // 2] = ["..."]
        heading = f"{self.name}, exit status {status}; {self.log_path}:"
        return "\n".join([heading, *lines])

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", HOST, "--port", str(self.port)]
        command += ["--model", str(self.options.model), *_SERVER_FLAGS]
        command += ["--worker-extension-cls", _EXTENSION]
        if self.tensor_parallel > 1:
            command += ["--tensor-parallel-size", str(self.tensor_parallel)]
        return [*command, "--kv-transfer-config", json.dumps(self._kv_transfer())]

    def _kv_transfer(self) -> dict[str, object]:
        extra: dict[str, object] = {"num_threads": 0}
        if self.options.interval is not None and not self.options.stock:
            extra["peer_heartbeat_interval"] = self.options.interval
        return {
            "kv_connector": self.options.connector,
            "kv_role": _KV_ROLES[self.role],
            "kv_buffer_device": "cpu",
            # A lost block fails its request: recomputing would hide the loss.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **_SERVER_ENV, **self.options.env}
        path = [str(_IN_SERVER)]
        if self.options.vllm is not None:
            path.insert(0, str(release_folder(self.options.vllm)))
            # 0.33.0's Python is a CUDA build and would look for a GPU.
            env["VLLM_TARGET_DEVICE"] = "cpu"
        env["PYTHONPATH"] = os.pathsep.join(path)
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        env["VLLM_PLUGINS"] = "" if self.options.stock else _PLUGINS
        return env

    def _members(self) -> Iterator[psutil.Process]:
        if self._process is None:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self._process.pid:
                    yield process


class Deployment:
    """Servers that live as long as its `async with` block, whatever ends it."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.servers: dict[str, VllmServer] = {}

    def add(self, name: str, role: Role) -> VllmServer:
        """Adds a server, not yet started."""
        self.servers[name] = VllmServer(name, role, self.options)
        return self.servers[name]

    @property
    def prefills(self) -> list[VllmServer]:
        return [s for s in self.servers.values() if s.role == "prefill"]

    @property
    def decoders(self) -> list[VllmServer]:
        return [s for s in self.servers.values() if s.role == "decode"]

    async def start_all(self) -> None:
        """Starts all servers at once and waits until each is ready."""
        for server in self.servers.values():
            server.spawn()
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers.values():
                    group.create_task(server.wait_ready())
        except* ServerError as failed:
            error = failed.exceptions[0]
        else:
            return
        raise error

    async def __aenter__(self) -> Self:
        self.options.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self.servers.values():
            server.kill_now()


def release_folder(version: str) -> Path:
    """Where `tools/install.py --server` puts a release that can serve on a CPU."""
    return Path(sys.prefix) / f"server-{version}"


def free_port() -> int:
    """A TCP port that nothing listens on and no outgoing connection will take."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerError("no free TCP port")


async def is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the server at `url` answers its health check."""
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
