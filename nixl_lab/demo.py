# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo: real vLLM servers on this machine, and what happens when one fails."""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nixl_lab.record import SCENARIO_RULES, released
from nixl_lab.scenarios import SCENARIOS
from nixl_lab.session import (
    add_server_arguments,
    local_experiment,
    new_record,
    numbered,
    run,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one scenario; returns the exit status."""
    args = parse_args(argv)
    if reason := SCENARIOS[args.scenario].skip_reason():
        print(f"skipped: {reason}")
        return 0
    output = args.output or Path(tempfile.mkdtemp(prefix="nixl-lab-"))
    status = asyncio.run(play(args, output.resolve()))
    if args.output is None and status == 0:
        shutil.rmtree(output)
    return status


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="nixl_lab.demo", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="replace")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="takes the record and the servers' logs (default: kept when it fails)",
    )
    add_server_arguments(parser)
    return parser.parse_args(argv)


async def play(args: argparse.Namespace, output: Path) -> int:
    """Starts the deployment, plays the scenario and shows its outcome."""
    scenario = SCENARIOS[args.scenario]
    record = new_record(
        args,
        numbered("prefill", scenario.prefills),
        numbered("decode", scenario.decoders),
    )

    async def played() -> str:
        async with local_experiment(
            args,
            record,
            output,
            env=scenario.env,
            tensor_parallel=scenario.tensor_parallel,
            push=scenario.push,
        ) as lab:
            line = await scenario.play(lab)
        lab.steps.table()
        return line

    # What stock does is shown, not judged.
    rules = () if args.stock else SCENARIO_RULES
    if scenario.releases and not args.stock:
        rules = (released, *rules)
    return await run(played, record, rules, output)


if __name__ == "__main__":
    sys.exit(main())
