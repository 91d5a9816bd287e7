# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NIXL connectors that release the state of unreachable peers.

A decode instance reads KV blocks out of a prefill's memory, and for that keeps the
prefill's agent metadata and remote keys (rkeys) loaded; in push mode the roles turn.
These connectors extend vLLM's own: each step, after the stock work, runs one bounded
round that sends the heartbeats that are due and releases the peers that NIXL has
reported as disconnected, never under a transfer in flight. While no step runs, a
monitor thread runs the same round.

The feature is in ``nixl_peers``: ``agent`` (the way into NIXL), ``policy`` (schedule
and evidence), ``quarantine``, ``manager`` (a peer's life), ``monitor``, ``worker``
(handshakes and releases), ``stats``, ``admin``, ``ucx``. Here it is put into a step.
"""

import contextlib
import queue
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlBaseConnector,
    NixlConnectorMetadata,
    NixlKVConnectorStats,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector as StockNixlPullConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPushConnector as StockNixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPushConnectorWorker as StockNixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
from vllm.logger import init_logger

from .nixl_peers.admin import PeerAdminMixin
from .nixl_peers.agent import HEARTBEAT
from .nixl_peers.handshake import address_of
from .nixl_peers.manager import PeerManager
from .nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    HEARTBEAT_INTERVAL_KEY,
    parse_heartbeat_interval,
)
from .nixl_peers.stats import PeerPromMetricsMixin, PeerStatsMixin
from .nixl_peers.worker import PeerWorkerMixin, reads_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_PUSH_WRITER_JOIN_TIMEOUT_S = 2.0


class NixlPeerStepMixin(PeerAdminMixin, PeerWorkerMixin):
    """What a step does in addition to the stock work, in pull and push mode."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
    ):
        """Build the stock worker, and what manages its peers.

        Args:
            vllm_config: vLLM's configuration.
            engine_id: Id of this engine.
            kv_cache_config: Layout of the KV cache.

        Raises:
            ValueError: If ``peer_heartbeat_interval`` is not valid, or is 0 (a
                connector with 0 builds the stock worker instead).

        """
        interval = heartbeat_interval(vllm_config)
        if not interval:
            raise ValueError(f"{HEARTBEAT_INTERVAL_KEY}=0: use the stock worker")
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.manage_peers(interval, NixlPeerStats())

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start the transfers of a step."""
        with self._step_lock:
            super().start_load_kv(metadata)  # type: ignore[misc]
            if metadata.reqs_to_send and self._peers is not None:
                # Peers are about to connect: their heartbeats must not pile up in
                # NIXL's unbounded list while this engine idles.
                self._start_monitor()

    def get_transfer_results(self) -> "KVConnectorTransferResults":
        """Run the stock step, then one round of peer work."""
        peers = self._peers
        if peers is None:
            return super().get_transfer_results()
        with peers.lock:
            local_hits = self._take_local_hits() if self._failed_recv_reqs.queue else ()
            results = super().get_transfer_results()
            if local_hits:
                results.finished_recving.update(local_hits)
            self._last_step = now = peers.clock()
            if now >= peers.next_round_at:
                self._run_round(now)
            return results

    def _run_round(self, now: float) -> bool:
        """Send heartbeats and release peers, as are due; return if some are left."""
        assert self._peers is not None
        self._peers.update_suspects(now)
        heartbeats_left = self._peers.send_due_heartbeats(self._agent, now)
        released = self._release_unreachable_remote_engines()
        self._peers.plan_next_round()
        return heartbeats_left or released

    def _take_local_hits(self) -> list[str]:
        """Return the requests that could not notify their peer, but have their blocks.

        All that they would have read is local: they end well, as with a peer whose
        state is loaded.
        """
        failed: list[str] = []
        local: list[str] = []
        while not self._failed_recv_reqs.empty():
            try:
                req_id = self._failed_recv_reqs.get_nowait()
            except queue.Empty:
                break
            meta = self._recving_metadata.get(req_id)
            if meta is None or reads_blocks(meta):
                failed.append(req_id)
            else:
                del self._recving_metadata[req_id]
                local.append(req_id)
        for req_id in failed:
            self._failed_recv_reqs.put(req_id)
        return local


class NixlConnectorWorker(NixlPeerStepMixin, NixlPullConnectorWorker):
    """Pull worker that sends its peers heartbeats and releases unreachable ones."""

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        """Post a request's reads, unless they would get stuck or could not end well."""
        peers = self._peers
        if peers is not None and meta.remote is not None and reads_blocks(meta):
            engine_id = meta.remote.engine_id
            if self._is_replaced_under_a_read(meta):
                peers.mark_replaced(engine_id, "it has registered its KV cache again")
            if (refusal := peers.transfer_refusal(engine_id)) is not None:
                self._refuse(req_id, f"its peer {engine_id} is {refusal}")
                self._failed_recv_reqs.put(req_id)
                return
        super()._read_blocks_for_req(req_id, meta)

    def _is_replaced_under_a_read(self, meta: "ReqMeta") -> bool:
        """Return whether stock would release the peer under a read in flight.

        From 0.33 on a peer that wakes from sleep has a new registration, and the next
        request for it makes vLLM drop the old one at once.
        """
        assert meta.remote is not None
        generation = getattr(meta.remote, "registration_generation", 0)
        seen = getattr(self, "_remote_registration_generations", {})
        return (
            seen.get(meta.remote.engine_id, 0) < generation
            and meta.remote.engine_id in self._engines_in_use()
        )


