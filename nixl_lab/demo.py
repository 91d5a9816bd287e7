# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo: a real deployment on this machine, and what happens when a prefill dies."""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from nixl_lab.arguments import DEFAULT_INTERVAL, EXIT_INTERRUPTED, seconds
from nixl_lab.lab import running_lab
from nixl_lab.model import ensure_model
from nixl_lab.progress import Steps
from nixl_lab.scenarios import SCENARIOS, Scenario
from nixl_lab.servers import ServerOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one scenario; returns the exit status."""
    args = parse_args(argv)
    scenario = SCENARIOS[args.scenario]
    obstacle = scenario.obstacle()
    if obstacle is not None:
        print(f"skipped: {obstacle}")
        return 0
    log_dir = args.keep_logs or Path(tempfile.mkdtemp(prefix="nixl-lab-"))
    try:
        asyncio.run(play(scenario, args, log_dir.resolve()))
    except (RuntimeError, aiohttp.ClientError) as error:
        print(f"FAILED: {error}\nserver logs: {log_dir}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; all servers are stopped", file=sys.stderr)
        status = EXIT_INTERRUPTED
    else:
        status = 0
    if args.keep_logs is None:
        shutil.rmtree(log_dir)
    return status


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="nixl_lab.demo", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="replace")
    parser.add_argument(
        "--stock",
        action="store_true",
        help="leave the plugin out: vLLM's own connector",
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        metavar="SECONDS",
        help=f"peer_heartbeat_interval (default {DEFAULT_INTERVAL}, the connector's)",
    )
    parser.add_argument(
        "--keep-logs", type=Path, metavar="DIR", help="write the servers' logs there"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where the tiny model is kept"
    )
    return parser.parse_args(argv)


async def play(scenario: Scenario, args: argparse.Namespace, log_dir: Path) -> None:
    """Starts the deployment, plays the scenario and shows its outcome."""
    stop_on_sigterm()
    steps = Steps()
    with steps.step("make the tiny model"):
        model = ensure_model(args.cache)
    options = ServerOptions(
        model=model,
        log_dir=log_dir,
        stock=args.stock,
        interval=args.interval,
        env=scenario.env,
    )
    interval = args.interval or DEFAULT_INTERVAL
    async with running_lab(options, scenario.prefills, interval, steps) as lab:
        result = await scenario.play(lab)
    steps.table()
    steps.last_line(result)


def stop_on_sigterm() -> None:
    """Makes SIGTERM end the scenario the way Ctrl-C does, servers first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


if __name__ == "__main__":
    sys.exit(main())
