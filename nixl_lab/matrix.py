# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run the unit and real-NIXL tests against each supported vLLM release, on a CPU."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

RELEASES = ("0.31.0", "0.32.0", "0.33.0")
SUITES = ("tests/v1/kv_connector/unit", "tests/v1/kv_connector/nixl_integration")
ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / ".cache" / "matrix"


@dataclass(frozen=True)
class Result:
    """The outcome of all suites on one release."""

    release: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    returncode: int


def install(release: str) -> None:
    """Unpack the release's official wheel beside the environment's own vLLM."""
    command = [sys.executable, "tools/install.py", "--vllm", release]
    subprocess.run(command, cwd=ROOT, check=True)


def run_suites(release: str) -> Result:
    """Run every suite in one pytest process that imports `release`."""
    report = REPORTS / f"{release}.xml"
    report.unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": str(ROOT / ".venv" / f"vllm-{release}"),
        # The official wheels are CUDA builds and would look for a GPU.
        "VLLM_TARGET_DEVICE": "cpu",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not servers and not netns"]
    started = time.monotonic()
    process = subprocess.run(
        [*command, f"--junit-xml={report}", *SUITES], cwd=ROOT, env=env
    )
    seconds = time.monotonic() - started
    return read_report(report, release, seconds, process.returncode)


def read_report(report: Path, release: str, seconds: float, returncode: int) -> Result:
    """Count the outcomes in a JUnit report; a crashed run may have left none."""
    if not report.is_file():
        return Result(release, 0, 0, 0, seconds, returncode)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, "0"))
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    passed = counts["tests"] - failed - skipped
    return Result(release, passed, failed, skipped, seconds, returncode)


def make_table(results: list[Result]) -> Table:
    """Lay out one row per release."""
    table = Table(title="Unit and real-NIXL tests")
    for column in ("vLLM", "passed", "failed", "skipped", "seconds", "pytest's exit"):
        table.add_column(column, justify="right")
    for each in results:
        numbers = (each.passed, each.failed, each.skipped, round(each.seconds))
        table.add_row(each.release, *map(str, numbers), str(each.returncode))
    return table


def main() -> int:
    """Run the matrix and return 0 only if every release passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, help="default: all of them"
    )
    args = parser.parse_args()
    if not (ROOT / "tools" / "install.py").is_file():
        parser.error("run this in a checkout of the repository: it needs the tests")
    REPORTS.mkdir(parents=True, exist_ok=True)
    console = Console()
    results = []
    for release in args.releases:
        console.rule(f"vLLM {release}")
        install(release)
        results.append(run_suites(release))
    console.print(make_table(results))
    return int(any(each.returncode for each in results))


if __name__ == "__main__":
    sys.exit(main())
