# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real connector workers on real NIXL agents: prefills in processes, decoders here.

``Nursery`` starts prefill processes, ``Prefill`` is one of them, ``Decoder`` is a
worker in this process. Everything waits with ``wait_until``: on a condition, with
a deadline, and with evidence when it passes.
"""

import contextlib
import faulthandler
import itertools
import logging
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import worker_factory
from prefill_process import WatchedAgent, building_worker, kv_pattern

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

DEFAULT_ENV = {"UCX_TLS": "tcp,self"}
STEP_S = 0.005
_START_TIMEOUT_S = 120.0
_READ_TIMEOUT_S = 60.0
_DUMP_AFTER_S = 10.0
# From anywhere: other tests may run on this machine at the same time.
_PORTS = iter(range(random.SystemRandom().randrange(15_000, 25_000), 32_000))
_NURSERY = Path(__file__).with_name("prefill_process.py")


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_LOG = _ListHandler()


def wait_until(
    condition: Callable[[], Any],
    deadline_s: float,
    evidence: Callable[[], str] = str,
    every: Callable[[], Any] | None = None,
    poll_s: float = STEP_S,
) -> float:
    """Wait for a condition; return the seconds it took.

    Args:
        condition: What to wait for.
        deadline_s: Seconds after which to give up.
        evidence: Describes what is going on, for the failure's message.
        every: Called before each check, for instance a decoder's step.
        poll_s: Seconds between two checks.

    Raises:
        AssertionError: If the condition does not come true in time.

    """
    start = time.monotonic()
    # Written even while a call into NIXL keeps the interpreter's lock: the failure
    # alone would not show who waited, and for what.
    faulthandler.dump_traceback_later(min(_DUMP_AFTER_S, 0.8 * deadline_s))
    try:
        while True:
            if every is not None:
                every()
            if condition():
                return time.monotonic() - start
            if time.monotonic() - start > deadline_s:
                raise AssertionError(f"not within {deadline_s} s\n{evidence()}")
            time.sleep(poll_s)
    finally:
        faulthandler.cancel_dump_traceback_later()


def free_port() -> int:
    """Return a TCP port that nothing listens on; a new one each time.

    It lies below the ports that the kernel hands out, so that no connection takes
    it before a prefill that has yet to start does.
    """
    for port in _PORTS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            return port
    raise AssertionError("no port is free")


def model_dir() -> str:
    """Return the model directory; its path is part of the compatibility hash."""
    if worker_factory._MODEL_DIR is None:
        worker_factory._MODEL_DIR = worker_factory._model_dir()
    return worker_factory._MODEL_DIR


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Nursery:
    """A process that forks prefill processes, optionally in a network namespace."""

    def __init__(self, log_dir: Path, netns: str | None = None):
        """Start the process.

        Args:
            log_dir: Where each prefill writes its log.
            netns: Network namespace to live in; needs the rights for it.

        """
        self._log_dir = log_dir
        self._names = itertools.count()
        prefix = ["ip", "netns", "exec", netns] if netns else []
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = log_dir / f"nursery-{netns or 'host'}.log"
        with other, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, _NURSERY, str(other.fileno()), model_dir()],
                pass_fds=[other.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
            )
        self._socket.settimeout(_START_TIMEOUT_S)
        self._ready = False

    def spawn(
        self, name: str, process: str, arguments: dict[str, Any], env: dict[str, str]
    ) -> "Child":
        """Start a child process and wait until it is ready.

        Args:
            name: Name of its log file.
            process: What runs in it, as ``module:class``; see `PrefillProcess`.
            arguments: Arguments of the class.
            env: Environment variables to set in it.

        """
        mine, other = socket.socketpair()
        log = self._log_dir / f"{name}-{next(self._names)}.log"
        order = {
            "process": process,
            "arguments": arguments,
            "env": DEFAULT_ENV | env,
            "log": str(log),
        }
        with other:
            try:
                if not self._ready:
                    assert self._socket.recv(16) == b"ready"
                    self._ready = True
                socket.send_fds(self._socket, [pickle.dumps(order)], [other.fileno()])
                pid = int(self._socket.recv(16))
            except (OSError, AssertionError, ValueError) as e:
                raise AssertionError(f"no nursery\n{self._log.read_text()}") from e
        child = Child(pid, Connection(mine.detach()), log)
        child.wait_ready()
        return child

    def close(self) -> None:
        """End the process; the kernel ends its children with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Child:
    """A forked process that obeys commands."""

    def __init__(self, pid: int, connection: Connection, log: Path):
        """Take charge of a process that the nursery has forked."""
        self.pid = pid
        self.log = log
        self.responsive = True
        """Whether it was neither killed nor stopped."""
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        """Whether the process exists."""
        closed = self._connection.closed
        return not closed and not select.select([self._pidfd], [], [], 0)[0]

    def wait_ready(self) -> None:
        """Wait for the child's first message."""
        self._receive(_START_TIMEOUT_S)

    def call(self, name: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """Call a method of the process's object and return its result."""
        self.tell(name, *args)
        return self._receive(timeout_s)

    def tell(self, name: str, *args: Any) -> None:
        """Call a method of the process's object that does not return."""
        self._connection.send((name, args))

    def _receive(self, timeout_s: float) -> Any:
        try:
            assert self._connection.poll(timeout_s), f"no answer\n{self.evidence()}"
            return self._connection.recv()
        except (EOFError, OSError) as e:
            raise AssertionError(f"process {self.pid} ended\n{self.evidence()}") from e

    def _signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone."""
        self.responsive = False
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        wait_until(lambda: not self.alive, 30, self.evidence)

    def stop(self) -> None:
        """Stop the process with SIGSTOP."""
        self.responsive = False
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on."""
        self._signal(signal.SIGCONT)
        self.responsive = True

    def evidence(self) -> str:
        """Return the end of the process's log."""
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        state = "alive" if self.alive else "gone"
        return "\n".join([f"--- {self.log.name}, pid {self.pid}, {state}", *lines])

    def close(self) -> None:
        """End the process and let go of it."""
        if self._connection.closed:
            return
        self.kill()
        self._connection.close()
        os.close(self._pidfd)


@dataclass
class RemotePrefill:
    """What a decoder has to know about a prefill."""

    engine_id: str
    host: str
    port: int
    num_blocks: int

    def expect(self, req_id: str) -> None:
        """Do not tell the prefill: nobody here can."""

    def evidence(self) -> str:
        """Say that nothing more is known."""
        return f"--- {self}"


class Prefill(RemotePrefill):
    """A prefill in a process of its own: real worker, real agent, side channel."""

    def __init__(
        self,
        nursery: Nursery,
        engine_id: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        num_blocks: int = 8,
        stepping: bool = True,
        env: dict[str, str] | None = None,
        **extra: Any,
    ):
        """Start the process and wait until it serves handshakes.

        Args:
            nursery: Where to start it.
            engine_id: Its engine id.
            host: Address of its side channel.
            port: Port of its side channel; a free one by default.
            num_blocks: Blocks in its KV cache, which `kv_pattern` fills.
            stepping: Whether it takes a step every 10 ms, or none until told.
            env: Environment variables to set.
            **extra: Keys of its ``kv_connector_extra_config``;
                ``peer_heartbeat_interval=0`` makes it a stock prefill.

        """
        super().__init__(engine_id, host, port or free_port(), num_blocks)
        self.child = nursery.spawn(
            engine_id,
            "prefill_process:PrefillProcess",
            {
                "engine_id": engine_id,
                "host": host,
                "port": self.port,
                "num_blocks": num_blocks,
                "stepping": stepping,
                "extra": extra,
            },
            env or {},
        )
        self.call = self.child.call
        self.kill = self.child.kill
        self.stop = self.child.stop
        self.resume = self.child.resume
        self.close = self.child.close

    def expect(self, req_id: str) -> None:
        """Tell a prefill that can hear it to hold a request's blocks."""
        if self.child.responsive:
            self.call("expect", req_id)

    def evidence(self) -> str:
        """Return the end of the process's log."""
        return self.child.evidence()

    def state(self) -> dict[str, Any]:
        """Return what `PrefillProcess.state` reports."""
        return self.call("state")


class Decoder:
    """A decoder in this process: the real worker, driven step by step."""

    def __init__(
        self,
        engine_id: str = "decoder",
        *,
        num_blocks: int = 8,
        env: dict[str, str] | None = None,
        nice: int = 19,
        **extra: Any,
    ):
        """Build the worker.

        Args:
            engine_id: Its engine id.
            num_blocks: Blocks in its KV cache.
            env: Environment variables to set while the NIXL agent is made.
            nice: Niceness of NIXL's threads, see `building_worker`.
            **extra: Keys of its ``kv_connector_extra_config``;
                ``peer_heartbeat_interval=0`` builds the stock worker.

        """
        model_dir()
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.kv_caches = worker_factory.make_kv_caches(num_blocks)
        self.finished: list[str] = []
        """Requests reported as received."""
        self.failed: list[str] = []
        """Requests reported as failed."""
        self.invalid_blocks: set[int] = set()
        """Local blocks reported as not loaded."""
        self._prefills: dict[str, RemotePrefill] = {}
        self._req_ids = itertools.count()
        self._metadata = NixlConnectorMetadata()
        with environment(**DEFAULT_ENV | (env or {})), building_worker(nice):
            connector = worker_factory.make_connector(
                engine_id, num_blocks, kv_caches=self.kv_caches, **extra
            )
        self.connector = connector
        self.worker = connector.connector_worker
        self.worker.nixl_wrapper = self.agent = WatchedAgent(self.worker.nixl_wrapper)
        # Again for each decoder: a new vLLM configuration resets vLLM's loggers.
        logging.getLogger("vllm").addHandler(_LOG)
        self._log_start = len(_LOG.lines)

    # -- Reads -----------------------------------------------------------------

    def start(
        self,
        prefill: RemotePrefill,
        blocks: Iterable[int] = (0, 1),
        local_blocks: Iterable[int] | None = None,
    ) -> str:
        """Ask for blocks of a prefill in the next step; return the request's id.

        Args:
            prefill: Where to read from.
            blocks: The prefill's blocks.
            local_blocks: Where to put them; the same numbers by default.

        """
        blocks = list(blocks)
        local_blocks = blocks if local_blocks is None else list(local_blocks)
        req_id = f"{self.engine_id}-{next(self._req_ids)}"
        self._prefills[prefill.engine_id] = prefill
        prefill.expect(f"remote-{req_id}")
        for cache in self.kv_caches.values():
            cache[local_blocks] = 0
        self._metadata.add_new_req_to_recv(
            req_id,
            (local_blocks,),
            {
                "remote_block_ids": (blocks,),
                "remote_engine_id": prefill.engine_id,
                "remote_request_id": f"remote-{req_id}",
                "remote_host": prefill.host,
                "remote_port": prefill.port,
                "tp_size": 1,
            },
            local_num_computed_blocks=(0,),
            awaiting_kvs=True,
        )
        return req_id

    def step(self) -> Any:
        """Run one step and keep what it reports."""
        metadata, self._metadata = self._metadata, NixlConnectorMetadata()
        self.worker.start_load_kv(metadata)
        results = self.worker.get_transfer_results()
        self.failed += sorted(results.failed_recving)
        self.finished += sorted(results.finished_recving - results.failed_recving)
        self.invalid_blocks |= self.worker.get_block_ids_with_load_errors()
        return results

    def wait_until(
        self, condition: Callable[[], Any], deadline_s: float, stepping: bool = True
    ) -> float:
        """Wait for a condition, stepping meanwhile; return the seconds it took."""
        return wait_until(
            condition,
            deadline_s,
            self.evidence,
            every=self.step if stepping else None,
        )

    def wait_for(self, req_id: str, deadline_s: float = _READ_TIMEOUT_S) -> bool:
        """Step until a request is reported; return whether it was received."""
        self.wait_until(
            lambda: req_id in self.finished or req_id in self.failed, deadline_s
        )
        return req_id in self.finished

    def read(
        self,
        prefill: RemotePrefill,
        blocks: Iterable[int] = (0, 1),
        local_blocks: Iterable[int] | None = None,
        deadline_s: float = _READ_TIMEOUT_S,
    ) -> None:
        """Read blocks and check every byte of them."""
        blocks = list(blocks)
        local_blocks = blocks if local_blocks is None else list(local_blocks)
        req_id = self.start(prefill, blocks, local_blocks)
        assert self.wait_for(req_id, deadline_s), f"{req_id} failed\n{self.evidence()}"
        self.check(prefill, blocks, local_blocks)

    def check(
        self, prefill: RemotePrefill, blocks: list[int], local_blocks: list[int]
    ) -> None:
        """Check that blocks hold what the prefill has."""
        for layer, cache in enumerate(self.kv_caches.values()):
            words = cache.view(torch.int32).view(self.num_blocks, -1)
            expected = kv_pattern(
                prefill.engine_id, layer, prefill.num_blocks, words.shape[1]
            )
            assert torch.equal(words[local_blocks].cpu(), expected[blocks]), (
                f"wrong bytes from {prefill.engine_id}, layer {layer}"
            )

    # -- What is known ---------------------------------------------------------

    @property
    def connected(self) -> set[str]:
        """Engines whose NIXL state is loaded."""
        return set(self.worker._remote_agents)

    def agent_of(self, engine_id: str) -> str:
        """Return the agent of a connected engine."""
        (agent,) = self.worker._remote_agents[engine_id].values()
        return agent

    @property
    def log(self) -> list[str]:
        """What vLLM has logged in this process since the decoder was built."""
        return _LOG.lines[self._log_start :]

    def lines(self, start: str) -> list[str]:
        """Return this decoder's log lines with a context that begin like this."""
        own = f"'engine_id': '{self.engine_id}'"
        return [line for line in self.log if line.startswith(start) and own in line]

    def evidence(self) -> str:
        """Describe the worker and the prefills it has read from."""
        peers = getattr(self.worker, "_peers", None)
        state = {
            "connected": sorted(self.connected),
            "open reads": {
                req_id: len(handles)
                for req_id, handles in self.worker._recving_transfers.items()
            },
            "handshakes": list(self.worker._handshake_futures),
            "lost": dict(peers.lost) if peers is not None else None,
            "finished": self.finished[-5:],
            "failed": self.failed[-5:],
        }
        parts = [f"--- {self.engine_id}: {state}", *self.log[-25:]]
        parts += [prefill.evidence() for prefill in self._prefills.values()]
        return "\n".join(parts)

    def close(self) -> None:
        """Shut the worker down."""
        self.worker.shutdown()
