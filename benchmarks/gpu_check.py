# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a release gives back on one NVIDIA GPU, and what the UCX setting for it costs.

A prefill process registers GPU memory with NIXL, a decode process reads it over
cuda_ipc, the first is killed. Reads are timed, and memory in use is recorded before the
kill, after it, after the release and when the decode process has ended: with vLLM's
connector and with ours, with UCX's cache of cuda_ipc mappings on (its default) and off.
No vLLM server is started.

Takes a Python that has vLLM, NIXL and torch with CUDA.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import environment, summary, use_checkout

_INTERVAL_S = 0.5
_RELEASE_TIMEOUT_S = 20.0
# How long the stock connector is given for what ours does in one interval.
_STOCK_WATCH_S = 5.0
_START_TIMEOUT_S = 240.0
# The driver takes a moment to give a dead process's memory back.
_SETTLE_S = 1.0
_READS = 20
# Without a pause the steps would take NIXL's thread its core where there are few.
_STEP_PAUSE_S = 0.0001
_HOST = "127.0.0.1"
_CACHE = "UCX_CUDA_IPC_CACHE"


@dataclass(frozen=True)
class Device:
    """Where the KV caches are.

    Attributes:
        name: torch's name for it.
        num_blocks: Blocks of 64 KiB in the prefill's KV cache.
        read_blocks: Those that the decoder reads at a time.
        tls: UCX's transports.
    """

    name: str
    num_blocks: int
    read_blocks: int
    tls: str


DEVICES = {
    "cuda": Device("cuda", 16384, 256, "cuda_ipc,cuda_copy,tcp,self"),
    # A rehearsal: the same steps on memory that a death always gives back.
    "cpu": Device("cpu", 512, 16, "tcp,self"),
}


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    if args.device == "cuda" and (reason := why_no_gpu()) is not None:
        print(f"no GPU, nothing done: {reason}")
        return 0
    if args.device == "cuda" and (missing := what_is_missing()) is not None:
        print(f"there is a GPU, but {sys.executable} {missing}", file=sys.stderr)
        return 1
    rows = []
    for stock in (True, False):
        for cache in ("y", "n"):
            rows.append(check(DEVICES[args.device], stock, cache))
            print(describe(rows[-1]), flush=True)
    if args.output is not None:
        figures = {"device": args.device, "environment": environment(), "rows": rows}
        args.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def why_no_gpu() -> str | None:
    """Return why there is no GPU to check, or None."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    if listed.returncode or "GPU 0" not in listed.stdout:
        return f"nvidia-smi lists none: {(listed.stdout + listed.stderr).strip()}"
    return None


def what_is_missing() -> str | None:
    """Return what this Python lacks for the check, or None."""
    try:
        import nixl._api  # noqa: F401
        import torch

        import vllm  # noqa: F401
    except ImportError as e:
        return f"cannot import what the check needs: {e}"
    if not torch.cuda.is_available():
        return f"has torch {torch.__version__}, which does not see it"
    return None


def check(device: Device, stock: bool, cache: str) -> dict[str, Any]:
    """Kill a prefill that a decoder has read from; return the memory in use.

    Args:
        device: Where the KV caches are.
        stock: Whether the decoder runs vLLM's own connector.
        cache: Value of `UCX_CUDA_IPC_CACHE`; UCX's default is "y".

    """
    env = {
        "UCX_TLS": device.tls,
        # Says in the log which transport the reads take.
        "UCX_PROTO_INFO": "y",
        "VLLM_TARGET_DEVICE": device.name,
        "VLLM_LOGGING_LEVEL": "INFO",
        _CACHE: cache,
    }
    row: dict[str, Any] = {
        "connector": "stock" if stock else "ours",
        _CACHE: cache,
        "read_mib": device.read_blocks / 16,
        "kv_cache_mib": device.num_blocks * 64 // 1024,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # The model's path is part of what both sides have to agree on.
        shared = (device.name, env, f"{folder}/model")
        processes = [
            stack.enter_context(
                _child(run, Path(folder, f"{name}.log"), *shared, *more)
            )
            for name, run, *more in (
                ("prefill", _run_prefill, device.num_blocks),
                ("decode", _run_decoder, device.read_blocks, stock),
            )
        ]
        prefill, decoder = processes

        def used() -> float:
            return used_mib(device, [process.pid for process in processes])

        port = prefill.answer(_START_TIMEOUT_S)
        decoder.answer(_START_TIMEOUT_S)
        row["first_read_ms"], *reads = decoder.call(
            "read", "prefill", _HOST, port, device.num_blocks
        )
        row["read_ms"] = summary(reads)
        row["before_kill_mib"] = used()
        prefill.kill()
        time.sleep(_SETTLE_S)
        row["after_kill_mib"] = used()
        row["released_after_s"] = decoder.call(
            "wait_released", _STOCK_WATCH_S if stock else _RELEASE_TIMEOUT_S
        )
        time.sleep(_SETTLE_S)
        row["after_release_mib"] = used()
        log = decoder.log.read_text(errors="replace")
        # As UCX names a transport with its device.
        row["read_over_cuda_ipc"] = "cuda_ipc/" in log
        decoder.kill()
        time.sleep(_SETTLE_S)
        row["after_all_mib"] = used()
    if not stock and row["released_after_s"] is None:
        raise RuntimeError(f"the prefill was not released: {row}")
    return row


def used_mib(device: Device, pids: list[int]) -> float:
    """Return the memory in use: of the GPU, or that of the processes."""
    if device.name == "cuda":
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return float(subprocess.check_output(["nvidia-smi", *query], text=True))
    pages = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def describe(row: dict[str, Any]) -> str:
    """Return a line for a person."""
    released = row["released_after_s"]
    return (
        f"{row['connector']}, {_CACHE}={row[_CACHE]},"
        f" {row['kv_cache_mib']} MiB of KV cache,"
        f" {'' if row['read_over_cuda_ipc'] else 'not '}over cuda_ipc;"
        f" a read of {row['read_mib']:.0f} MiB takes"
        f" {row['read_ms']['median']:.2f} ms, the first {row['first_read_ms']:.0f};"
        " in use:"
        f" {row['before_kill_mib']:.0f} MiB before the kill,"
        f" {row['after_kill_mib']:.0f} after it, {row['after_release_mib']:.0f}"
        f" {'without a release' if released is None else 'after the release'},"
        f" {row['after_all_mib']:.0f} without the decoder"
    )


# -- The two processes -----------------------------------------------------------------


@dataclass
class _Child:
    """A process that obeys commands."""

    process: Any
    connection: Connection
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, name: str, *args: Any) -> Any:
        self.connection.send((name, args))
        return self.answer(_RELEASE_TIMEOUT_S + 40)

    def answer(self, timeout: float) -> Any:
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
        except EOFError:
            pass
        tail = self.log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"no answer from {self.log.stem}:\n{tail}")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def _child(run: Callable[..., None], log: Path, *args: Any) -> Iterator[_Child]:
    """Run a function in a new interpreter: a CUDA context does not survive a fork."""
    spawn = multiprocessing.get_context("spawn")
    mine, other = spawn.Pipe()
    process = spawn.Process(target=run, args=(other, str(log), *args), daemon=True)
    process.start()
    other.close()
    child = _Child(process, mine, log)
    try:
        yield child
    finally:
        child.kill()
        mine.close()


def _prepare(log: str, device: str, env: dict[str, str], model: str) -> None:
    """Make this process ready to build a worker."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    use_checkout()
    from tests.v1.kv_connector.unit.nixl_peers import worker_factory

    worker_factory.DEVICE = device
    with contextlib.suppress(FileExistsError):
        os.symlink(worker_factory._model_dir(), model)
    worker_factory._MODEL_DIR = model


