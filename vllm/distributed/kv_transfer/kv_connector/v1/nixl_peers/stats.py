# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Counts of peer events, in vLLM's own statistics and Prometheus metrics.

vLLM pools the observations of all ranks of an engine. So every counter counts
what each rank saw for itself: with TP 8, one dead peer is found eight times.
"""

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)
from vllm.v1.metrics.utils import create_metric_per_engine


class _Counter(NamedTuple):
    documentation: str
    log_name: str


COUNTERS = {
    "peer_heartbeats_sent": _Counter(
        "Heartbeats sent to NIXL peers, one per remote agent.", "Peer heartbeats"
    ),
    "peer_heartbeats_failed": _Counter(
        "Heartbeats to NIXL peers that could not be sent. Not part of "
        "vllm:nixl_num_failed_transfers.",
        "Failed peer heartbeats",
    ),
    "peers_unreachable": _Counter(
        "NIXL peers found unreachable: NIXL reported a disconnect. Counted by "
        "each rank that found one.",
        "Peers unreachable",
    ),
    "peers_silent": _Counter(
        "NIXL peers found silent: several questions were left unanswered. "
        "Counted by each rank that found one.",
        "Peers silent",
    ),
    "peers_released": _Counter(
        "NIXL peers whose loaded state was released because they were found "
        "unreachable, silent, replaced or retired. Counted by each rank.",
        "Peers released",
    ),
    "peers_reconnected": _Counter(
        "Handshakes that connected a released NIXL peer again. Counted by each rank.",
        "Peers reconnected",
    ),
    "peer_requests_refused": _Counter(
        "Requests that failed at once because their NIXL peer is in quarantine. "
        "Counted by each rank.",
        "Requests refused in quarantine",
    ),
    "peer_releases_held": _Counter(
        "Releases of NIXL peers held back by an open read. Counted by each rank.",
        "Peer releases held",
    ),
}
RELEASE_SECONDS = "peer_release_seconds"
CONNECTED = "connected_peers"
_NAMES = (*COUNTERS, RELEASE_SECONDS, CONNECTED)
_RELEASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


class PeerEvents(dict[str, list[float]]):
    """Peer events since the last step that reported them, by metric name.

    An engine may idle for days, so counters are summed up here.
    """

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to a counter."""
        if n:
            self.setdefault(name, [0])[0] += n

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        self.setdefault(name, []).append(value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self[name] = [value]


class NixlPeerStats(NixlKVConnectorStats):
    """Transfer statistics with the peer events of the same time."""

    def reset(self) -> None:
        """Clear all statistics."""
        super().reset()
        self.data |= {name: [] for name in _NAMES}

    def record_peer_events(self, events: PeerEvents) -> None:
        """Add peer events."""
        for name, values in events.items():
            self.data[name].extend(values)

    def is_empty(self) -> bool:
        """Return whether nothing was recorded."""
        return super().is_empty() and not any(self.data.get(name) for name in _NAMES)

    def reduce(self) -> dict[str, int | float]:
        """Return the stock summary, and the peer events that happened."""
        summary = super().reduce()
        for name, counter in COUNTERS.items():
            if count := sum(self.data.get(name, ())):
                summary[counter.log_name] = count
        return summary


class NixlPeerPromMetrics(NixlPromMetrics):
    """The stock Prometheus metrics and those of peer events."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        """Register the metrics."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._peer_counters: dict[str, dict[int, Any]] = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:nixl_{name}",
                    documentation=counter.documentation,
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for name, counter in COUNTERS.items()
        }
        self._release_seconds: dict[int, Any] = create_metric_per_engine(
            self._histogram_cls(
                name=f"vllm:nixl_{RELEASE_SECONDS}",
                documentation="Time from the first evidence that a NIXL peer is gone "
                "to the release of its state.",
                buckets=_RELEASE_BUCKETS,  # type: ignore[call-arg]
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._connected: dict[int, Any] = create_metric_per_engine(
            self._gauge_cls(
                name=f"vllm:nixl_{CONNECTED}",
                documentation="NIXL peers with loaded state, on the rank that "
                "reported last.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",  # type: ignore[call-arg]
            ),
            per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the statistics of some steps of one engine."""
        super().observe(transfer_stats_data, engine_idx)
        # A stock worker (heartbeat off) reports none of these.
        for name, metric in self._peer_counters.items():
            if count := sum(transfer_stats_data.get(name, ())):
                metric[engine_idx].inc(count)
        for seconds in transfer_stats_data.get(RELEASE_SECONDS, ()):
            self._release_seconds[engine_idx].observe(seconds)
        if connected := transfer_stats_data.get(CONNECTED):
            self._connected[engine_idx].set(connected[-1])
