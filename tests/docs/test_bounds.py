# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The guide's times are those of the heartbeat schedule, on a clock made of numbers."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    PeerTable,
)

GUIDE = Path(__file__).parents[2] / "docs" / "features" / "nixl_connector_usage.md"
# An engine's steps, and the monitor's rounds when there are none: on time, and late.
STEPS_S = (0.05,)
ROUNDS_S = (1.0, 1.05)
# UCX's own detection, in the order of the guide's columns: not ours to compute.
DETECTION_S = (0, 10, 25)
ENGINES = [f"engine-{n}" for n in range(20)]


def heartbeats(
    interval: float, engine_id: str, round_s: float, end: float
) -> Iterator[float]:
    """Yield when an engine that is used at 0 and never again is sent to."""
    table = PeerTable(interval)
    table.connect(engine_id, ["agent"], None, 0.0)
    yield 0.0
    for n in itertools.count(1):
        now = n * round_s
        if now > end:
            return
        while table.take_due(now) is not None:
            yield now


def worst(interval: float, idle: float, rounds: Iterable[float]) -> tuple[float, float]:
    """Return how long a kill at any time up to `idle` is overlooked at most.

    First if the first heartbeat after it fails, then if only the second one does.
    """
    one = two = 0.0
    for engine_id in ENGINES:
        for round_s in rounds:
            sent = list(heartbeats(interval, engine_id, round_s, idle + 100))
            for last, first, second in zip(sent, sent[1:], sent[2:]):
                if last <= idle:
                    one = max(one, first - last)
                    two = max(two, second - last)
    return one, two


def table_rows() -> dict[str, list[int]]:
    rows = re.findall(
        r"^\| (idle [^|]+|in use[^|]+) \| (\d+) s \| (\d+) s \| (\d+) s \|$",
        GUIDE.read_text(),
        re.M,
    )
    return {name: [int(n) for n in numbers] for name, *numbers in rows}


ROWS = {
    "idle for 5 minutes or longer": (1000, STEPS_S + ROUNDS_S),
    "idle for 1 minute": (60, STEPS_S + ROUNDS_S),
    "idle for up to 20 s, and so is the decoder": (20, ROUNDS_S),
    "in use, or idle for up to 20 s": (20, STEPS_S),
}


def test_worst_cases_come_first():
    assert list(table_rows()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_bound_of_the_guide_holds_and_is_tight(row: str):
    first, second = worst(DEFAULT_HEARTBEAT_INTERVAL_S, *ROWS[row])
    said = table_rows()[row]
    assert second <= said[0] <= second + 1
    assert [n - said[0] for n in said] == list(DETECTION_S)
    text = GUIDE.read_text()
    shorter = re.search(r"those of TCP are (\d+), (\d+), (\d+) and (\d+) s", text)
    assert shorter
    assert first <= int(shorter[1 + list(ROWS).index(row)]) <= first + 1


def test_the_readme_names_the_bounds_of_a_peer_in_use():
    tcp, rdma, _ = table_rows()["in use, or idle for up to 20 s"]
    text = " ".join((GUIDE.parents[2] / "README.md").read_text().split())
    said = f"released within {tcp} s over TCP, and within about {rdma} s over RDMA"
    assert said in text


def test_the_readme_names_the_bounds_of_an_idle_peer():
    tcp, rdma, _ = table_rows()["idle for 5 minutes or longer"]
    text = " ".join((GUIDE.parents[2] / "README.md").read_text().split())
    assert "idle for minutes is released within about a minute" in text
    assert 50 <= tcp < rdma <= 75


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0, 2.0, 5.0, 20.0])
def test_a_peer_in_use_is_released_within_the_interval_s_bound(interval: float):
    factor = re.search(r"within (\d\.\d) intervals and two\s+steps", GUIDE.read_text())
    assert factor
    _, second = worst(interval, 0.0, STEPS_S)
    assert 0 < second <= float(factor[1]) * interval + 2 * max(STEPS_S)
