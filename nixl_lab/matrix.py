# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test every supported pair of vLLM and NIXL on a CPU, and print a table of them."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

from vllm_nixl_heartbeat.compatibility import TESTED_NIXL, TESTED_VLLM

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.prefix)
TESTS = "tests/v1/kv_connector"
COLUMNS = {
    "unit": (f"{TESTS}/unit",),
    "real NIXL": (f"{TESTS}/nixl_integration", "-m", "not servers and not netns"),
    "scenarios": ("replace", "idle", "flap", "dead-route"),
}
Pair = tuple[str, str]


def install(pairs: Sequence[Pair], columns: Sequence[str]) -> None:
    """Put the releases beside the environment's own."""
    flags = []
    for vllm in dict.fromkeys(vllm for vllm, _ in pairs):
        flags += ["--vllm", vllm]
        if "scenarios" in columns:
            flags += ["--server", vllm]
    for nixl in dict.fromkeys(nixl for _, nixl in pairs):
        flags += ["--nixl", nixl]
    subprocess.run([sys.executable, "tools/install.py", *flags], cwd=ROOT, check=True)


def commands(pair: Pair, column: str) -> Iterator[list[str]]:
    """Yield the command lines of one cell of the table."""
    if column == "scenarios":
        for scenario in COLUMNS[column]:
            yield ["nixl_lab.demo", "--vllm", pair[0], "--scenario", scenario]
    else:
        yield ["pytest", "-q", *COLUMNS[column]]


def run_cell(pair: Pair, column: str) -> str:
    """Run one cell and return what the table says of it."""
    vllm, nixl = pair
    if column == "scenarios" and nixl != version("nixl"):
        # The lab's servers have no way to take another NIXL than the installed one.
        return "-"
    path = [VENV / f"nixl-{nixl}"]
    if column != "scenarios":
        path.append(VENV / f"vllm-{vllm}")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        # The official wheels are CUDA builds and would look for a GPU.
        "VLLM_TARGET_DEVICE": "cpu",
    }
    failed = []
    for module, *args in commands(pair, column):
        print(f"\n=== vLLM {vllm}, NIXL {nixl}: {module} {' '.join(args)}", flush=True)
        command = [sys.executable, "-m", module, *args]
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            failed.append(args[-1] if column == "scenarios" else column)
    return f"failed: {', '.join(failed)}" if failed else "passed"


def main() -> int:
    """Run the matrix and return 0 only if every cell passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help=f"releases of vLLM or NIXL, or columns ({', '.join(COLUMNS)})",
    )
    only = set(parser.parse_args().only)
    columns, releases, nixls = (
        [each for each in known if each in only] or list(known)
        for known in (COLUMNS, TESTED_VLLM, TESTED_NIXL)
    )
    if unknown := only.difference(columns, releases, nixls):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    pairs = list(product(releases, nixls))
    install(pairs, columns)
    table = [[*pair, *(run_cell(pair, column) for column in columns)] for pair in pairs]
    print()
    for row in [["vLLM", "NIXL", *columns], ["---"] * (2 + len(columns)), *table]:
        print(f"| {' | '.join(row)} |")
    return int(any("failed" in cell for row in table for cell in row))


if __name__ == "__main__":
    sys.exit(main())
