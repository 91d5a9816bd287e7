# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the benchmarks, keep their results and write the report."""

import argparse
import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, use_checkout

PARTS = (
    "step_cost",
    "longest_step",
    "heartbeat_cost",
    "monitor_cost",
    "release_time",
    "throughput",
    "fleet",
    "memory",
)
# Those that compare within seconds, for CI.
QUICK_PARTS = ("step_cost", "longest_step", "fleet", "memory")


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    args = parse_args()
    parts = args.only or (QUICK_PARTS if args.quick else PARTS)
    if args.report:
        write_report(read_results(args.output), args.output)
        return 0
    if len(parts) == 1:
        return run_part(parts[0], args.quick, args.output)
    # Each in a process of its own: the agents of one would slow the next.
    status = 0
    for part in parts:
        command = [sys.executable, "-m", "benchmarks", "--only", part]
        command += ["--output", str(args.output)] + ["--quick"] * args.quick
        status |= subprocess.run(command, cwd=ROOT).returncode
    return status


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"run these parts and keep the others' results: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small runs that only check ratios; nothing is written",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing, write the report from the kept results",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "benchmarks",
        help="folder of the results and the report",
    )
    return parser.parse_args()


def run_part(name: str, quick: bool, output: Path) -> int:
    """Run one part: check its ratios, or keep its results and write the report."""
    print(f"--- {name}", flush=True)
    use_checkout()
    part = importlib.import_module(f"benchmarks.{name}")
    where = environment()
    start = time.monotonic()
    # The log of the workers under measurement is not the result.
    with contextlib.redirect_stdout(sys.stderr):
        figures = part.measure(quick)
    seconds = time.monotonic() - start
    limits = part.guard(figures) if quick else part.targets(figures)
    for limit in limits:
        print(limit)
    if quick:
        return int(not all(limit.met for limit in limits))
    results = read_results(output)
    results[name] = {
        "command": f'make bench ONLY="{name}"',
        "environment": where,
        "seconds": round(seconds, 1),
        "figures": figures,
        "targets": [vars(limit) | {"met": limit.met} for limit in limits],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(dump(results))
    write_report(results, output)
    return 0


def read_results(output: Path) -> dict[str, Any]:
    """Return the kept results, by part."""
    path = output / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def dump(results: dict[str, Any]) -> str:
    """Return results as JSON for readers: five digits, a line for a row of numbers."""
    short = json.loads(
        json.dumps({name: results[name] for name in PARTS if name in results}),
        parse_float=lambda text: float(f"{float(text):.5g}"),
    )
    return (
        re.sub(
            r"[{\[][^{}\[\]]*[}\]]",
            lambda innermost: re.sub(r"\s*\n\s*", " ", innermost[0]),
            json.dumps(short, indent=1),
        )
        + "\n"
    )


def write_report(results: dict[str, Any], output: Path) -> None:
    """Write the report and its plots from the kept results."""
    from benchmarks import report

    report.write(results, output, PARTS)


if __name__ == "__main__":
    sys.exit(main())
