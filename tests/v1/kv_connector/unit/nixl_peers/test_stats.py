# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peer events in vLLM's statistics, its log line and its Prometheus metrics."""

from typing import Any

import pytest
from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.stats import (
    COUNTERS,
    NixlPeerStats,
    PeerEvents,
)

from .decoder import Decoder
from .worker_factory import make_vllm_config


def events(decoder: Decoder) -> dict[str, list[float]]:
    """Take a step; return the peer events that leave the engine with it."""
    decoder.step()
    stats = decoder.connector.get_kv_connector_stats()
    ours = set(NixlPeerStats().data) - set(NixlKVConnectorStats().data)
    return {k: v for k, v in stats.data.items() if k in ours and v} if stats else {}


def test_a_step_without_events_reports_nothing(decoder: Decoder):
    decoder.step()
    assert decoder.connector.get_kv_connector_stats() is None


def test_heartbeats_are_counted_per_agent(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    assert events(decoder) == {"connected_peers": [1]}
    decoder.step(2.2)
    assert events(decoder) == {"peer_heartbeats_sent": [2]}
    assert events(decoder) == {}


def test_a_killed_peer(decoder: Decoder):
    decoder.connect("p")
    events(decoder)
    decoder.nixl.peers["p-agent"].die()
    decoder.clock.now += 2.2
    assert events(decoder) == {
        "peer_heartbeats_failed": [1],
        "peers_unreachable": [1],
        "peers_released": [1],
        "peer_release_seconds": [0.0],
        "connected_peers": [0],
    }
    decoder.connect("p")
    assert events(decoder) == {"peers_reconnected": [1], "connected_peers": [1]}


def test_a_release_held_by_a_read_is_counted_once_and_timed(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    events(decoder)
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.clock.now += 2.2
    held = events(decoder)
    decoder.step(1.0)
    assert events(decoder) == {}
    assert held["peer_releases_held"] == [1] and "peers_released" not in held
    decoder.nixl.finish_reads("p-agent")
    decoder.clock.now += 0.5
    assert events(decoder)["peer_release_seconds"] == [pytest.approx(1.5)]


def test_an_error_that_proves_nothing_is_a_failed_heartbeat_only(decoder: Decoder):
    decoder.connect("p")
    events(decoder)
    decoder.nixl.raises["send_notif"] = [nixlBackendError("?")]
    decoder.clock.now += 2.2
    assert events(decoder) == {"peer_heartbeats_failed": [1]}


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
    decoder.connect("p")
    for _ in range(10_000):
        decoder.clock.now += 2.0
        decoder.worker._do_idle_job()
    assert len(decoder.worker._peer_events["peer_heartbeats_sent"]) == 1
    assert events(decoder)["peer_heartbeats_sent"][0] > 100


def stats_of(**counts: float) -> NixlPeerStats:
    stats = NixlPeerStats()
    peer_events = PeerEvents()
    for name, value in counts.items():
        peer_events.set(name, value)
    stats.record_peer_events(peer_events)
    return stats


def test_ranks_are_pooled_and_stock_data_is_understood():
    pooled = stats_of(peers_released=1, connected_peers=2)
    pooled.aggregate(stats_of(peers_released=1, connected_peers=1))
    assert pooled.data["peers_released"] == [1, 1]
    stock = NixlConnector.build_kv_connector_stats(NixlKVConnectorStats().data)
    assert stock.is_empty() and "Peers released" not in stock.reduce()


def test_the_log_line_names_what_has_happened():
    summary = stats_of(peers_released=2).reduce()
    assert summary["Peers released"] == 2
    assert not summary.keys() & {c.log_name for c in COUNTERS.values()} - {
        "Peers released"
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def build_metrics(registry: CollectorRegistry) -> Any:
    def bound(cls: type) -> Any:
        return lambda **kwargs: cls(registry=registry, **kwargs)

    return NixlConnector.build_prom_metrics(
        make_vllm_config("decoder"),
        {cls: bound(cls) for cls in (Gauge, Counter, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )


def test_prometheus(registry: CollectorRegistry):
    metrics = build_metrics(registry)
    labels = {"model_name": "m", "engine": "0"}

    def sample(name: str) -> float | None:
        return registry.get_sample_value(f"vllm:nixl_{name}", labels)

    for name in COUNTERS:
        assert sample(f"{name}_total") == 0
    observed = stats_of(
        **dict.fromkeys(COUNTERS, 2), connected_peers=3, peer_release_seconds=0.25
    )
    metrics.observe(observed.data)
    metrics.observe(stats_of(peers_released=1, connected_peers=2).data)
    metrics.observe(NixlKVConnectorStats().data)  # of a stock worker
    for name in COUNTERS:
        assert sample(f"{name}_total") == 2 + (name == "peers_released")
    assert sample("connected_peers") == 2
    assert sample("peer_release_seconds_sum") == 0.25
