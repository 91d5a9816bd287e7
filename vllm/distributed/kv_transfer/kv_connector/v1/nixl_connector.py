# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NIXL pull connector that releases the state of unreachable peers.

A decode instance reads KV blocks out of a prefill's memory, and for that keeps the
prefill's agent metadata and remote keys (rkeys) loaded. This connector extends vLLM's
own: each step, after the stock work, runs one bounded round that sends the heartbeats
that are due and releases the peers that NIXL has reported as disconnected and that
nothing is read from. While no step runs, a monitor thread runs the same round.

The feature is in ``nixl_peers``: ``agent`` (the way into NIXL), ``policy`` (schedule
and evidence), ``quarantine``, ``manager`` (a peer's life), ``monitor``, ``stats``,
``admin``, ``ucx``. Here it is wired to vLLM's worker.
"""

import os
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .nixl_peers.agent import NixlAgentProxy, OpenTransfers
from .nixl_peers.handshake import (
    PeerRefusedError,
    check_listener,
    says_nothing_about_peer,
)
from .nixl_peers.manager import PeerManager
from .nixl_peers.monitor import PeerMonitor
from .nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    HEARTBEAT_INTERVAL_KEY,
    parse_heartbeat_interval,
)
from .nixl_peers.stats import PeerPromMetricsMixin, PeerStatsMixin
from .nixl_peers.ucx import ucx_setting_problems

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# All that this builds on of the stock worker, checked at start-up where it matters:
# methods that are overridden or called, attributes that are read or set.
STOCK_WORKER_METHODS = (
    "_cleanup_remote_engine",
    "_engines_with_inflight_transfers",
    "_ensure_handshake",
    "_handle_heartbeat",
    "_log_failure",
    "_nixl_handshake",
    "_read_blocks_for_req",
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
    "device_id",
    "dst_xfer_side_handles",
    "nixl_backends",
    "nixl_wrapper",
    "tp_rank",
    "use_host_buffer",
    "xfer_stats",
)

# A handshake with an address that does not answer takes 5 s of waiting. As many may
# wait before a new peer has to; threads are made when they are needed.
_HANDSHAKE_THREADS = 32
_SHUTDOWN_LOCK_TIMEOUT_S = 5.0


class NixlPeerStats(PeerStatsMixin, NixlKVConnectorStats):
    """The stock statistics and those of peers."""


class NixlPeerPromMetrics(PeerPromMetricsMixin, NixlPromMetrics):
    """The stock metrics and those of peers."""


class NixlConnectorWorker(NixlPullConnectorWorker):
    """Pull worker that sends its peers heartbeats and releases unreachable ones."""

    # None in a worker that object.__new__ has made (tests do): it is the stock worker.
    _peers: PeerManager | None = None

    # -- The step --------------------------------------------------------------

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start the reads of a step."""
        if self._peers is None:
            return super().start_load_kv(metadata)
        with self._peers.lock:
            super().start_load_kv(metadata)
            if metadata.reqs_to_send:
                # Decoders are about to connect: their heartbeats must not pile up in
                # NIXL's unbounded list while this engine idles.
                self._start_monitor()

    def get_transfer_results(self) -> "KVConnectorTransferResults":
        """Run the stock step, then one round of peer work."""
        if self._peers is None:
            return super().get_transfer_results()
        with self._peers.lock:
            local_hits = self._take_local_hits()
            results = super().get_transfer_results()
            if local_hits:
                results.finished_recving.update(local_hits)
            self._last_step = now = self._peers.clock()
            if self._peers.has_work(now):
                self._run_round(self._peers, now)
            return results

    def _run_round(self, peers: PeerManager, now: float) -> bool:
        """Send heartbeats and release peers, as are due; return if some are left."""
        peers.update_suspects(now)
        heartbeats_left = peers.send_due_heartbeats(self._agent, now)
        released = self._release_unreachable_remote_engines()
        return heartbeats_left or released

    def _release_unreachable_remote_engines(self) -> bool:
        """Release unreachable peers, a bounded number; return whether there were any.

        Only those with nothing in flight. vLLM's own account counts as well as that of
        open handles: a finished request still needs its peer's layout.
        """
        assert self._peers is not None
        releasable = self._peers.take_releasable(
            self._engines_with_inflight_transfers(), self._handshake_futures
        )
        for engine_id in releasable:
            self._cleanup_remote_engine(engine_id, log_eviction=False)
        return bool(releasable)

    # -- Construction ------------------------------------------------------------

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
        self.xfer_stats = NixlPeerStats()
        transfers = OpenTransfers()
        peers = PeerManager(
            interval, engine_id, transfers, self.xfer_stats, time.perf_counter
        )
        self._agent = NixlAgentProxy(self.nixl_wrapper, peers, transfers, peers.clock)
        self.nixl_wrapper = self._agent
        # One address that hangs must not keep other handshakes waiting.
        self._handshake_initiation_executor.shutdown(wait=False)
        self._handshake_initiation_executor = ThreadPoolExecutor(
            _HANDSHAKE_THREADS, thread_name_prefix="vllm-nixl-handshake"
        )
        # Stock's loading code is written for one handshake thread.
        self._loading = threading.Lock()
        self._monitor: PeerMonitor | None = None
        self._last_step = 0.0
        self._device_is_set = False
        self._is_shut_down = False
        if (
            current_platform.is_cuda()
            and "UCX" in self.nixl_backends
            and self.tp_rank == 0
        ):
            for problem in ucx_setting_problems(os.environ):
                logger.warning("NIXL peer release: %s", problem)
        self._peers = peers

    # -- Reads -------------------------------------------------------------------

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        """Post a request's reads, unless they would get stuck or could not end well."""
        peers = self._peers
        if peers is not None and meta.remote is not None and _reads_blocks(meta):
            engine_id = meta.remote.engine_id
            if self._is_replaced_under_a_read(meta):
                peers.mark_replaced(engine_id, "it has registered its KV cache again")
            if (refusal := peers.read_refusal(engine_id)) is not None:
                self._refuse(peers, req_id, f"its peer {engine_id} is {refusal}")
                self._failed_recv_reqs.put(req_id)
                return
        super()._read_blocks_for_req(req_id, meta)

    def _refuse(self, peers: PeerManager, req_id: str | None, reason: object) -> None:
        # One line per request would bury the log while a router keeps sending to a
        # dead peer; what is behind it has been logged.
        logger.debug("Request %s refused: %s", req_id, reason)
        peers.request_refused()

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
            and meta.remote.engine_id in self._engines_with_inflight_transfers()
        )

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
            if meta is None or _reads_blocks(meta):
                failed.append(req_id)
            else:
                del self._recving_metadata[req_id]
                local.append(req_id)
        for req_id in failed:
            self._failed_recv_reqs.put(req_id)
        return local

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: "ReqMeta | None" = None,
        **extra_context: Any,
    ) -> None:
        """Log a failure as stock does; count a refusal instead."""
        if isinstance(error, PeerRefusedError) and self._peers is not None:
            # The scheduler sends a failed request again, without blocks, to have its
            # peer notified: that is no second request.
            if meta is not None and _reads_blocks(meta):
                self._refuse(self._peers, req_id, error)
            return
        super()._log_failure(failure_type, req_id, msg, error, meta, **extra_context)

    # -- Coming and going --------------------------------------------------------

    def _ensure_handshake(
        self, engine_id: str, host: str, port: int, *args: Any, **kwargs: Any
    ) -> Future[Any] | None:
        """Start a handshake as stock does, unless the engine is not to be tried.

        Returns:
            None if the engine is connected, the future of a pending handshake, or a
            future that has failed with :class:`PeerRefusedError`.

        """
        peers = self._peers
        if peers is None or engine_id in self._remote_agents:
            return super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
        with peers.lock:
            running = engine_id in self._handshake_futures
            refusal = peers.handshake_refusal(engine_id, (host, port), running=running)
            if refusal is not None:
                refused: Future[Any] = Future()
                refused.set_exception(
                    PeerRefusedError(f"Remote engine {engine_id} is {refusal}")
                )
                return refused
            future = super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
            if future is not None and not running:
                # Runs after stock's callback, which lists the peer as connected.
                future.add_done_callback(
                    lambda done: self._handshake_done(engine_id, (host, port), done)
                )
            return future

    def _handshake_done(
        self, engine_id: str, address: tuple[str, int], done: Future[Any]
    ) -> None:
        if self._peers is None or done.cancelled() or done.exception() is not None:
            return
        with self._peers.lock:
            agents, _clock_offset = done.result()
            self._peers.connected(engine_id, agents.values(), address)
            self._start_monitor()

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do the handshake as stock does; runs in a handshake thread.

        One that fails leaves nothing loaded and quarantines the engine at this address.
        """
        stock_handshake = super()._nixl_handshake
        arguments = (host, port, remote_tp_size, expected_engine_id, *args)
        peers = self._peers
        if peers is None:
            return stock_handshake(*arguments, **kwargs)
        with self._agent.record_loads() as loaded:
            try:
                if peers.needs_check(expected_engine_id, (host, port)):
                    check_listener(host, port)
                return stock_handshake(*arguments, **kwargs)
            except Exception as e:
                self._unload(peers, expected_engine_id, loaded)
                if not says_nothing_about_peer(e, host):
                    peers.handshake_failed(expected_engine_id, (host, port))
                raise

    def add_remote_agent(self, nixl_agent_meta: Any, *args: Any, **kwargs: Any) -> str:
        """Load a peer's metadata, one peer at a time."""
        if self._peers is None:
            return super().add_remote_agent(nixl_agent_meta, *args, **kwargs)
        self._peers.handshake_answered(nixl_agent_meta.engine_id)
        with self._loading:
            return super().add_remote_agent(nixl_agent_meta, *args, **kwargs)

    def _unload(self, peers: PeerManager, engine_id: str, loaded: list[str]) -> None:
        """Unload what a failed handshake has loaded.

        A peer that dies between two of its ranks is connected to neither: no heartbeat
        would ever reach it, and its rkeys would stay loaded for good.
        """
        with peers.lock:
            if engine_id == self.engine_id or engine_id in self._remote_agents:
                return
            # Stock's clean-up takes the names from here, whatever the ranks; no step
            # sees it, since it holds the lock.
            self._remote_agents[engine_id] = {
                (0, rank): agent for rank, agent in enumerate(loaded)
            }
            self._cleanup_remote_engine(engine_id, log_eviction=False)

    def _cleanup_remote_engine(
        self, engine_id: str, *, log_eviction: bool = True
    ) -> None:
        """Forget a peer: the one way out, for stock's reasons and for ours."""
        if self._peers is None:
            super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
            return
        with self._peers.lock:
            if engine_id == self.engine_id or engine_id not in self._remote_agents:
                return
            num_dlists = len(self.dst_xfer_side_handles.get(engine_id, ()))
            with self._peers.releasing(engine_id, num_dlists):
                super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    # -- Off the main thread -------------------------------------------------------

    def _start_monitor(self) -> None:
        """Start the monitor, unless it runs; one that could not is tried again."""
        assert self._peers is not None
        if self._is_shut_down or (self._monitor and self._monitor.is_alive()):
            return
        # Idle work may start an interval after the last step and then has another one
        # for the heartbeat: a few rounds each keep that promise.
        monitor = PeerMonitor(self, period=min(self._peers.interval / 2, 1.0))
        try:
            monitor.start()
        except RuntimeError:
            # Out of threads: steps go on without it.
            logger.exception("NIXL peer monitor could not be started")
        else:
            self._monitor = monitor

    def _run_idle_round(self) -> bool:
        """Run a round on the monitor's thread if no step has run for an interval."""
        peers = self._peers
        assert peers is not None
        if peers.clock() - self._last_step < peers.interval:
            return False
        if not self._device_is_set:
            # Unloading rkeys may unmap device memory; see stock's `_nixl_handshake`.
            if not self.use_host_buffer:
                current_platform.set_device(self.device_id)  # type: ignore[arg-type]
            self._device_is_set = True
        with peers.lock:
            now = peers.clock()
            if self._is_shut_down or now - self._last_step < peers.interval:
                return False
            for payload in self._agent.drain():
                self._handle_heartbeat(payload)
            return peers.has_work(now) and self._run_round(peers, now)

    # -- For operators and metrics ---------------------------------------------------

    def list_peers(self) -> dict[str, Any]:
        """Return what is known about the peers, and what is still to be read from here.

        Returns:
            ``peers``, one dict per connected peer: ``engine_id``, ``address``
            ("host:port"), ``agents``, ``state`` ("connected", "suspect",
            "unreachable", "releasing"), ``since_proof_of_life_s``,
            ``in_flight_reads`` and ``last_error`` (None if there was none).
            ``unread_requests``, the requests whose blocks decoders are still to read
            from this engine, and ``unread_lease_s``, after which the last of their
            leases ends.

        """
        if self._peers is None:
            return {"peers": [], "unread_requests": 0, "unread_lease_s": 0.0}
        with self._peers.lock:
            now = self._peers.clock()
            # What has been read while no step ran is accounted for by the next one.
            read = {
                notif.decode("utf-8", "replace").rsplit(":", 1)[0]
                for notif in self._agent.kept_notifs()
            }
            unread = [
                lease_end - now
                for req_id, lease_end in self._reqs_to_send.items()
                if lease_end > now and req_id not in read
            ]
            return {
                "peers": self._peers.list_peers(),
                "unread_requests": len(unread),
                "unread_lease_s": round(max(unread, default=0.0), 3),
            }

    def release_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        """Release the peers that the operator names, as if they were unreachable.

        The next request for a released engine connects again.

        Args:
            engine_id: Engine to release.
            address: Side channel of the engines to release, "host:port".

        Returns:
            ``result``: "released"; "busy" if reads in flight defer it (it goes when
            they end, and takes no new ones until then) or a handshake is running; or
            "unknown". ``engine_ids`` found, ``in_flight_reads`` from them, and with
            "unknown" the ``known`` peers.

        """
        if self._peers is None:
            return {
                "result": "unknown",
                "engine_ids": [],
                "in_flight_reads": 0,
                "known": [],
            }
        with self._peers.lock:
            named = self._peers.request_release(engine_id, address)
            while self._release_unreachable_remote_engines():
                pass
            peers = self._peers.list_peers()
            left = [peer for peer in peers if peer["engine_id"] in named]
            connecting = engine_id not in named and (
                engine_id in self._handshake_futures or engine_id in self._remote_agents
            )
            result: dict[str, Any] = {
                "result": "released",
                "engine_ids": named or ([engine_id] if connecting else []),
                "in_flight_reads": sum(peer["in_flight_reads"] for peer in left),
            }
            if left or connecting:
                result["result"] = "busy"
            elif not named:
                result["result"] = "unknown"
                result["known"] = [
                    {key: peer[key] for key in ("engine_id", "address")}
                    for peer in peers
                ]
            return result

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Hand over the statistics since the last step that did."""
        if self._peers is None:
            return super().get_kv_connector_stats()
        # The monitor counts as well.
        with self._peers.lock:
            if self._peers.must_report_gauges and isinstance(
                self.xfer_stats, NixlPeerStats
            ):
                self.xfer_stats.set_gauges(self._peers.report_gauges())
            return super().get_kv_connector_stats()

    # -- Life cycle ------------------------------------------------------------------

    # Sleep mode: vLLM has and calls these two from 0.33 on.

    def unregister_kv_caches(self) -> None:
        """Unregister the KV cache (sleep mode).

        Raises:
            RuntimeError: If a read is in flight: its peer's state must not go under it.

        """
        if self._peers is not None:
            with self._peers.lock:
                if busy := self._engines_with_inflight_transfers():
                    raise RuntimeError(
                        f"Reads from {sorted(busy)} are in flight: the KV cache cannot "
                        "be unregistered before they have ended."
                    )
                super().unregister_kv_caches()  # type: ignore[misc]
                return
        super().unregister_kv_caches()  # type: ignore[misc]

    def restore_kv_caches(self) -> None:
        """Register the KV cache again (sleep mode)."""
        if self._peers is None:
            super().restore_kv_caches()  # type: ignore[misc]
            return
        with self._peers.lock:
            super().restore_kv_caches()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop the monitor, then shut down as stock does."""
        if self._peers is None:
            super().shutdown()
            return
        # A handshake that is still running must not start another one.
        self._is_shut_down = True
        if self._monitor is not None and not self._monitor.stop():
            logger.warning("NIXL peer monitor is still inside a NIXL call")
        if not self._peers.lock.acquire(timeout=_SHUTDOWN_LOCK_TIMEOUT_S):
            # A second thread inside NIXL could crash the process; what this one holds
            # goes with the process.
            logger.error("NIXL is busy in another thread; not shut down")
            return
        try:
            super().shutdown()
        finally:
            self._peers.lock.release()

    def __del__(self) -> None:
        # Stock's needs a module global, which is gone when the interpreter exits.
        try:  # noqa: SIM105
            self.shutdown()
        except Exception:
            pass


def _reads_blocks(meta: "ReqMeta") -> bool:
    """Return whether a request reads blocks; one that does not notifies only."""
    return any(len(group) > 0 for group in meta.local_block_ids)


def heartbeat_interval(vllm_config: "VllmConfig") -> float:
    """Read ``peer_heartbeat_interval`` from the connector's extra config.

    Args:
        vllm_config: vLLM's configuration, with a ``kv_transfer_config``.

    Returns:
        The interval in seconds; 0.0 if the feature is off.

    Raises:
        ValueError: If the value is not a finite number >= 0.

    """
    assert vllm_config.kv_transfer_config is not None
    return parse_heartbeat_interval(
        vllm_config.kv_transfer_config.get_from_extra_config(
            HEARTBEAT_INTERVAL_KEY, DEFAULT_HEARTBEAT_INTERVAL_S
        )
    )


class NixlConnector(StockNixlPullConnector):
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
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPullConnectorScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            worker_cls = NixlConnectorWorker if interval else NixlPullConnectorWorker
            self.connector_worker = worker_cls(
                vllm_config, self.engine_id, kv_cache_config
            )

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


NixlPullConnector = NixlConnector
