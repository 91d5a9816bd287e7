# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peer events in vLLM's statistics, its log line and its Prometheus metrics."""

from typing import Any

import pytest
from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlConnector,
    NixlPeerStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.stats import (
    COUNTERS,
    GAUGES,
)

from .decoder import Decoder
from .fake_nixl import PeerState
from .worker_factory import make_vllm_config

FIRST_HEARTBEAT = 2.2
LABELS = {"model_name": "m", "engine": "0"}


def events(decoder: Decoder, seconds: float = 0.0) -> dict[str, list[float]]:
    """Take a step; return the peer events that leave the worker with it."""
    decoder.step(seconds)
    stats = decoder.connector.get_kv_connector_stats()
    ours = set(NixlPeerStats().data) - set(NixlKVConnectorStats().data)
    return {k: v for k, v in stats.data.items() if k in ours and v} if stats else {}


def gauges(connected: int = 0, suspect: int = 0, deferred: int = 0) -> dict[str, Any]:
    return {
        "connected_peers": [connected],
        "suspect_peers": [suspect],
        "deferred_peer_releases": [deferred],
    }


# -- What a worker reports -----------------------------------------------------------


def test_a_step_without_events_reports_nothing(decoder: Decoder):
    decoder.step()
    assert decoder.connector.get_kv_connector_stats() is None


