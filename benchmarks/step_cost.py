# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Step cost: what the connector adds to a step in which nothing is to be done.

The real workers, stock and ours, run on an agent that does nothing, turn by turn in
short batches, so that both meet the same state of the machine.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Limit, summary
from benchmarks.fakes import connected_decoder
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

PEERS = (0, 1, 10, 100, 1000)
# No heartbeat comes due while it is measured.
_INTERVAL_S = 3600.0
_BATCH_S = 0.002
_PAIRS = 600
_QUICK_PAIRS = 60
_TARGET_US = 2.0
# For CI, on any machine and in any company: two to three times what was measured.
_GUARD_RATIO = 1.6
_CLOCKS: dict[str, Callable[[], float]] = {
    "cpu": time.thread_time,
    "wall": time.perf_counter,
}


def measure(quick: bool) -> dict[str, Any]:
    """Measure steps with nothing to do, for several numbers of connected peers."""
    rows = []
    for peers in PEERS:
        engine_ids = [f"peer-{number}" for number in range(peers)]
        with (
            connected_decoder(_INTERVAL_S, engine_ids) as ours,
            connected_decoder(0, engine_ids) as stock,
        ):
            compared = _compare(ours.worker, stock.worker, quick)
            rows.append({"peers": peers, **compared})
    return {"rows": rows}


def _compare(ours: Any, stock: Any, quick: bool) -> dict[str, Any]:
    for worker in (ours, stock):
        _time_steps(worker, 1000)
    steps = max(10, round(_BATCH_S * 1e6 / _time_steps(stock, 1000)["wall"]))
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    gc.disable()
    try:
        for number in range(_QUICK_PAIRS if quick else _PAIRS):
            order = (ours, stock) if number % 2 else (stock, ours)
            times = {id(worker): _time_steps(worker, steps) for worker in order}
            pairs.append((times[id(ours)], times[id(stock)]))
    finally:
        gc.enable()
    result: dict[str, Any] = {"steps_per_batch": steps, "pairs": len(pairs)}
    for clock in _CLOCKS:
        result[f"{clock}_us"] = {
            "ours": summary(mine[clock] for mine, _ in pairs),
            "stock": summary(theirs[clock] for _, theirs in pairs),
            "added": summary(mine[clock] - theirs[clock] for mine, theirs in pairs),
            "ratio": statistics.median(
                mine[clock] / theirs[clock] for mine, theirs in pairs
            ),
        }
    return result


def _time_steps(worker: Any, steps: int) -> dict[str, float]:
    """Return the microseconds of a step, by clock."""
    metadata = NixlConnectorMetadata()
    start_load_kv, get_transfer_results = (
        worker.start_load_kv,
        worker.get_transfer_results,
    )
    start = {name: clock() for name, clock in _CLOCKS.items()}
    for _ in range(steps):
        start_load_kv(metadata)
        get_transfer_results()
    return {
        name: (clock() - start[name]) / steps * 1e6 for name, clock in _CLOCKS.items()
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: what a step may cost more than stock."""
    return [
        Limit(
            f"step with {row['peers']} peers, more than stock (CPU time, median)",
            row["cpu_us"]["added"]["median"],
            _TARGET_US,
            "us",
        )
        for row in data["rows"]
    ]


def guard(data: dict[str, Any]) -> list[Limit]:
    """Return the limits for CI: ratios, with a wide margin."""
    return [
        Limit(
            f"step with {row['peers']} peers, ours over stock",
            row["cpu_us"]["ratio"],
            _GUARD_RATIO,
        )
        for row in data["rows"]
    ]