def _run_prefill(
    connection: Connection,
    log: str,
    device: str,
    env: dict[str, str],
    model: str,
    num_blocks: int,
) -> None:
    _prepare(log, device, env, model)
    from tests.support.ports import free_port
    from tests.support.prefill_process import PrefillProcess, serve

    port = free_port()
    process = PrefillProcess("prefill", _HOST, port, num_blocks, True, {})
    connection.send(port)
    with contextlib.suppress(EOFError):
        serve(connection, process)


def _run_decoder(
    connection: Connection,
    log: str,
    device: str,
    env: dict[str, str],
    model: str,
    read_blocks: int,
    stock: bool,
) -> None:
    _prepare(log, device, env, model)
    from tests.support.peers import Decoder, RemotePrefill
    from tests.support.prefill_process import serve

    class Process:
        stepping = True

        def __init__(self) -> None:
            self._decoder = Decoder(
                num_blocks=read_blocks,
                env=env,
                peer_heartbeat_interval=0 if stock else _INTERVAL_S,
            )

        def step(self) -> None:
            self._decoder.step()

        def read(
            self, engine_id: str, host: str, port: int, num_blocks: int
        ) -> list[float]:
            """Read again and again, check the bytes; return the milliseconds of each.

            The first one shakes hands as well.
            """
            prefill = RemotePrefill(engine_id, host, port, num_blocks)
            blocks = list(range(read_blocks))
            took = []
            for _ in range(1 + _READS):
                request = self._decoder.start(prefill, blocks)
                start = time.perf_counter()
                while request not in self._decoder.finished:
                    self._decoder.step()
                    time.sleep(_STEP_PAUSE_S)
                    assert not self._decoder.failed, self._decoder.evidence()
                took.append((time.perf_counter() - start) * 1e3)
            self._decoder.check(prefill, blocks, blocks)
            return took

        def wait_released(self, timeout: float) -> float | None:
            """Step until nothing is connected; return the seconds, None if never."""
            start = time.monotonic()
            while self._decoder.connected:
                if time.monotonic() - start > timeout:
                    return None
                self._decoder.step()
                time.sleep(0.005)
            return time.monotonic() - start

    process = Process()
    connection.send("ready")
    with contextlib.suppress(EOFError):
        serve(connection, process)


if __name__ == "__main__":
    sys.exit(main())
