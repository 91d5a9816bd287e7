# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' own parts: statistics, limits, the simulation and the report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import common, gpu_check

common.use_checkout()

from benchmarks import fleet, longest_step, step_cost  # noqa: E402

SMALL = fleet.Fleet("small", decoders=4, prefills=12, sample=4)


# -- Statistics and limits -----------------------------------------------------------


def test_quantiles_interpolate():
    found = common.summary([1.0, 2.0, 4.0])
    assert (found["median"], found["p75"], found["max"]) == (2.0, 3.0, 4.0)
    assert common.summary([7.0])["p95"] == 7.0


def test_a_summary_does_not_depend_on_the_order():
    assert common.summary([3, 1, 2]) == common.summary([1, 2, 3])


def test_the_interval_of_a_median_holds_it_and_leaves_out_the_ends():
    low, high = common.interval_of_median(range(10))
    assert 0 < low < 4.5 < high < 9
    assert common.interval_of_median(range(10)) == (low, high)


def test_a_limit_says_whether_it_is_met():
    assert str(common.Limit("sends", 32, 32)) == "met: sends: 32, at most 32"
    missed = common.Limit("step", 1.25, 1.0, "us")
    assert not missed.met
    assert str(missed) == "MISSED: step: 1.25 us, at most 1 us"


# -- The simulation --------------------------------------------------------------------


@pytest.mark.parametrize("scenario", fleet.SCENARIOS)
def test_a_small_fleet_comes_through(scenario: str):
    row = fleet.simulate(SMALL, scenario)

    assert 0 < row["heartbeats_per_s"] < row["heartbeats_bound"]
    assert row["unreleased"] == 0
    if scenario == "nothing happens":
        assert row["release_s"] is None
    else:
        # All are in use, so a heartbeat comes within an interval and its jitter.
        assert row["release_s"]["count"] >= 10 * SMALL.sample
        assert row["release_s"]["max"] <= 2.3


# -- The guard ------------------------------------------------------------------------


def test_the_step_cost_guard_looks_at_ratios():
    row = {"peers": 1, "cpu_us": {"ratio": 2.0, "added": {"median": 0.1}}}
    (limit,) = step_cost.guard({"rows": [row]})
    assert not limit.met
    (target,) = step_cost.targets({"rows": [row]})
    assert target.met


def test_the_longest_step_is_held_against_stocks():
    compared = {"ratio": 1.3, "more_ms": 2.5}
    figures = {
        "loading": [{"vllm": "0.33.0", "case": "2 descriptors", **compared}],
        "deaths": {"dead": 1, "peers": 2, **compared},
        "due": {"peers": 3, **compared},
    }
    assert [limit.met for limit in longest_step.targets(figures)] == [False] * 3
    assert all(limit.met for limit in longest_step.guard(figures))


# -- The report ----------------------------------------------------------------------


@pytest.fixture
def results() -> dict[str, Any]:
    """A part with every kind of content; the others are missing."""
    row: dict[str, Any] = {"peers": 10}
    for clock in ("cpu", "wall"):
        names = ("ours", "stock", "added")
        row[f"{clock}_us"] = {n: common.summary([1.0, 2.0]) for n in names}
        row[f"{clock}_us"]["ratio"] = 1.1
    limit = common.Limit("step with 10 peers", 1.5, 1.0, "us")
    return {
        "step_cost": {
            "command": "make bench",
            "environment": common.environment(),
            "seconds": 1.0,
            "figures": {"rows": [row]},
            "targets": [vars(limit) | {"met": limit.met}],
        }
    }


def test_a_report_shows_what_was_missed_and_what_was_not_run(
    results: dict[str, Any], tmp_path: Path
):
    program.write_report(json.loads(program.dump(results)), tmp_path)

    text = (tmp_path / "README.md").read_text()
    assert "1 of 1 missed" in text
    assert "step with 10 peers: 1.5 us, at most 1\n" in text
    assert text.count("Not run yet.") == len(program.PARTS) - 1
    assert "| 10 | 1.50 (1.25 to 1.75) |" in text
    assert "(step_cost.svg)" in text
    assert "connected peers</text>" in (tmp_path / "step_cost.svg").read_text()


def test_a_report_is_the_same_again(results: dict[str, Any], tmp_path: Path):
    program.write_report(results, tmp_path)
    first = (tmp_path / "step_cost.svg").read_bytes()
    program.write_report(results, tmp_path)
    assert (tmp_path / "step_cost.svg").read_bytes() == first


def test_the_committed_page_is_that_of_the_committed_figures(tmp_path: Path):
    committed = common.ROOT / "docs" / "benchmarks"
    program.write_report(program.read_results(committed), tmp_path)

    for made in tmp_path.iterdir():
        assert made.read_text() == (committed / made.name).read_text(), made.name


def test_results_have_five_digits_and_a_line_for_a_row_of_numbers():
    text = program.dump({"fleet": {"rows": [{"a": 1 / 3, "b": [1, 2]}]}})
    assert '"b": [ 1, 2 ]' in text
    assert '"a": 0.33333,' in text


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


def test_the_gpu_check_rehearsed_on_cpu():
    row = gpu_check.check(gpu_check.DEVICES["cpu"], stock=False, cache="n")

    assert row["released_after_s"] is not None
    assert row["read_ms"]["min"] > 0
    # Processor memory goes with its process, whoever has read it.
    freed = row["before_kill_mib"] - row["after_kill_mib"]
    assert freed > row["kv_cache_mib"]
    assert row["after_all_mib"] == 0
    assert "not over cuda_ipc" in gpu_check.describe(row)
