# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prefill processes for tests: real connector workers with a real NIXL agent.

Run as a program, this is a fork server: it imports vLLM once, which takes most of a
prefill's start-up, and forks a child per prefill. `fork_server.py` drives it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_STEP_S = 0.01
_LEASE_S = 600.0


def kv_pattern(engine_id: str, layer: int, num_blocks: int, size: int) -> torch.Tensor:
    """Return the bytes that a prefill holds in one layer.

    Each block differs from every other block of every layer and engine.

    Args:
        engine_id: The prefill's engine id.
        layer: Index of the layer.
        num_blocks: Blocks in the layer.
        size: 32-bit words in a block.

    """
    seed = zlib.crc32(f"{engine_id}/{layer}".encode())
    blocks = torch.arange(num_blocks, dtype=torch.int64) * 0x9E3779B1 + seed
    words = torch.arange(size, dtype=torch.int32)
    return (blocks & 0x7FFFFFFF).to(torch.int32)[:, None] + words


@contextlib.contextmanager
def building_worker(nice: int = 19) -> Iterator[None]:
    """Undo what building a worker on CPU does to a process on few cores.

    vLLM pins the calling thread, and all that it starts later, to one core; and
    NIXL's progress threads spin, which would starve the steps.

    Args:
        nice: Niceness of NIXL's threads. A high one is no good where calls into NIXL
            are timed: they spin while such a thread waits with their lock.

    """
    cores = os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))
    try:
        yield
    finally:
        python_threads = {str(thread.native_id) for thread in threading.enumerate()}
        os.sched_setaffinity(0, cores)
        for tid in set(os.listdir("/proc/self/task")) - before - python_threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(tid), cores)
                os.setpriority(os.PRIO_PROCESS, int(tid), nice)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class WatchedAgent:
    """A real NIXL agent that notes who is inside and what comes out."""

    def __init__(self, agent: Any):
        """Wrap an agent."""
        self.violations: list[str] = []
        """Calls made while another thread was inside."""
        self.notifs: Counter[str] = Counter()
        """Notifications fetched, by the name of the thread that did."""
        self.calls: Counter[str] = Counter()
        """Calls, by method."""
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        """Processor time of the caller inside, by the thread's name."""
        self._agent = agent
        self._inside: tuple[int, str] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._agent, name)
        # The last two build values, beside whatever goes on in the agent.
        if not callable(method) or name in ("get_reg_descs", "get_xfer_descs"):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            me = threading.get_ident()
            self.calls[name] += 1
            other = self._inside
            if other is not None and other[0] != me:
                self.violations.append(f"{name} while another thread is in {other[1]}")
            self._inside = me, name
            thread_name = threading.current_thread().name
            start = time.thread_time()
            try:
                result = method(*args, **kwargs)
            finally:
                self.cpu_seconds[thread_name] += time.thread_time() - start
                self._inside = other
            if name == "get_new_notifs":
                self.notifs[thread_name] += sum(map(len, result.values()))
            return result

        return call


