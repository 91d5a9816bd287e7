# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' own parts: statistics, limits, the simulation and the report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, gpu_check

common.use_checkout()

from benchmarks import fleet, report, step_cost, throughput  # noqa: E402

SMALL = fleet.Fleet("small", decoders=4, prefills=6, ranks=1, sample=4)


# -- Statistics and limits -----------------------------------------------------------


def test_quantiles_interpolate():
    assert common.quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert common.quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert common.quantile([7.0], 0.95) == 7.0


def test_a_summary_does_not_depend_on_the_order():
    assert common.summary([3, 1, 2]) == common.summary([1, 2, 3])
    assert common.summary([3, 1, 2])["median"] == 2


def test_the_interval_of_a_median_leaves_out_both_ends():
    assert throughput.interval_of_median([float(n) for n in range(10)]) == (1, 8)


def test_a_limit_says_whether_it_is_met():
    assert str(common.Limit("sends", 32, 32)) == "met: sends: 32, at most 32"
    missed = common.Limit("step", 1.25, 1.0, "us")
    assert not missed.met
    assert str(missed) == "MISSED: step: 1.25 us, at most 1 us"


# -- The simulation --------------------------------------------------------------------


@pytest.mark.parametrize("scenario", fleet.SCENARIOS)
def test_a_small_fleet_comes_through(scenario: str):
    row = fleet.simulate(SMALL, scenario)

    assert row["connections_lost_unreleased"] == 0
    assert row["connected_at_end"] > 0.9
    beats = row["heartbeats_per_prefill_rank_and_s"]
    assert 0 < beats["mean_per_s"] < row["most_heartbeats_per_prefill_rank_and_s"]
    if scenario == "nothing happens":
        assert row["release_s"] is None
        assert row["handshakes_per_prefill_rank"]["mean_per_s"] == 0
        assert row["failed_requests_share"] == 0
    else:
        assert row["release_s"]["count"] >= SMALL.sample
        assert row["release_s"]["p95"] < 3


def test_a_prefill_in_use_is_released_within_an_interval():
    row = fleet.simulate(SMALL, "all prefills restart at once")
    assert row["release_s"]["max"] <= SMALL.interval * 1.1 + 0.1


# -- The guard ------------------------------------------------------------------------


def test_the_step_cost_guard_looks_at_ratios():
    row = {"peers": 1, "cpu_us": {"ratio": 2.0, "added": {"median": 0.1}}}
    (limit,) = step_cost.guard({"rows": [row]})
    assert not limit.met
    (target,) = step_cost.targets({"rows": [row]})
    assert target.met


# -- The report ----------------------------------------------------------------------


def numbers(value: float) -> dict[str, float]:
    return common.summary([value, value + 1])


@pytest.fixture
def results() -> dict[str, Any]:
    """A part with every kind of content; the others are missing."""
    row = {"peers": 10}
    for clock in ("cpu", "wall"):
        names = ("ours", "stock", "added")
        row[f"{clock}_us"] = {n: numbers(1.0) for n in names} | {"ratio": 1.1}
    limit = common.Limit("step with 10 peers", 1.5, 1.0, "us")
    machine = common.environment()
    return {
        "step_cost": {
            "environment": machine,
            "seconds": 1.0,
            "data": {"rows": [row]},
            "targets": [vars(limit) | {"met": limit.met}],
        }
    }


def test_a_report_shows_what_was_missed_and_what_was_not_run(
    results: dict[str, Any], tmp_path: Path
):
    report.write(json.loads(json.dumps(results)), tmp_path)

    text = (tmp_path / "README.md").read_text()
    assert "1 of 1 missed" in text
    assert "step with 10 peers: 1.5 us, at most 1" in text
    assert text.count("Not run yet.") == 6
    assert "(step_cost.svg)" in text
    assert (tmp_path / "step_cost.svg").read_text().startswith("<?xml")


def test_a_report_is_the_same_again(results: dict[str, Any], tmp_path: Path):
    report.write(results, tmp_path)
    first = (tmp_path / "step_cost.svg").read_bytes()
    report.write(results, tmp_path)
    assert (tmp_path / "step_cost.svg").read_bytes() == first


def test_an_unknown_part_is_named(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "--only", "stepcost"]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'stepcost'" in done.stderr


# -- The GPU check -------------------------------------------------------------------


def test_the_gpu_check_does_nothing_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out == (
        "no GPU, nothing done: nvidia-smi is not installed\n"
    )


def test_the_gpu_check_wants_a_torch_that_sees_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_check, "why_no_gpu", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 1
    assert "which does not see it" in capsys.readouterr().err


@pytest.mark.parametrize(("stock", "cache"), [(True, None), (False, "n")])
def test_the_gpu_check_rehearsed_on_cpu(stock: bool, cache: str | None):
    row = gpu_check.check(gpu_check.DEVICES["cpu"], stock, cache)

    assert (row["released_after_s"] is None) == stock
    assert row["UCX_CUDA_IPC_CACHE"] == (cache or "default")
    # Processor memory goes with its process, whoever has read it.
    freed = row["before_kill_mib"] - row["after_kill_mib"]
    assert freed > row["kv_cache_mib"]
    assert row["after_all_mib"] == 0
    assert "not over cuda_ipc" in gpu_check.describe(row)
