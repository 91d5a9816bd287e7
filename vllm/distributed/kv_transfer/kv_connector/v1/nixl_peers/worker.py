# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a worker with a peer manager does beside its steps, in pull and push mode.

A mixin in front of one of vLLM's workers, which it knows by its methods only.
"""

import contextlib
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from .agent import NixlAgentProxy, OpenTransfers
from .handshake import (
    PeerRefusedError,
    address_of,
    check_listener,
    says_nothing_about_peer,
)
from .manager import PeerManager
from .monitor import PeerMonitor
from .stats import PeerStatsMixin
from .ucx import ucx_setting_problems

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
        NixlBaseConnectorWorker as _StockWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
else:
    _StockWorker = object

logger = init_logger(__name__)

# A handshake with an address that does not answer takes 5 s of waiting. As many may
# wait before a new peer has to; threads are made when they are needed.
_HANDSHAKE_THREADS = 32
_SHUTDOWN_LOCK_TIMEOUT_S = 5.0


def reads_blocks(meta: "ReqMeta") -> bool:
    """Return whether a request reads blocks; one that does not notifies only."""
    return any(len(group) > 0 for group in meta.local_block_ids)


class PeerWorkerMixin(_StockWorker):
    """Handshakes, releases, idle rounds and the end of a worker with peers."""

    # None in a worker that object.__new__ has made (tests do): it is the stock worker.
    _peers: PeerManager | None = None
    _step_lock: "contextlib.AbstractContextManager[Any]" = contextlib.nullcontext()
    _agent: NixlAgentProxy

    def manage_peers(self, interval: float, stats: PeerStatsMixin) -> None:
        """Begin to manage the peers of a worker that stock has just built.

        Args:
            interval: Heartbeat interval in seconds, > 0.
            stats: What the worker counts into from now on.

        """
        self.xfer_stats = stats
        transfers = OpenTransfers()
        peers = PeerManager(
            interval, self.engine_id, transfers, stats, time.perf_counter
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
        self._step_lock = peers.lock

    def _run_round(self, now: float) -> bool:
        """Do one bounded round of peer work; return whether some is left."""
        raise NotImplementedError

    # -- Handshakes --------------------------------------------------------------

    def _ensure_handshake(
        self, engine_id: str, host: str, port: int, *args: Any, **kwargs: Any
    ) -> Future[Any] | None:
        """Start a handshake as stock does, unless the engine is not to be tried.

        Returns:
            None if the engine is connected, the future of a pending handshake, or a
            future that has failed with :class:`PeerRefusedError`.

        """
        peers = self._peers
        if peers is None:
            return super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
        address = address_of(host, port)
        # Under the lock: what a failed handshake has loaded looks like a connection
        # while it is unloaded.
        with peers.lock:
            if engine_id in self._remote_agents:
                return super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
            running = engine_id in self._handshake_futures
            refusal = peers.handshake_refusal(engine_id, address, running=running)
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
                    lambda done: self._handshake_done(engine_id, address, done)
                )
            return future

    def _handshake_done(self, engine_id: str, address: str, done: Future[Any]) -> None:
        if self._peers is None or done.cancelled() or done.exception() is not None:
            return
        with self._peers.lock:
            agents: dict[tuple[int, int], str]
            agents, _clock_offset = done.result()
            if self._remote_agents.get(engine_id) is not agents:
                # A step has evicted it since stock's callback. A peer without loaded
                # state could never be released.
                return
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
        address = address_of(host, port)
        with self._agent.record_loads() as loaded:
            try:
                if peers.needs_check(expected_engine_id, address):
                    check_listener(host, port)
                return stock_handshake(*arguments, **kwargs)
            except Exception as e:
                self._unload(peers, expected_engine_id, loaded)
                if not says_nothing_about_peer(e, host):
                    peers.handshake_failed(expected_engine_id, address, e)
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

    # -- Releases ------------------------------------------------------------------

    def _engines_in_use(self) -> set[str]:
        """Return the engines that vLLM itself is not done with.

        Its account counts as well as that of open handles: a request whose reads have
        finished still needs its peer's layout.
        """
        return self._engines_with_inflight_transfers()

    def _release_unreachable_remote_engines(self) -> bool:
        """Release a peer that is to go; return whether there was one.

        Never one with a transfer in flight, nor while a handshake with it runs. If
        there was one, the caller looks again: others may be left.
        """
        assert self._peers is not None
        engine_id = self._peers.find_releasable(
            self._engines_in_use(), self._handshake_futures
        )
        if engine_id is None:
            return False
        self._cleanup_remote_engine(engine_id, log_eviction=False)
        return True

    def _cleanup_remote_engine(
        self, engine_id: str, *, log_eviction: bool = True
    ) -> None:
        """Forget a peer: the one way out, for stock's reasons and for ours."""
        peers = self._peers
        if peers is None:
            super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
            return
        with peers.lock:
            if engine_id == self.engine_id or engine_id not in self._remote_agents:
                return
            in_use = self._engines_in_use() | peers.engines_in_flight()
            if engine_id in in_use and not self._is_shut_down:
                # Only an eviction of stock's gets here; NIXL would crash.
                peers.mark_replaced(engine_id, "vLLM has evicted it")
                return
            num_dlists = len(self.dst_xfer_side_handles.get(engine_id, ()))
            with peers.releasing(engine_id, num_dlists):
                super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    # -- The monitor's thread ------------------------------------------------------

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
            self._drain_notifs()
            return now >= peers.next_round_at and self._run_round(now)

    def _drain_notifs(self) -> None:
        """Keep notifications from piling up in NIXL, and renew leases."""
        for payload in self._agent.drain():
            self._handle_heartbeat(payload)

    # -- Failures and statistics -----------------------------------------------------

    def _refuse(self, req_id: str | None, reason: object) -> None:
        """Count a request that is not even tried."""
        # One line per request would bury the log while a router keeps sending to a
        # dead peer; what is behind it has been logged.
        logger.debug("Request %s refused: %s", req_id, reason)
        if self._peers is not None:
            self._peers.count_refused()

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
        if not isinstance(error, PeerRefusedError):
            super()._log_failure(
                failure_type, req_id, msg, error, meta, **extra_context
            )
            return
        if meta is None and req_id is not None:
            meta = self._recving_metadata.get(req_id)
        # The scheduler sends a failed request again, without blocks, to have its peer
        # notified: that is no second request. A request to write has no metadata here.
        if meta is None or reads_blocks(meta):
            self._refuse(req_id, error)

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Hand over the statistics since the last step that did."""
        with self._step_lock:  # the monitor counts as well
            if self._peers is not None and self._peers.must_report_gauges:
                self._peers.report_gauges()
            return super().get_kv_connector_stats()

    # -- Life cycle ------------------------------------------------------------------

    # Sleep mode: vLLM has and calls these two from 0.33 on.

    def unregister_kv_caches(self) -> None:
        """Unregister the KV cache (sleep mode).

        Raises:
            RuntimeError: If a transfer is in flight: its peer's state must not go
                under it.

        """
        with self._step_lock:
            busy: set[str] = set()
            if self._peers is not None:
                busy = self._engines_in_use() | self._peers.engines_in_flight()
            if busy:
                raise RuntimeError(
                    f"Transfers with {sorted(busy)} are in flight: the KV cache cannot "
                    "be unregistered before they have ended."
                )
            super().unregister_kv_caches()  # type: ignore[misc]

    def restore_kv_caches(self) -> None:
        """Register the KV cache again (sleep mode)."""
        with self._step_lock:
            super().restore_kv_caches()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop the monitor, then shut down as stock does."""
        if self._peers is None:
            super().shutdown()
            return
        # A handshake that is still running must not start another monitor.
        self._is_shut_down = True
        if self._monitor is not None and not self._monitor.stop():
            logger.warning("NIXL peer monitor is still inside a NIXL call")
        if not self._peers.lock.acquire(timeout=_SHUTDOWN_LOCK_TIMEOUT_S):
            # A second thread inside NIXL could crash the process; what this one holds
            # goes with the process.
            logger.error("NIXL is busy in another thread; skipping its shutdown")
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
