# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A drill from its arguments to its report, however it ends."""

import argparse
import asyncio
import datetime
import os
import platform
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import aiohttp
import psutil

from nixl_lab.arguments import EXIT_INTERRUPTED
from nixl_lab.drill_instances import CommandInstance, Commands, LocalInstance
from nixl_lab.drill_report import write_report
from nixl_lab.drill_rules import Record, judge
from nixl_lab.drill_run import Drill, DrillError
from nixl_lab.model import ensure_model
from nixl_lab.progress import Steps
from nixl_lab.servers import Deployment, ServerOptions

_INTERRUPTED = "interrupted"


async def play(args: argparse.Namespace) -> int:
    """Runs the drill and writes its report; returns the exit status."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        _on_signals(_nothing)
        task.cancel()

    _on_signals(stop)
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    record = Record(
        about=_about(args),
        interval=args.interval,
        cycles=args.cycles,
        prefills=[name for name, _ in args.prefill] or ["prefill-1", "prefill-2"],
        decoders=[name for name, _ in args.decode] or ["decode-1", "decode-2"],
    )
    evidence = ""
    try:
        if args.prefill:
            await _on_own_deployment(args, record, output)
        else:
            await _on_local_servers(args, record, output)
    except asyncio.CancelledError:
        record.stopped = _INTERRUPTED
    except DrillError as error:
        record.stopped = str(error)
        evidence = error.evidence
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        record.stopped = str(error) or repr(error)
    except Exception as error:
        record.stopped = repr(error)
        raise
    finally:
        _on_signals(_nothing)
        record.write(output / "drill.json")
        write_report(record, output / "report.html", args.compare)
    status = _verdict(record, output)
    if evidence:
        print(evidence, file=sys.stderr)
    return status


def _verdict(record: Record, output: Path) -> int:
    rules = judge(record)
    for rule in rules:
        print(f"{'pass' if rule.passed else 'FAIL'}  {rule.text}\n      {rule.detail}")
    print(f"report: {output / 'report.html'}")
    if record.stopped == _INTERRUPTED:
        print("interrupted; nothing of the drill runs any more", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if all(rule.passed for rule in rules) else 1


async def _on_own_deployment(
    args: argparse.Namespace, record: Record, output: Path
) -> None:
    commands = Commands(args.kill, args.start, args.logs, output / "commands.log")
    instances = [
        *(CommandInstance(n, "prefill", url, commands) for n, url in args.prefill),
        *(CommandInstance(n, "decode", url, commands) for n, url in args.decode),
    ]
    await _ask_version(record, instances[-1].url)
    await Drill(instances, record, Steps()).run()


async def _on_local_servers(
    args: argparse.Namespace, record: Record, output: Path
) -> None:
    steps = Steps()
    with steps.step("make the tiny model"):
        model = ensure_model(args.cache)
    options = ServerOptions(
        model=model,
        log_dir=output / "logs",
        stock=args.stock,
        interval=args.interval,
    )
    async with Deployment(options) as deployment:
        for name in record.prefills:
            deployment.add(name, "prefill")
        for name in record.decoders:
            deployment.add(name, "decode")
        with steps.step(f"start {', '.join(deployment.servers)}"):
            await deployment.start_all()
        instances = [LocalInstance(server) for server in deployment.servers.values()]
        await _ask_version(record, instances[-1].url)
        await Drill(instances, record, steps).run()


def _about(args: argparse.Namespace) -> dict[str, str]:
    """What the figures depend on, as far as it is known from here."""
    memory = psutil.virtual_memory().total / 2**30
    gpus = Path("/proc/driver/nvidia/gpus")
    count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "connector": "as deployed",
        "heartbeat interval": f"{args.interval:g} s",
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB,"
        f" {count or 'no'} NVIDIA GPU, {platform.system()} {platform.machine()}",
    }
    if args.prefill:
        about["machine"] += " (runs the drill; the servers are elsewhere)"
        return about
    ours = f"vllm-nixl-heartbeat {version('vllm-nixl-heartbeat')}"
    about["connector"] = "stock" if args.stock else ours
    return about | {"NIXL": version("nixl"), "Python": platform.python_version()}


async def _ask_version(record: Record, url: str) -> None:
    """Takes vLLM's version from a server."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{url}/version") as answer,
    ):
        answer.raise_for_status()
        record.about["vLLM"] = (await answer.json())["version"]


def _on_signals(action: Callable[[], None]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, action)


def _nothing() -> None:
    """Impatience must not cost the report."""
