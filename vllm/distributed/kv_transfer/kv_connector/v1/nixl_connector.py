# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NIXL pull connector that lets go of dead peers.

A decode instance reads KV blocks out of a prefill's memory and for that keeps
the prefill's agent metadata and memory keys (rkeys) loaded. This connector
extends vLLM's own: each step, after the stock work, it

1. sends the heartbeats that are due (``get_transfer_results``),
2. takes typed NIXL disconnects, wherever they show, as evidence that a peer is
   gone (``_note_error``),
3. releases such peers once no read from them is open
   (``_release_unreachable_remote_engines``).

While no step runs, a monitor thread does the same work. Policy is in
``nixl_peer_policy``, threads are in ``nixl_peer_monitor``.
"""

import collections
import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlAgentMetadata,
    NixlBaseConnector,
    NixlBaseConnectorScheduler,
    NixlBaseConnectorWorker,
    NixlConnectorMetadata,
    NixlConnectorScheduler,
    NixlHandshakePayload,
    NixlKVConnectorStats,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
    NixlPushConnector,
    NixlPushConnectorScheduler,
    NixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector as StockNixlPullConnector,
)
from .nixl_peers.monitor import (
    PeerMonitor,
    SideChannel,
)
from .nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    HEARTBEAT_INTERVAL_KEY,
    Loss,
    PeerTable,
    Verdict,
    is_disconnect,
    is_nixl_error,
    parse_heartbeat_interval,
)
from .nixl_peers.stats import (
    NixlPeerPromMetrics,
    NixlPeerStats,
    PeerEvents,
)
from .nixl_peers.ucx import (
    ucx_setting_problems,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

# An empty lease heartbeat: renews nothing, and every prefill understands it. Any
# other payload would raise in the step of one that does not run this connector.
_HEARTBEAT = b"HB:"
# Sends per step, a TP-32 peer's worth, at about 5 us each.
_MAX_SENDS_PER_STEP = 32
# Long enough for one lost SYN (resent after 1 s).
_PROBE_TIMEOUT_S = 2.0
_SHUTDOWN_LOCK_TIMEOUT_S = 5.0

TESTED_VLLM = ("0.31", "0.32", "0.33")
# What we override, call or read of the stock pull worker.
REQUIRED_WORKER_MEMBERS = (
    "_add_notif_only_remote_agent",
    "_cleanup_remote_engine",
    "_engines_with_inflight_transfers",
    "_ensure_handshake",
    "_get_new_notifs",
    "_handle_heartbeat",
    "_log_failure",
    "_nixl_handshake",
    "_pop_done_transfers",
    "_read_blocks_for_req",
    "_send_heartbeats",
    "add_remote_agent",
    "get_transfer_results",
    "shutdown",
    "start_load_kv",
)
REQUIRED_WORKER_ATTRIBUTES = (
    "_engine_last_active",
    "_failed_recv_reqs",
    "_handshake_futures",
    "_handshake_initiation_executor",
    "_handshake_lock",
    "_recv_failures",
    "_recving_metadata",
    "_recving_transfers",
    "_remote_agents",
    "device_id",
    "dst_xfer_side_handles",
    "nixl_backends",
    "nixl_wrapper",
    "tp_rank",
    "use_host_buffer",
    "xfer_stats",
)


def unfit_reason(worker_cls: type = NixlPullConnectorWorker) -> str | None:
    """Return why this connector cannot extend the installed vLLM, or None.

    Args:
        worker_cls: The stock pull worker.

    """
    if hasattr(worker_cls, "_release_unreachable_remote_engines"):
        return "this vLLM releases unreachable peers itself"
    missing = [
        name for name in REQUIRED_WORKER_MEMBERS if not hasattr(worker_cls, name)
    ]
    # Instance attributes are the names that the constructors store.
    stored: set[str] = set()
    for cls in worker_cls.__mro__:
        if (init := vars(cls).get("__init__")) is not None and cls is not object:
            stored.update(init.__code__.co_names)
    missing += [name for name in REQUIRED_WORKER_ATTRIBUTES if name not in stored]
    if missing:
        return f"its NIXL pull worker lacks {', '.join(missing)}"
    return None


def is_tested_vllm(version: str = vllm.__version__) -> bool:
    """Return whether this vLLM release is one that the tests run against."""
    return version.startswith(tuple(f"{release}." for release in TESTED_VLLM))


def _probe_listener(host: str, port: int) -> None:
    """Make sure that a ZMQ listener lives, in milliseconds instead of ZMQ's 5 s.

    A dead process refuses the connection. One that is just dying, or stopped, is
    still connected by its kernel, but does not send ZMQ's greeting.

    Raises:
        OSError: If nothing lives there.

    """
    with socket.create_connection((host, port), _PROBE_TIMEOUT_S) as probe:
        if not probe.recv(1):
            raise ConnectionError(f"{host}:{port} closed the connection")


def _reads_blocks(meta: "ReqMeta") -> bool:
    """Return whether a request reads blocks; one that does not notifies only."""
    return any(len(group) > 0 for group in meta.local_block_ids)


class PeerQuarantinedError(RuntimeError):
    """A request names an engine that does not answer handshakes at present."""


class _AgentOverlay:
    """A NIXL agent of which some methods are replaced."""

    def __init__(self, agent: Any, methods: dict[str, Callable[..., Any]]):
        self._agent = agent
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class NixlConnectorWorker(NixlPullConnectorWorker):
    """Pull worker that heartbeats its peers and releases dead ones.

    Everything that touches the NIXL agent runs under one lock: the steps of the
    main thread, the loading of metadata in the handshake thread, the monitor.
    """

    # State of the feature is made on first use where a constructor was not run:
    # tests of forks build workers with object.__new__ and the stock attributes.
    _monitor: PeerMonitor | None = None
    _last_step = 0.0
    # A Python lock is not fair: the monitor, taking it again at once for the next
    # peer, could keep the step out. So the step says that it waits.
    _step_waits = False
    _device_is_set = False
    _is_shut_down = False

    @functools.cached_property
    def _peers(self) -> PeerTable:
        return PeerTable(DEFAULT_HEARTBEAT_INTERVAL_S)

    @functools.cached_property
    def _nixl_lock(self) -> threading.RLock:  # type: ignore[valid-type]
        return threading.RLock()

    # Stock attributes that not every such test sets, since not every stock method
    # needs them.
    @functools.cached_property
    def _engine_last_active(self) -> dict[str, float]:  # type: ignore[override]
        return {}

    @functools.cached_property
    def _handshake_futures(self) -> dict[str, Future[Any]]:  # type: ignore[override]
        return {}

    @functools.cached_property
    def _handshake_lock(self) -> threading.RLock:  # type: ignore[override,valid-type]
        return threading.RLock()

    @functools.cached_property
    def _handshake(self) -> threading.local:
        """Of each handshake thread: the agents it has ``loaded`` so far."""
        return threading.local()

    @functools.cached_property
    def _retry_executor(self) -> ThreadPoolExecutor:
        """Runs handshakes with engines that were released or failed lately.

        A new peer's handshake must not queue behind attempts at dead ones. More
        threads than stock's one are safe: metadata is loaded under the lock.
        """
        return ThreadPoolExecutor(4, thread_name_prefix="vllm-nixl-handshake-retry")

    @functools.cached_property
    def _kept_notifs(self) -> dict[str, list[bytes]]:
        """Notifications that the monitor drained, for the next step, by agent."""
        return {}

    @functools.cached_property
    def _peer_events(self) -> PeerEvents:
        """What the metrics count, until a step takes it along."""
        return PeerEvents()

    @functools.cached_property
    def _logged_notif_errors(self) -> set[str]:
        return set()

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
    ):
        """Build the stock worker and the table of its peers.

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
        self._peers = PeerTable(interval)
        self.xfer_stats = NixlPeerStats()
        if (
            current_platform.is_cuda()
            and "UCX" in self.nixl_backends
            and self.tp_rank == 0
        ):
            for problem in ucx_setting_problems(os.environ):
                logger.warning("NIXL peer release: %s", problem)

    # -- The step --------------------------------------------------------------

    # What every step runs names the stock class, and takes the lock by hand: a
    # `super()` call takes 0.12 us on Python 3.11, `with` on a lock as much, and five
    # of them half of what this adds to an empty step.

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start the reads of a step; each counts as its peer's heartbeat."""
        lock = self._nixl_lock
        self._step_waits = True
        lock.acquire()
        try:
            self._step_waits = False
            NixlPullConnectorWorker.start_load_kv(self, metadata)
            if metadata.reqs_to_send:
                # Decoders are about to connect: their heartbeats must not pile
                # up in NIXL's unbounded list while this engine idles.
                self._start_monitor()
        finally:
            lock.release()

    def get_transfer_results(self) -> "KVConnectorTransferResults":
        """Run the stock step, then the peer work that is due."""
        lock = self._nixl_lock
        self._step_waits = True
        lock.acquire()
        try:
            self._step_waits = False
            results = NixlPullConnectorWorker.get_transfer_results(self)
            peers = self._peers
            self._last_step = now = time.perf_counter()
            if peers.next_look <= now:
                self._send_due_heartbeats(now)
            if peers.lost:
                self._release_unreachable_remote_engines()
            if self._peer_events:
                self._report_peer_events()
            return results
        finally:
            lock.release()

    def _report_peer_events(self) -> None:
        # Workers built with object.__new__ have the stock stats, or none.
        stats = getattr(self, "xfer_stats", None)
        if isinstance(stats, NixlPeerStats):
            stats.record_peer_events(self._peer_events)
        self._peer_events.clear()

    def _send_due_heartbeats(self, now: float) -> None:
        self._sync_peers(now)
        sends = 0
        while sends < _MAX_SENDS_PER_STEP:
            engine_id = self._peers.take_due(now, self._engine_last_active)
            if engine_id is None:
                break
            sends += self._send_heartbeat(engine_id)

    def _sync_peers(self, now: float) -> None:
        # The callback of a handshake moves its engine from one to the other.
        with self._handshake_lock:
            self._peers.sync(self._remote_agents, now, self._handshake_futures)

    def _send_heartbeat(self, engine_id: str) -> int:
        """Send one heartbeat to each agent of a peer; return the number of sends."""
        agents = list(self._remote_agents.get(engine_id, {}).values())
        sends = failures = 0
        for agent_name in agents:
            sends += 1
            try:
                self.nixl_wrapper.send_notif(agent_name, notif_msg=_HEARTBEAT)
            except Exception as e:
                failures += 1
                self._note_error(engine_id, e, "heartbeat", agent_name)
                if engine_id in self._peers.lost:
                    break
        self._peer_events.count("peer_heartbeats_sent", sends - failures)
        self._peer_events.count("peer_heartbeats_failed", failures)
        return sends

    def _release_unreachable_remote_engines(self) -> None:
        """Release every lost peer from which no read is open.

        Never sooner, not even on a timer: releasing does not cancel a read, and
        its late data would land in blocks that belong to another request by then.
        """
        for engine_id in self._releasable_engines():
            self._cleanup_remote_engine(engine_id, log_eviction=False)

    def _releasable_engines(self) -> list[str]:
        lost = self._peers.lost
        busy = self._engines_with_inflight_transfers() if lost else set()
        releasable = []
        for engine_id, loss in list(lost.items()):
            if engine_id not in self._remote_agents:
                self._peers.forget(engine_id)
            elif engine_id in busy:
                if loss.held_since is None:
                    loss.held_since = time.perf_counter()
                    self._peer_events.count("peer_releases_held")
                    logger.warning(
                        "NIXL peer held by open reads: %s | Context: %s",
                        engine_id,
                        self._peer_context(engine_id, loss),
                    )
            elif engine_id not in self._handshake_futures:
                releasable.append(engine_id)
        return releasable

    # -- Evidence --------------------------------------------------------------

    def _note_error(
        self, engine_id: str, error: BaseException, source: str, agent_name: str | None
    ) -> None:
        """Judge an error that a NIXL call for a peer has raised."""
        now = time.perf_counter()
        if engine_id in self._remote_agents and engine_id not in self._peers:
            self._sync_peers(now)
        kind = type(error).__name__
        if is_disconnect(error):
            evidence = f"{kind} from {source}"
            self._lose(engine_id, Verdict.UNREACHABLE, evidence, now, agent_name)
        elif self._peers.is_first_error(engine_id, f"{kind} from {source}"):
            logger.warning(
                "NIXL peer error, not taken for a disconnect: %s | Context: %s",
                engine_id,
                {"evidence": f"{kind} from {source}: {error}", "agent": agent_name},
            )

    def _lose(
        self,
        engine_id: str,
        verdict: Verdict,
        evidence: str,
        now: float,
        agent_name: str | None = None,
    ) -> None:
        if self._peers.lose(engine_id, verdict, evidence, now):
            if verdict in (Verdict.UNREACHABLE, Verdict.SILENT):
                self._peer_events.count(f"peers_{verdict.value}")
            context = self._peer_context(engine_id, self._peers.lost[engine_id])
            if agent_name is not None:
                context["failed_agent"] = agent_name
            logger.warning(
                "NIXL peer %s: %s | Context: %s", verdict.value, engine_id, context
            )

    def _peer_context(self, engine_id: str, loss: Loss) -> dict[str, Any]:
        """Return the facts about a lost peer that its log lines share."""
        peer = self._peers.get(engine_id)
        return {
            "engine_id": self.engine_id,
            "remote_engine_id": engine_id,
            "remote_address": peer and peer.address_text,
            "remote_agents": list(self._remote_agents.get(engine_id, {}).values()),
            "evidence": loss.evidence,
            "since_proof_of_life_s": round(loss.quiet_for, 3),
        }

    def _engine_of_agent(self, agent_name: str) -> str | None:
        # A copy: the handshake thread adds to it under its own lock only.
        for engine_id, agents in list(self._remote_agents.items()):
            if agent_name in agents.values():
                return engine_id
        return None

    def _log_failure(
        self,
        failure_type: str,
        req_id: str | None,
        msg: str = "",
        error: BaseException | None = None,
        meta: "ReqMeta | None" = None,
        **extra_context: Any,
    ) -> None:
        """Log a failure as stock does, and judge its error.

        Every failed read, notification and handshake of the stock worker passes
        here. Handshakes are judged where they run (`_nixl_handshake`).
        """
        if isinstance(error, PeerQuarantinedError):
            # One line per request would bury the log while a router keeps
            # sending to a dead peer; the quarantine itself has been logged.
            logger.debug("Request %s refused: %s", req_id, error)
            # The scheduler sends a failed request again, without blocks, to have
            # its peer notified.
            if meta is not None and _reads_blocks(meta):
                self._peer_events.count("peer_requests_refused")
            return
        super()._log_failure(failure_type, req_id, msg, error, meta, **extra_context)
        if error is None or failure_type.startswith("handshake"):
            return
        agent_name = extra_context.get("remote_agent_name")
        engine_id = extra_context.get("dst_engine_id")
        if engine_id is None and req_id is not None:
            meta = meta or self._recving_metadata.get(req_id)
            engine_id = meta.remote.engine_id if meta and meta.remote else None
        if engine_id is None and agent_name is not None:
            engine_id = self._engine_of_agent(agent_name)
        if engine_id is not None:
            self._note_error(engine_id, error, failure_type, agent_name)

    @contextlib.contextmanager
    def _agent_with(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Replace methods of the NIXL agent for the time of one stock call."""
        agent = self.nixl_wrapper
        self.nixl_wrapper = _AgentOverlay(agent, methods)
        try:
            yield
        finally:
            self.nixl_wrapper = agent

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        """Send the lease heartbeats, and judge the errors that stock swallows."""
        if not metadata.heartbeat_by_engine:
            return
        agent = self.nixl_wrapper
        failures: list[tuple[str, Exception]] = []

        def send_notif(agent_name: str, *args: Any, **kwargs: Any) -> None:
            try:
                agent.send_notif(agent_name, *args, **kwargs)
            except Exception as e:
                failures.append((agent_name, e))
                raise

        with self._agent_with(send_notif=send_notif):
            super()._send_heartbeats(metadata)
        # It counts as the peer's heartbeat; vLLM stamps it from 0.32 on.
        now = time.perf_counter()
        for engine_id in (
            metadata.heartbeat_by_engine.keys() & self._remote_agents.keys()
        ):
            self._engine_last_active[engine_id] = now
        for agent_name, error in failures:
            sent_to = self._engine_of_agent(agent_name)
            if sent_to is not None:
                self._note_error(sent_to, error, "lease heartbeat", agent_name)

    def _pop_done_transfers(
        self, transfers: dict[str, list[int]]
    ) -> tuple[set[str], set[str]]:
        """Poll the open reads; one that finishes proves that its peer lives."""
        if not transfers:
            return set(), set()
        # A request without handles only notified its peer: that proves nothing.
        reading = [req_id for req_id, handles in transfers.items() if handles]
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in reading:
            if req_id not in done or req_id in failed or req_id in self._recv_failures:
                continue
            meta = self._recving_metadata.get(req_id)
            if meta is not None and meta.remote is not None:
                self._peers.heard(meta.remote.engine_id, time.perf_counter())
                self._peers.recovered(meta.remote.engine_id)
        return done, failed

    def _get_new_notifs(self) -> set[str]:
        """Handle new notifications, those that the monitor has kept first."""
        try:
            if self._kept_notifs:
                return self._get_kept_and_new_notifs()
            return NixlPullConnectorWorker._get_new_notifs(self)
        except Exception as e:
            self._tolerate_notif_error(e)
            return set()

    def _get_kept_and_new_notifs(self) -> set[str]:
        try:
            notifs = self.nixl_wrapper.get_new_notifs()
        except Exception as e:
            self._tolerate_notif_error(e)
            notifs = {}
        kept, self._kept_notifs = self._kept_notifs, {}
        for agent_name, late in notifs.items():
            kept.setdefault(agent_name, []).extend(late)
        with self._agent_with(get_new_notifs=lambda: kept):
            return super()._get_new_notifs()

    def _tolerate_notif_error(self, error: Exception) -> None:
        """Log a NIXL error once per kind: a peer's failure must not end a step."""
        if not is_nixl_error(error):
            raise error
        if (kind := type(error).__name__) not in self._logged_notif_errors:
            self._logged_notif_errors.add(kind)
            logger.error("NIXL could not report notifications", exc_info=error)

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        """Post a request's reads, unless its peer is about to be released."""
        assert meta.remote is not None
        engine_id = meta.remote.engine_id
        if self._is_registered_again(meta):
            evidence = "it has registered its KV cache again"
            self._lose(engine_id, Verdict.REPLACED, evidence, time.perf_counter())
        if engine_id in self._peers.lost and _reads_blocks(meta):
            # It would fail, or be stuck in a silent peer, and hold the release.
            self._failed_recv_reqs.put(req_id)
            return
        super()._read_blocks_for_req(req_id, meta)

    def _is_registered_again(self, meta: "ReqMeta") -> bool:
        """Return whether stock would release the peer under an open read.

        From 0.33 on a peer that wakes from sleep has a new registration, and the
        next request for it makes vLLM drop the old one at once.
        """
        assert meta.remote is not None
        generation = getattr(meta.remote, "registration_generation", 0)
        if not generation:
            return False
        engine_id = meta.remote.engine_id
        seen = getattr(self, "_remote_registration_generations", {})
        return (
            seen.get(engine_id, 0) < generation
            and engine_id in self._engines_with_inflight_transfers()
        )

    # -- Coming and going ------------------------------------------------------

    def _ensure_handshake(
        self, engine_id: str, host: str, port: int, *args: Any, **kwargs: Any
    ) -> Future[Any] | None:
        """Start a handshake as stock does, unless the engine is quarantined.

        Returns:
            None if the engine is connected, the future of a pending handshake,
            or a future that has failed with :class:`PeerQuarantinedError`.

        """
        with self._nixl_lock:
            if engine_id in self._remote_agents or not self._peers.has_history(
                engine_id
            ):
                return super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
            refusal = self._peers.refuse_handshake(
                engine_id, time.perf_counter(), engine_id in self._handshake_futures
            )
            if refusal is not None:
                refused: Future[Any] = Future()
                refused.set_exception(
                    PeerQuarantinedError(f"Remote engine {engine_id} is {refusal}")
                )
                return refused
            executor = self._handshake_initiation_executor
            self._handshake_initiation_executor = self._retry_executor
            try:
                return super()._ensure_handshake(engine_id, host, port, *args, **kwargs)
            finally:
                self._handshake_initiation_executor = executor

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Shake hands as stock does; runs in the handshake thread.

        A failed handshake leaves nothing loaded and quarantines the engine.
        """
        self._handshake.loaded = []
        try:
            if self._peers.has_history(expected_engine_id):
                _probe_listener(host, port)
            result = super()._nixl_handshake(
                host, port, remote_tp_size, expected_engine_id, *args, **kwargs
            )
        except Exception:
            with self._nixl_lock:
                now = time.perf_counter()
                quarantine = self._peers.handshake_failed(expected_engine_id, now)
                self._abandon_handshake(expected_engine_id)
            logger.warning(
                "NIXL peer quarantined: %s | Context: %s",
                expected_engine_id,
                {
                    "engine_id": self.engine_id,
                    "remote_engine_id": expected_engine_id,
                    "remote_address": f"{host}:{port}",
                    "refused_for_s": quarantine,
                },
            )
            raise
        with self._nixl_lock:
            now = time.perf_counter()
            agents = result[0]
            self._peers.connect(
                expected_engine_id, now, (host, port), next(iter(agents), (0, 0))
            )
            self._peer_events.set("connected_peers", len(self._peers))
            if self._peers.was_released(expected_engine_id):
                self._peer_events.count("peers_reconnected")
                logger.info(
                    "NIXL peer reconnected: %s | Context: %s",
                    expected_engine_id,
                    {
                        "engine_id": self.engine_id,
                        "remote_engine_id": expected_engine_id,
                        "remote_address": f"{host}:{port}",
                        "remote_agents": list(agents.values()),
                    },
                )
            self._start_monitor()
        return result

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        """Load a peer's metadata, alone inside NIXL."""
        return self._load_agent(super().add_remote_agent, *args, **kwargs)

    def _add_notif_only_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        return self._load_agent(super()._add_notif_only_remote_agent, *args, **kwargs)

    def _load_agent(self, load: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        with self._nixl_lock:
            agent = self.nixl_wrapper

            def add_remote_agent(*args: Any, **kwargs: Any) -> Any:
                name = agent.add_remote_agent(*args, **kwargs)
                self._handshake.loaded = [*self._agents_loaded_here(), name]
                return name

            with self._agent_with(add_remote_agent=add_remote_agent):
                return load(*args, **kwargs)

    def _agents_loaded_here(self) -> list[str]:
        """Return the agents that this thread's handshake has loaded so far."""
        return getattr(self._handshake, "loaded", [])

    def _abandon_handshake(self, engine_id: str) -> None:
        """Unload what a failed handshake has loaded.

        A peer that dies between two of its ranks is connected to neither: no
        heartbeat would ever reach it, and its rkeys would stay loaded for good.
        """
        if engine_id not in self._remote_agents:
            loaded = self._agents_loaded_here()
            with self._handshake_lock:
                # Under made-up ranks: the real ones are the stock handshake's.
                self._remote_agents[engine_id] = {
                    (0, i): name for i, name in enumerate(loaded)
                }
            self._cleanup_remote_engine(engine_id, log_eviction=False)

    def _cleanup_remote_engine(
        self, engine_id: str, *, log_eviction: bool = True
    ) -> None:
        """Forget a peer: the one way out, for stock's reasons and for ours.

        A NIXL call that raises does not keep the rest of the peer's state loaded.
        """
        with self._nixl_lock:
            if engine_id not in self._remote_agents:
                self._peers.forget(engine_id)
                return
            loss = self._peers.lost.get(engine_id)
            context = self._peer_context(engine_id, loss) if loss else {}
            agent = self.nixl_wrapper
            left_behind: list[str] = []

            def tolerant(name: str) -> Callable[[Any], None]:
                def call(target: Any) -> None:
                    try:
                        getattr(agent, name)(target)
                    except Exception as e:
                        left_behind.append(f"{name}({target}): {e!r}")

                return call

            start = time.perf_counter()
            num_dlists = len(self.dst_xfer_side_handles.get(engine_id, ()))
            with self._agent_with(
                release_dlist_handle=tolerant("release_dlist_handle"),
                remove_remote_agent=tolerant("remove_remote_agent"),
            ):
                super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)
            now = time.perf_counter()
            self._peers.forget(engine_id)
            self._peer_events.set("connected_peers", len(self._peers))
            if left_behind:
                logger.warning(
                    "NIXL could not free all of peer %s: %s", engine_id, left_behind
                )
            if loss is None:
                return
            self._peers.released(engine_id, now)
            self._peer_events.count("peers_released")
            self._peer_events.observe("peer_release_seconds", now - loss.found_at)
            held_since = loss.held_since
            context |= {
                "verdict": loss.verdict.value,
                "released_dlists": num_dlists,
                "release_ms": round((now - start) * 1e3, 3),
                "found_to_released_s": round(now - loss.found_at, 3),
                "held_by_reads_s": round(start - held_since, 3) if held_since else 0.0,
            }
            logger.info("NIXL peer released: %s | Context: %s", engine_id, context)

    # -- By hand -----------------------------------------------------------------

    def list_peers(self) -> list[dict[str, Any]]:
        """Return what is known about each connected peer, as plain values.

        Returns:
            One dict a peer: ``engine_id``, ``address`` ("host:port", None if its
            handshake was not seen), ``agents``, ``state`` ("connected", or the
            verdict on a peer that is to be released), ``since_proof_of_life_s``,
            ``open_reads`` and ``last_error`` (None if there was none).

        """
        with self._nixl_lock:
            now = time.perf_counter()
            self._sync_peers(now)
            open_reads = self._open_reads()
            return [
                {
                    "engine_id": peer.engine_id,
                    "address": peer.address_text,
                    "agents": [
                        name.decode() if isinstance(name, bytes) else name
                        for name in self._remote_agents.get(peer.engine_id, {}).values()
                    ],
                    "state": peer.loss.verdict.value if peer.loss else "connected",
                    "since_proof_of_life_s": round(now - peer.last_heard, 3),
                    "open_reads": open_reads[peer.engine_id],
                    "last_error": peer.last_error,
                }
                for peer in self._peers.peers()
            ]

    def retire_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> list[dict[str, Any]]:
        """Release the peers that the operator names, as if they were dead.

        A peer with open reads goes as soon as they end and takes no new ones until
        then. The next request for a released engine shakes hands again.

        Args:
            engine_id: Engine to release.
            address: Side channel of the engines to release, "host:port".

        Returns:
            One dict a peer that was connected: ``engine_id``, ``result``
            ("released" or "busy") and ``open_reads``.

        """
        with self._nixl_lock:
            now = time.perf_counter()
            self._sync_peers(now)
            named = [
                peer.engine_id
                for peer in self._peers.peers()
                if engine_id == peer.engine_id
                or (address and address == peer.address_text)
            ]
            for name in named:
                self._lose(name, Verdict.RETIRED, "released by the operator", now)
            self._release_unreachable_remote_engines()
            open_reads = self._open_reads()
            return [
                {
                    "engine_id": name,
                    "result": "busy" if name in self._peers else "released",
                    "open_reads": open_reads[name],
                }
                for name in named
            ]

    def _open_reads(self) -> collections.Counter[str]:
        """Return the number of requests with an open read, by engine."""
        return collections.Counter(
            meta.remote.engine_id
            for req_id in self._recving_transfers
            if (meta := self._recving_metadata.get(req_id)) is not None
            and meta.remote is not None
        )

    # -- Off the main thread ---------------------------------------------------

    def _start_monitor(self) -> None:
        if self._monitor is not None or self._is_shut_down:
            return
        # Idle work may start an interval after the last step and then has
        # another one for the heartbeat: a few ticks each keep that promise.
        monitor = PeerMonitor(self, period=min(self._peers.interval / 2, 1.0))
        try:
            monitor.start()
        except RuntimeError:
            # Out of threads: steps go on without it, the next occasion tries again.
            logger.exception("NIXL peer monitor could not be started")
        else:
            self._monitor = monitor

    def _monitor_tick(
        self, side_channel: SideChannel, stopping: threading.Event
    ) -> None:
        """While no step runs, do its peer work; then question quiet peers."""
        if time.perf_counter() - self._last_step >= self._peers.interval:
            self._do_idle_work(stopping)
        self._question_quiet_peers(side_channel)

    def _do_idle_work(self, stopping: threading.Event) -> None:
        """Do a step's peer work on the monitor's thread.

        Between two peers it gives the lock up, so that a step never waits for
        more than one peer's work.
        """
        if not self._device_is_set:
            # Unloading rkeys may unmap device memory; see `_nixl_handshake`.
            if not self.use_host_buffer:
                current_platform.set_device(self.device_id)  # type: ignore[arg-type]
            self._device_is_set = True
        drained = False
        while not stopping.is_set() and not self._step_waits:
            with self._nixl_lock:
                if self._step_waits or stopping.is_set():
                    return
                if not drained:
                    self._keep_notifs()
                    self._sync_peers(time.perf_counter())
                    drained = True
                elif not self._do_idle_job():
                    return

    def _do_idle_job(self) -> bool:
        """Do one peer's due work; return whether there was any."""
        engine_id = self._peers.take_due(time.perf_counter(), self._engine_last_active)
        if engine_id is not None:
            self._send_heartbeat(engine_id)
            return True
        for engine_id in self._releasable_engines():
            self._cleanup_remote_engine(engine_id, log_eviction=False)
            return True
        return False

    def _keep_notifs(self) -> None:
        """Drain NIXL's notifications; handle heartbeats, keep the rest."""
        try:
            fresh = self.nixl_wrapper.get_new_notifs()
        except Exception as e:
            self._tolerate_notif_error(e)
            return
        for agent_name, notifs in fresh.items():
            for notif in notifs:
                if notif.startswith(_HEARTBEAT):
                    self._handle_heartbeat(
                        notif[len(_HEARTBEAT) :].decode("utf-8", "replace")
                    )
                else:
                    self._kept_notifs.setdefault(agent_name, []).append(notif)

    def _question_quiet_peers(self, side_channel: SideChannel) -> None:
        """Ask peers from which nothing was heard; judge those that say nothing.

        Only the bookkeeping takes the lock. ZMQ does the waiting.
        """
        now = time.perf_counter()
        for answer in side_channel.answers(now):
            engine_id = answer.asked_engine_id
            with self._nixl_lock:
                peer = self._peers.get(engine_id)
                if peer is None or answer.asked_at < peer.connected_at:
                    continue  # about a connection that is gone
                if answer.engine_id == engine_id:
                    self._peers.heard(engine_id, now)
                elif answer.engine_id is not None:
                    evidence = f"engine {answer.engine_id} answers at its address"
                    self._lose(engine_id, Verdict.REPLACED, evidence, now)
                elif self._peers.unanswered(engine_id, answer.asked_at, now):
                    evidence = "no answer on its side channel"
                    self._lose(engine_id, Verdict.SILENT, evidence, now)
        for peer in self._peers.take_quiet(now, self._engine_last_active):
            assert peer.address is not None
            if side_channel.ask(peer.engine_id, peer.address, peer.ask_rank, now):
                with self._nixl_lock:
                    self._peers.asked(peer.engine_id, now)

    # -- Life cycle ------------------------------------------------------------

    # Sleep mode: vLLM has and calls these two from 0.33 on.

    def unregister_kv_caches(self) -> None:
        """Unregister the KV cache (sleep mode), alone inside NIXL.

        Raises:
            RuntimeError: If a read is open: its peer's state must not go under it.

        """
        with self._nixl_lock:
            if busy := self._engines_with_inflight_transfers():
                raise RuntimeError(
                    f"Reads from {sorted(busy)} are open: the KV cache cannot be "
                    "unregistered before they have ended."
                )
            super().unregister_kv_caches()  # type: ignore[misc]

    def restore_kv_caches(self) -> None:
        """Register the KV cache again (sleep mode), alone inside NIXL."""
        with self._nixl_lock:
            super().restore_kv_caches()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop the monitor, then shut down as stock does."""
        # A handshake that is still running must not start another one.
        self._is_shut_down = True
        if (executor := vars(self).get("_retry_executor")) is not None:
            executor.shutdown(wait=False)
        if self._monitor is not None and not self._monitor.stop():
            logger.warning("NIXL peer monitor is still inside a NIXL call")
        if not self._nixl_lock.acquire(timeout=_SHUTDOWN_LOCK_TIMEOUT_S):
            # A second thread inside NIXL could crash the process; what this one
            # holds goes with the process.
            logger.error("NIXL is busy in another thread; not shut down")
            return
        try:
            super().shutdown()
        finally:
            self._nixl_lock.release()

    def __del__(self) -> None:
        # Stock's needs a module global, which is gone when the interpreter exits.
        try:  # noqa: SIM105
            self.shutdown()
        except Exception:
            pass


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
    """vLLM's NIXL pull connector, with a worker that lets go of dead peers."""

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
            RuntimeError: If the installed vLLM cannot be extended.

        """
        # Not the stock pull connector's constructor: it builds a worker of its
        # own, and with ours there would be two NIXL agents.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if (reason := unfit_reason()) is not None:
            raise RuntimeError(f"{__name__} does not fit this vLLM: {reason}")
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

__all__ = [
    "NixlAgentMetadata",
    "NixlBaseConnector",
    "NixlBaseConnectorScheduler",
    "NixlBaseConnectorWorker",
    "NixlConnector",
    "NixlConnectorMetadata",
    "NixlConnectorScheduler",
    "NixlConnectorWorker",
    "NixlHandshakePayload",
    "NixlKVConnectorStats",
    "NixlPullConnector",
    "NixlPullConnectorScheduler",
    "NixlPullConnectorWorker",
    "NixlPushConnector",
    "NixlPushConnectorScheduler",
    "NixlPushConnectorWorker",
]