def test_heartbeats_are_counted_per_agent(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    assert events(decoder) == gauges(connected=1)
    decoder.step(FIRST_HEARTBEAT)
    assert events(decoder) == {"peer_heartbeats_sent": [2]}
    assert events(decoder) == {}


def test_a_killed_peer(decoder: Decoder):
    decoder.connect("p")
    events(decoder)
    decoder.kill("p")
    assert events(decoder, FIRST_HEARTBEAT) == {
        "peer_heartbeats_failed": [1],
        "peers_unreachable": [1],
        "peers_released": [1],
        "peer_release_seconds": [0.0],
        **gauges(connected=0),
    }
    decoder.connect("p")
    assert events(decoder) == {"peers_reconnected": [1], **gauges(connected=1)}


def test_a_deferred_release_is_counted_once_and_timed(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    events(decoder)
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    found = events(decoder, FIRST_HEARTBEAT)
    assert found["peer_releases_deferred"] == [1] and "peers_released" not in found
    # As long as it is so, each step says that it is.
    assert events(decoder, 1.0) == gauges(connected=1, deferred=1)
    decoder.nixl.raises["check_xfer_state"] = [nixlRemoteDisconnectError("gone")]
    released = events(decoder, 0.5)
    assert released["peer_release_seconds"] == [pytest.approx(1.5)]
    assert released["deferred_peer_releases"] == [0]
    assert events(decoder) == {}


def test_a_suspect_is_counted_once_and_shown_all_the_time(decoder: Decoder):
    decoder.connect("p")
    decoder.request("stuck", "p")
    events(decoder)
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    found = events(decoder, 61)
    assert found["peers_suspected"] == [1] and found["suspect_peers"] == [1]
    assert events(decoder) == gauges(connected=1, suspect=1)
    decoder.nixl.finish_reads("p-agent")
    assert events(decoder) == gauges(connected=1, suspect=0)
    assert events(decoder) == {}


def test_an_error_that_proves_nothing_is_a_failed_heartbeat_only(decoder: Decoder):
    decoder.connect("p")
    events(decoder)
    decoder.nixl.raises["send_notif"] = [nixlBackendError("?")]
    assert events(decoder, FIRST_HEARTBEAT) == {"peer_heartbeats_failed": [1]}


def test_refused_requests_are_counted(decoder: Decoder):
    decoder.prefills["p"] = ConnectionError("refused")
    decoder.request("first", "p")
    decoder.step()
    decoder.run_handshakes()
    events(decoder)
    decoder.request("second", "p")
    decoder.request("third", "p")
    decoder.request("first", "p", blocks=())  # only to notify the peer
    assert events(decoder) == {"peer_requests_refused": [2]}


def test_an_idle_engine_adds_up(decoder: Decoder):
    """Its statistics leave with a step only: they must not grow until then."""
    for i in range(3):
        decoder.connect(f"p{i}")
    decoder.step()
    decoder.idle(20_000, every=2.0)
    decoder.kill()
    decoder.idle(40, every=2.0)
    (sent,) = (reported := events(decoder))["peer_heartbeats_sent"]
    assert sent == pytest.approx(3 * 20_000 / 30, rel=0.1)
    assert reported["peers_released"] == [3]
    assert len(reported["peer_release_seconds"]) == 3
    assert reported["connected_peers"] == [0]


# -- What vLLM makes of it -----------------------------------------------------------


def stats_of(seconds: float | None = None, **values: int) -> NixlPeerStats:
    stats = NixlPeerStats()
    for name, value in values.items():
        if name in COUNTERS:
            stats.count(name, value)
        else:
            stats.set_gauges({name: value})
    if seconds is not None:
        stats.observe_release(seconds)
    return stats


def test_counts_add_up_and_gauges_do_not():
    stats = stats_of(peers_released=1, connected_peers=5)
    stats.count("peers_released", 2)
    stats.count("peers_unreachable", 0)
    stats.set_gauges({"connected_peers": 4})
    assert stats.data["peers_released"] == [3]
    assert stats.data["peers_unreachable"] == []
    assert stats.data["connected_peers"] == [4]


@pytest.mark.parametrize("name", [*COUNTERS, *GAUGES])
def test_any_event_is_worth_a_report_and_is_handed_over_once(name: str):
    stats = stats_of(**{name: 1})
    assert not stats.is_empty()
    handed_over = stats.clone_and_reset()
    assert handed_over.data[name] == [1]
    assert stats.is_empty() and stats.data[name] == []


def test_a_release_time_is_worth_a_report():
    assert not stats_of(seconds=0.5).is_empty()


def test_data_of_a_stock_worker_is_understood():
    stock = NixlConnector.build_kv_connector_stats(NixlKVConnectorStats().data)
    assert stock.is_empty() and "Peers released" not in stock.reduce()
    assert NixlConnector.build_kv_connector_stats().is_empty()


def test_the_log_line_names_what_has_happened():
    pooled = stats_of(peers_released=2, connected_peers=3)
    pooled.aggregate(stats_of(peers_released=1))
    summary = pooled.reduce()
    assert summary["Peers released"] == 3
    assert summary.keys() >= NixlKVConnectorStats().reduce().keys()
    others = {c.log_name for c in COUNTERS.values()} - {"Peers released"}
    assert not summary.keys() & others


class Metrics:
    """The metrics of an engine, and what a scrape of them would show."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def bound(cls: type) -> Any:
            return lambda **kwargs: cls(registry=self.registry, **kwargs)

        self.prom = NixlConnector.build_prom_metrics(
            make_vllm_config("decoder"),
            {cls: bound(cls) for cls in (Gauge, Counter, Histogram)},
            ["model_name", "engine"],
            {0: ["m", "0"]},
        )

    def observe(self, *ranks: NixlKVConnectorStats) -> None:
        """Record a step of an engine with these ranks."""
        pooled, *others = ranks
        for other in others:
            pooled.aggregate(other)
        self.prom.observe(pooled.data)

    def __getitem__(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:nixl_{name}", LABELS)


def test_every_counter_is_there_from_the_start_and_adds_up_over_steps_and_ranks():
    metrics = Metrics()
    for name in COUNTERS:
        assert metrics[f"{name}_total"] == 0
    every = dict.fromkeys(COUNTERS, 2)
    metrics.observe(stats_of(**every), stats_of(peers_released=1))
    metrics.observe(stats_of(**every))
    metrics.observe(NixlKVConnectorStats())  # of a stock worker
    for name in COUNTERS:
        assert metrics[f"{name}_total"] == 4 + (name == "peers_released")


@pytest.mark.parametrize("name", GAUGES)
def test_a_gauge_is_the_maximum_over_the_ranks(name: str):
    metrics = Metrics()
    metrics.observe(stats_of(**{name: 1}), stats_of(**{name: 3}), stats_of())
    assert metrics[name] == 3
    # A step that says nothing changes nothing; one that says less does.
    metrics.observe(stats_of(peers_released=1))
    assert metrics[name] == 3
    metrics.observe(stats_of(**{name: 2}), stats_of(**{name: 0}))
    assert metrics[name] == 2


def test_release_times_are_a_histogram():
    metrics = Metrics()
    metrics.observe(stats_of(seconds=0.25), stats_of(seconds=45.0))
    assert metrics["peer_release_seconds_sum"] == 45.25
    assert metrics["peer_release_seconds_count"] == 2
    within = metrics.registry.get_sample_value(
        "vllm:nixl_peer_release_seconds_bucket", LABELS | {"le": "0.5"}
    )
    assert within == 1


def test_a_worker_s_own_data_is_what_the_metrics_take(decoder: Decoder):
    metrics = Metrics()
    decoder.connect("p")
    decoder.kill("p")
    decoder.step(FIRST_HEARTBEAT)
    metrics.observe(decoder.connector.get_kv_connector_stats())
    assert metrics["peers_unreachable_total"] == 1
    assert metrics["peers_released_total"] == 1
    assert metrics["peer_release_seconds_count"] == 1
    assert metrics["connected_peers"] == 0