@contextlib.contextmanager
def watching_agents() -> Iterator[list[WatchedAgent]]:
    """Give workers that are built meanwhile a `WatchedAgent`; yield those made."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    agents: list[WatchedAgent] = []
    make_agent = base_worker.NixlWrapper

    def make_watched(*args: Any, **kwargs: Any) -> WatchedAgent:
        agents.append(WatchedAgent(make_agent(*args, **kwargs)))
        return agents[-1]

    # Not the worker's attribute afterwards: a worker may have wrapped it by then.
    with mock.patch.object(base_worker, "NixlWrapper", make_watched):
        yield agents


class PrefillProcess:
    """The child's side of a prefill; public methods are called by the test."""

    def __init__(
        self,
        engine_id: str,
        host: str,
        port: int,
        num_blocks: int,
        stepping: bool,
        extra: dict[str, Any],
    ):
        """Build the worker, fill its KV cache and serve its side channel."""
        import msgspec

        from tests.v1.kv_connector.unit.nixl_peers.worker_factory import (
            make_connector,
            make_kv_caches,
        )

        kv_caches = make_kv_caches(num_blocks)
        for layer, cache in enumerate(kv_caches.values()):
            words = cache.view(torch.int32).view(num_blocks, -1)
            words.copy_(kv_pattern(engine_id, layer, *words.shape))
        with building_worker(), watching_agents() as agents:
            connector = make_connector(
                engine_id,
                num_blocks,
                role="kv_producer",
                kv_caches=kv_caches,
                **extra,
            )
        self.stepping = stepping
        self.finished_sending: list[str] = []
        self.worker = connector.connector_worker
        (self.agent,) = agents
        self._new_sends: list[str] = []
        payload = msgspec.msgpack.encode(self.worker.xfer_handshake_metadata)
        serve_side_channel({(0, 0): payload}, host, port)

    def step(self) -> float:
        """Run one step; return how many seconds it took."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
            NixlConnectorMetadata,
        )

        metadata = NixlConnectorMetadata()
        new_sends, self._new_sends = self._new_sends, []
        metadata.reqs_in_batch.update(new_sends)
        expires = time.perf_counter() + _LEASE_S
        metadata.reqs_to_send.update(dict.fromkeys(new_sends, expires))
        start = time.perf_counter()
        self.worker.start_load_kv(metadata)
        results = self.worker.get_transfer_results()
        seconds = time.perf_counter() - start
        self.finished_sending += sorted(results.finished_sending)
        return seconds

    def set_stepping(self, stepping: bool) -> None:
        """Step periodically from now on, or stay idle."""
        self.stepping = stepping

    def hold_interpreter(self, seconds: float) -> None:
        """Keep every Python thread waiting, as a kernel compilation may."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def expect(self, *req_ids: str) -> None:
        """Hold these requests' blocks for a decoder, as the scheduler asks to.

        Takes a step if the process is idle: a scheduler would as well.
        """
        self._new_sends += req_ids
        self.step()

    def state(self) -> dict[str, Any]:
        """Return what tests look at."""
        return {
            "finished_sending": list(self.finished_sending),
            "rss": rss_bytes(),
            "notifs": dict(self.agent.notifs),
            "violations": list(self.agent.violations),
        }


def serve_side_channel(
    payloads: dict[tuple[int, int], bytes], host: str, port: int
) -> None:
    """Answer handshakes with the stock listener, in a thread.

    Args:
        payloads: What each rank answers, by (pp_rank, tp_rank).
        host: Address to listen on.
        port: Port to listen on.

    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
        NixlBaseConnectorScheduler,
    )

    ready = threading.Event()
    threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,
        args=(payloads, ready, threading.Event(), host, port),
        daemon=True,
        name="side-channel",
    ).start()
    assert ready.wait(timeout=10), f"cannot listen on {host}:{port}"


def serve(connection: Connection, process: Any) -> None:
    """Run the test's commands, and steps in between, until the test hangs up."""
    while True:
        if connection.poll(_STEP_S if process.stepping else None):
            name, args = connection.recv()
            connection.send(getattr(process, name)(*args))
        # After a command as well: a test that asks again and again must not keep the
        # process from what it waits for.
        if process.stepping:
            process.step()


def _run_child(connection: Connection, order: dict[str, Any]) -> None:
    module_name, _, class_name = order["process"].partition(":")
    process_cls = getattr(importlib.import_module(module_name), class_name)
    process = process_cls(**order["arguments"])
    ready = {"ready": True, "pid": os.getpid(), **order["arguments"]}
    print(json.dumps(ready, default=repr), flush=True)
    connection.send(ready)
    with contextlib.suppress(EOFError):
        serve(connection, process)


def _fork_child(order: dict[str, Any], fd: int, fork_server: socket.socket) -> int:
    if pid := os.fork():
        return pid
    try:
        fork_server.close()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["env"])
        _run_child(Connection(fd), order)
    except SystemExit:
        # A test wants to see an orderly exit.
        raise
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _import_what_children_need(model_dir: str) -> None:
    import nixl._api  # noqa: F401

    import vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector  # noqa: F401
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401
    from tests.v1.kv_connector.unit.nixl_peers import worker_factory

    # The first configuration inspects the model in a process of its own.
    worker_factory._MODEL_DIR = model_dir
    worker_factory.make_vllm_config("fork-server")


def main() -> None:
    """Fork a child for every order that comes with the descriptor of its pipe."""
    fd, model_dir = sys.argv[1:]
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    runpy.run_path(str(_ROOT / "conftest.py"))
    _import_what_children_need(model_dir)
    with socket.socket(fileno=int(fd)) as fork_server:
        fork_server.send(b"ready")
        while True:
            message, fds, _, _ = socket.recv_fds(fork_server, 1 << 16, 1)
            if not message:
                return
            pid = _fork_child(pickle.loads(message), fds[0], fork_server)
            os.close(fds[0])
            fork_server.send(str(pid).encode())


if __name__ == "__main__":
    main()
