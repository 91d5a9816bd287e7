# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peer events in vLLM's own connector statistics and Prometheus metrics.

vLLM pools what the ranks of an engine report, so every counter counts what each rank
saw for itself: with TP 8, one dead peer is found eight times. Gauges are the maximum
over the ranks. Statistics leave a worker with a step only.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
        NixlKVConnectorStats as _Stats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
        NixlPromMetrics as _PromMetrics,
    )
else:
    # Mixins: only the connector imports vLLM's NIXL package.
    _Stats = _PromMetrics = object


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
        "NIXL peers found unreachable: NIXL reported a disconnect. Counted by each "
        "rank.",
        "Peers unreachable",
    ),
    "peers_suspected": _Counter(
        "NIXL peers found suspect: a transfer was in flight for a minute and nothing "
        "else from the peer finished. Counted by each rank.",
        "Peers suspected",
    ),
    "peers_released": _Counter(
        "NIXL peers whose loaded state was released because they were unreachable or "
        "replaced, or the operator asked for it. Counted by each rank.",
        "Peers released",
    ),
    "peers_reconnected": _Counter(
        "Handshakes that connected a released NIXL peer again. Counted by each rank.",
        "Peers reconnected",
    ),
    "peer_requests_refused": _Counter(
        "Requests that failed at once because their NIXL peer is quarantined, suspect "
        "or about to be released. Counted by each rank.",
        "Requests refused",
    ),
    "peer_releases_deferred": _Counter(
        "Releases of NIXL peers deferred by in-flight reads. Counted by each rank.",
        "Peer releases deferred",
    ),
}
GAUGES = {
    "connected_peers": "NIXL peers with loaded state.",
    "suspect_peers": "NIXL peers of which a transfer is stuck.",
    "deferred_peer_releases": "NIXL peers whose release waits for in-flight reads.",
}
RELEASE_SECONDS = "peer_release_seconds"
_NAMES = (*COUNTERS, RELEASE_SECONDS, *GAUGES)
_RELEASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


class PeerStatsMixin(_Stats):
    """Transfer statistics with the peer events of the same time.

    An engine may idle for days, so counters are summed up here.
    """

    def reset(self) -> None:
        """Clear all statistics."""
        super().reset()
        self.data |= {name: [] for name in _NAMES}

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to a counter."""
        if n:
            self.data[name] = [sum(self.data[name]) + n]

    def observe_release(self, seconds: float) -> None:
        """Add the time from the first evidence to the release."""
        self.data[RELEASE_SECONDS].append(seconds)

    def set_gauges(self, values: Mapping[str, int]) -> None:
        """Set gauges, as they are now."""
        self.data |= {name: [value] for name, value in values.items()}

    def is_empty(self) -> bool:
        """Return whether nothing was recorded."""
        return super().is_empty() and not any(map(self.data.get, _NAMES))

    def reduce(self) -> dict[str, int | float]:
        """Return the stock summary, and the peer events that happened."""
        summary = super().reduce()
        for name, counter in COUNTERS.items():
            if count := sum(self.data.get(name, ())):
                summary[counter.log_name] = count
        return summary


class PeerPromMetricsMixin(_PromMetrics):
    """The stock Prometheus metrics and those of peer events."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        """Register the metrics; the arguments are those of the stock metrics."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def register(metric_cls: Any, name: str, **kwargs: Any) -> dict[int, Any]:
            metric = metric_cls(
                name=f"vllm:nixl_{name}", labelnames=labelnames, **kwargs
            )
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._peer_counters = {
            name: register(self._counter_cls, name, documentation=counter.documentation)
            for name, counter in COUNTERS.items()
        }
        self._peer_gauges = {
            name: register(
                self._gauge_cls,
                name,
                documentation=f"{documentation} The maximum over the ranks, as of the "
                "engine's last step.",
                multiprocess_mode="mostrecent",
            )
            for name, documentation in GAUGES.items()
        }
        self._release_seconds = register(
            self._histogram_cls,
            RELEASE_SECONDS,
            documentation="Time from the first evidence against a NIXL peer to the "
            "release of its state.",
            buckets=_RELEASE_BUCKETS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the statistics of one step of one engine, pooled over its ranks."""
        super().observe(transfer_stats_data, engine_idx)
        # A stock worker (heartbeat off) reports none of these.
        for name, counter in self._peer_counters.items():
            if count := sum(transfer_stats_data.get(name, ())):
                counter[engine_idx].inc(count)
        for seconds in transfer_stats_data.get(RELEASE_SECONDS, ()):
            self._release_seconds[engine_idx].observe(seconds)
        for name, gauge in self._peer_gauges.items():
            if values := transfer_stats_data.get(name):
                gauge[engine_idx].set(max(values))
