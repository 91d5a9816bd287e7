# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The dashboard and the alerts ask for what an engine's /metrics has, and for all."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlPeerPromMetrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.stats import (
    COUNTERS,
    GAUGES,
    RELEASE_SECONDS,
)

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
DASHBOARD = json.loads((OPERATIONS / "grafana-nixl-peers.json").read_text())
ALERTS = yaml.safe_load((OPERATIONS / "nixl_alerts.yml").read_text())
# Those of vLLM's own metrics.
LABELS = ["model_name", "engine"]
VARIABLES = {"$__rate_interval": "5m", "$model_name": ".*", "$instance": ".*"}


def expressions() -> list[str]:
    panels = DASHBOARD["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    for name, value in VARIABLES.items():
        found = [expr.replace(name, value) for expr in found]
    return found


def alert_expressions() -> list[str]:
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def scraped() -> set[str]:
    """Return the names of all samples of a scrape."""
    registry = CollectorRegistry()

    def registered(cls: type) -> object:
        return lambda **kwargs: cls(registry=registry, **kwargs)

    NixlPeerPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {cls: registered(cls) for cls in (Gauge, Counter, Histogram)},
        LABELS,
        {0: ["m", "0"]},
    )
    return {s.name for metric in registry.collect() for s in metric.samples}


@pytest.mark.parametrize("expr", [*expressions(), *alert_expressions()])
def test_an_expression_asks_for_what_is_there(expr: str, scraped: set[str]):
    promql_parser.parse(expr)
    assert "$" not in expr
    names = set(re.findall(r"vllm:\w+", expr))
    assert names and names <= scraped
    labels = set(re.findall(r"(\w+)=~?\"", expr))
    labels |= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expr))))
    assert labels <= {*LABELS, "instance", "le"}


def test_the_dashboard_shows_every_metric():
    names = set(re.findall(r"vllm:nixl_(\w+)", " ".join(expressions())))
    assert names == {
        *(f"{name}_total" for name in COUNTERS),
        *GAUGES,
        f"{RELEASE_SECONDS}_bucket",
    }


def test_panels_do_not_overlap():
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(
        DASHBOARD["panels"]
    )
