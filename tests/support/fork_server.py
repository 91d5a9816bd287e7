# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Processes for tests: forked from one that has imported vLLM, which takes long."""

import contextlib
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until
from tests.v1.kv_connector.unit.nixl_peers import worker_factory

DEFAULT_ENV = {"UCX_TLS": "tcp,self"}
_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 120.0


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


class ForkServer:
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
        self._log = log_dir / f"fork-server-{netns or 'host'}.log"
        with other, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.support.prefill_process"]
                + [str(other.fileno()), model_dir()],
                cwd=_ROOT,
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
                raise AssertionError(f"no fork server\n{self._log.read_text()}") from e
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
        """Take charge of a process that the fork server has forked."""
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
        self.answer(_START_TIMEOUT_S)

    def call(self, name: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """Call a method of the process's object and return its result."""
        self.tell(name, *args)
        return self.answer(timeout_s)

    def tell(self, name: str, *args: Any) -> None:
        """Call a method of the process's object without waiting for it."""
        self._connection.send((name, args))

    @property
    def has_answered(self) -> bool:
        """Whether the method that was called has returned."""
        return self._connection.poll()

    def answer(self, timeout_s: float = 30.0) -> Any:
        """Return what the method that was called has returned."""
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