class NixlPushConnectorWorker(NixlPeerStepMixin, StockNixlPushConnectorWorker):
    """Push worker that releases unreachable peers: decoders on a prefill.

    A writer thread posts the writes. It takes the peers' lock for moments only, so a
    step does not wait for a write to be posted; a peer that it is writing to counts as
    in use.
    """

    _writing_to: str | None = None
    _unsent = 0

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
    ):
        """Build the worker; see :class:`NixlPeerStepMixin`."""
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # Released prefills that requests still wait for, with whether NIXL had reported
        # them as disconnected.
        self._awaited: dict[str, bool] = {}

    # -- As a prefill ------------------------------------------------------------

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        """Post a request's writes, unless their decoder is not to be written to.

        The lease frees the blocks of a request that is refused, as of one that fails.
        """
        post = super()._do_start_push_kv
        if self._peers is None:
            post(request_id, local_block_ids, registration_data)
            return
        engine_id = registration_data["decode_engine_id"]
        with self._peers.lock:
            if (refusal := self._peers.transfer_refusal(engine_id)) is not None:
                self._refuse(request_id, f"its peer {engine_id} is {refusal}")
                return
            if engine_id not in self._remote_agents:
                # Starts or joins a handshake. Under the lock, since a failed one that
                # is being unloaded must not be taken for a connection.
                post(request_id, local_block_ids, registration_data)
                return
            self._writing_to = engine_id
        try:
            post(request_id, local_block_ids, registration_data)
        finally:
            self._writing_to = None

    def _engines_in_use(self) -> set[str]:
        writing_to = self._writing_to
        in_use = super()._engines_in_use()
        return in_use if writing_to is None else in_use | {writing_to}

    def _evict_stale_engines(self) -> None:
        """Evict as stock does; on the writer thread as well, hence under the lock."""
        with self._step_lock:
            super()._evict_stale_engines()

    # -- As a decoder ------------------------------------------------------------

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        """Register with a prefill; fail the request if it cannot have got to know.

        Stock would wait for ever for its blocks.
        """
        if self._peers is None:
            super()._do_send_reg_notif(req_id, reg_data)
            return
        engine_id = reg_data["remote_engine_id"]
        with self._peers.lock:
            if (refusal := self._peers.transfer_refusal(engine_id)) is not None:
                self._refuse(req_id, f"its peer {engine_id} is {refusal}")
                self._failed_recv_reqs.put(req_id)
                return
            num_agents = len(self._remote_agents.get(engine_id, ()))
            self._unsent = 0
            super()._do_send_reg_notif(req_id, reg_data)
            if 0 < num_agents == self._unsent:
                self._failed_recv_reqs.put(req_id)

    def _cleanup_remote_engine(
        self, engine_id: str, *, log_eviction: bool = True
    ) -> None:
        """Forget a peer, but not the layout of a prefill that is waited for.

        It may have written, and died since: stock ends the request by this layout.
        """
        if self._peers is None or self._is_shut_down:
            super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
            return
        with self._peers.lock:
            is_lost = self._peers.transfer_refusal(engine_id) == "unreachable"
            with self._keeping_layout(engine_id, is_lost):
                super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    def _unload(self, peers: PeerManager, engine_id: str, loaded: list[str]) -> None:
        with peers.lock, self._keeping_layout(engine_id):
            super()._unload(peers, engine_id, loaded)

    @contextlib.contextmanager
    def _keeping_layout(self, engine_id: str, is_lost: bool = False) -> Iterator[None]:
        topology, layout = self.transfer_topo, None
        if topology is not None and self._requests_from(engine_id):
            with contextlib.suppress(KeyError):
                layout = topology.get_engine_info(engine_id)
        yield
        if layout is not None and engine_id not in self._remote_agents:
            assert topology is not None
            topology.register_remote_engine(engine_id, layout)
            self._awaited[engine_id] = self._awaited.get(engine_id) or is_lost

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do a handshake; one that is refused ends the wait for a lost prefill.

        The scheduler's lease heartbeats ask for it while requests wait. Nothing less
        will do: a prefill that lives may still write into the requests' blocks, which
        belong to other requests by then.
        """
        try:
            return super()._nixl_handshake(
                host, port, remote_tp_size, expected_engine_id, *args, **kwargs
            )
        except ConnectionRefusedError:
            if self._peers is not None and self._awaited.get(expected_engine_id):
                waiting = self._requests_from(expected_engine_id)
                for req_id in waiting:
                    self._failed_recv_reqs.put(req_id)
                logger.warning(
                    "NIXL peer gone, requests that wait for it fail: %s | Context: %s",
                    expected_engine_id,
                    {
                        "engine_id": self.engine_id,
                        "remote_engine_id": expected_engine_id,
                        "remote_address": address_of(host, port),
                        "requests": len(waiting),
                    },
                )
            raise

    def _requests_from(self, engine_id: str) -> list[str]:
        """Return the requests whose blocks a prefill is to write."""
        return [
            req_id
            for req_id, meta in list(self._recving_metadata.items())
            if meta.remote is not None
            and meta.remote.engine_id == engine_id
            and reads_blocks(meta)
        ]

    def _run_round(self, now: float) -> bool:
        for engine_id in list(self._awaited):
            if engine_id in self._remote_agents:
                del self._awaited[engine_id]
            elif engine_id not in self._handshake_futures and not self._requests_from(
                engine_id
            ):
                del self._awaited[engine_id]
                assert self.transfer_topo is not None
                self.transfer_topo.unregister_remote_engine(engine_id)
        return super()._run_round(now)

    # -- Both --------------------------------------------------------------------

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: "ReqMeta | None" = None,
        **extra_context: Any,
    ) -> None:
        """Log a failure, and count the registrations that could not be sent."""
        if failure_type == "push_reg_notif_failed":
            self._unsent += 1
        super()._log_failure(failure_type, req_id, msg, error, meta, **extra_context)

    def _drain_notifs(self) -> None:
        """Have the writer thread fetch what has arrived, and renew leases.

        Whatever else it has fetched waits for the next step.
        """
        self._push_writer_wake.set()
        for _ in range(self._pending_completion_notifs.qsize()):
            notif = self._pending_completion_notifs.get_nowait()
            if notif.startswith(HEARTBEAT):
                payload = notif[len(HEARTBEAT) :]
                self._handle_heartbeat(payload.decode("utf-8", "replace"))
            else:
                self._pending_completion_notifs.put(notif)

    def shutdown(self) -> None:
        """Stop the writer thread before the lock is taken that it may wait for."""
        if self._peers is not None and self._push_writer_thread is not None:
            self._push_writer_stop.set()
            self._push_writer_wake.set()
            self._push_writer_thread.join(_PUSH_WRITER_JOIN_TIMEOUT_S)
        super().shutdown()


class NixlPeerStats(PeerStatsMixin, NixlKVConnectorStats):
    """The stock statistics and those of peers."""


class NixlPeerPromMetrics(PeerPromMetricsMixin, NixlPromMetrics):
    """The stock metrics and those of peers."""


def heartbeat_interval(vllm_config: "VllmConfig") -> float:
    """Read ``peer_heartbeat_interval`` from the connector's extra config.

    Args:
        vllm_config: vLLM's configuration, with a ``kv_transfer_config``.

    Returns:
        The interval in seconds; 0.0 if the feature is off.

    Raises:
        ValueError: If the value is neither 0 nor a finite number of seconds that is
            large enough.

    """
    assert vllm_config.kv_transfer_config is not None
    return parse_heartbeat_interval(
        vllm_config.kv_transfer_config.get_from_extra_config(
            HEARTBEAT_INTERVAL_KEY, DEFAULT_HEARTBEAT_INTERVAL_S
        )
    )


class _PeerMetricsMixin:
    """The statistics and metrics of both connectors."""

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> NixlPeerStats:
        """Return statistics that hold ``data``, or nothing yet."""
        return NixlPeerStats() if data is None else NixlPeerStats(data=data)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> NixlPeerPromMetrics:
        """Return the Prometheus metrics that the statistics go to."""
        return NixlPeerPromMetrics(*args, **kwargs)


class NixlConnector(_PeerMetricsMixin, StockNixlPullConnector):
    """vLLM's NIXL pull connector, with a worker that releases unreachable peers."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        """Build the connector.

        Args:
            vllm_config: vLLM's configuration.
            role: Which half to build: the scheduler's or the worker's.
            kv_cache_config: Layout of the KV cache.

        Raises:
            ValueError: If ``peer_heartbeat_interval`` is not valid.

        """
        # Not the stock pull connector's constructor: it builds a worker of its own,
        # and with ours there would be two NIXL agents.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        interval = heartbeat_interval(vllm_config)
        arguments = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPullConnectorScheduler(*arguments)
        elif interval:
            self.connector_worker = NixlConnectorWorker(*arguments)
        else:
            self.connector_worker = NixlPullConnectorWorker(*arguments)


NixlPullConnector = NixlConnector


class NixlPushConnector(_PeerMetricsMixin, StockNixlPushConnector):
    """vLLM's NIXL push connector, with a worker that releases unreachable peers."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        """Build the connector.

        Args:
            vllm_config: vLLM's configuration.
            role: Which half to build: the scheduler's or the worker's.
            kv_cache_config: Layout of the KV cache.

        Raises:
            ValueError: If ``peer_heartbeat_interval`` is not valid, or vLLM's push
                connector does not support the configuration.

        """
        interval = heartbeat_interval(vllm_config)
        if role == KVConnectorRole.SCHEDULER or not interval:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        # As for pull mode: stock's constructor would build a worker of its own. Of
        # what it refuses, only this is checked there.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError(
                f"{type(self).__name__} works with decode_context_parallel_size 1, not "
                f"{vllm_config.parallel_config.decode_context_parallel_size}."
            )
        self.connector_worker = NixlPushConnectorWorker(
            vllm_config, self.engine_id, kv_cache_config
        )


# All that this builds on of the stock workers, for checks at start-up: methods that are
# overridden or called, attributes that are read or set.
STOCK_WORKER_METHODS = (
    "_cleanup_remote_engine",
    "_engines_with_inflight_transfers",
    "_ensure_handshake",
    "_handle_heartbeat",
    "_log_failure",
    "_nixl_handshake",
    "add_remote_agent",
    "get_kv_connector_stats",
    "get_transfer_results",
    "shutdown",
    "start_load_kv",
)
STOCK_WORKER_ATTRIBUTES = (
    "_failed_recv_reqs",
    "_handshake_futures",
    "_handshake_initiation_executor",
    "_recving_metadata",
    "_remote_agents",
    "_reqs_to_send",
    "consumer_notification_counts_by_req",
    "device_id",
    "dst_xfer_side_handles",
    "nixl_backends",
    "nixl_wrapper",
    "tp_rank",
    "use_host_buffer",
    "xfer_stats",
)
STOCK_PULL_WORKER_METHODS = (*STOCK_WORKER_METHODS, "_read_blocks_for_req")
STOCK_PUSH_WORKER_METHODS = (
    *STOCK_WORKER_METHODS,
    "_do_send_reg_notif",
    "_do_start_push_kv",
    "_evict_stale_engines",
)
STOCK_PUSH_WORKER_ATTRIBUTES = (
    *STOCK_WORKER_ATTRIBUTES,
    "_pending_completion_notifs",
    "_push_writer_stop",
    "_push_writer_thread",
    "_push_writer_wake",
)
