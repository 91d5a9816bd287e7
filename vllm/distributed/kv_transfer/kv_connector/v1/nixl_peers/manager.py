# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The life cycle of a NIXL peer, from its handshake to its release.

The one place where errors are judged, where a peer is forgotten, and where all of it
is logged and counted. Knows nothing of vLLM's worker.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from vllm.logger import init_logger

from .agent import OpenTransfers
from .handshake import address_of
from .policy import (
    SUSPECT_AFTER_S,
    Peer,
    PeerTable,
    Release,
    Verdict,
    is_disconnect,
)
from .quarantine import Quarantine

logger = init_logger(__name__)

# A send takes about 5 us, so 32 (a TP-32 peer's worth) are negligible in a step. One
# that fails, and a release, take up to milliseconds: a round waits for one of each.
MAX_SENDS_PER_ROUND = 32
# Suspects are looked for this often: a look costs as much as there are transfers
# older than a minute.
_SUSPECT_SCAN_S = 1.0
_MAX_LOGGED = 200


class HeartbeatSender(Protocol):
    """Sends heartbeats; the NIXL agent's proxy."""

    def send_heartbeat(self, agent: str) -> None:
        """Send one heartbeat, or raise what NIXL raises."""


class PeerStats(Protocol):
    """Counts what happens."""

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""

    def observe_release(self, seconds: float) -> None:
        """Add to the histogram of release times."""

    def set_gauges(self, values: Mapping[str, int]) -> None:
        """Set gauges."""


class PeerManager:
    """What is known about the peers of one worker, and what follows from it.

    ``lock`` guards it all, and the worker's own state against the monitor. A step
    holds it, so whoever else takes it does a bounded piece of work under it.
    """

    def __init__(
        self,
        interval: float,
        engine_id: str,
        transfers: OpenTransfers,
        stats: PeerStats,
        clock: Callable[[], float],
    ):
        """Create a manager without peers.

        Args:
            interval: Heartbeat interval in seconds, > 0.
            engine_id: Id of the engine itself, which is never a peer.
            transfers: The transfer handles that are open.
            stats: Where to count.
            clock: Returns the current time in seconds.

        """
        self.lock = threading.RLock()
        self.clock = clock
        self._engine_id = engine_id
        self._table = PeerTable(interval)
        self._quarantine = Quarantine()
        self._transfers = transfers
        self._stats = stats
        self._next_scan = 0.0
        self.next_round_at = -math.inf
        """When a round would do anything; a step compares, however many peers."""
        self.must_report_gauges = False
        """Whether :meth:`report_gauges` has something new to say."""

    @property
    def interval(self) -> float:
        """Heartbeat interval in seconds."""
        return self._table.interval

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._table

    # -- The round -------------------------------------------------------------

    def plan_next_round(self) -> None:
        """Set the time of the next round: when something comes due, or at once."""
        table = self._table
        if table.releases:
            self.next_round_at = -math.inf
        else:
            self.next_round_at = min(table.next_due, self._next_scan)

    def send_due_heartbeats(self, agent: HeartbeatSender, now: float) -> bool:
        """Send due heartbeats, up to a failure or a bound; return if some are left.

        A failure is judged where it is raised, in :meth:`failed`.
        """
        sends = failures = 0
        while sends < MAX_SENDS_PER_ROUND and not failures:
            peer = self._table.take_due(now)
            if peer is None:
                break
            for name in peer.agents:
                sends += 1
                try:
                    agent.send_heartbeat(name)
                except Exception:
                    failures += 1
                    if peer.release is not None:
                        break
        self._stats.count("peer_heartbeats_sent", sends - failures)
        self._stats.count("peer_heartbeats_failed", failures)
        return self._table.next_due <= now

    def update_suspects(self, now: float) -> None:
        """Find peers of which a transfer is stuck, once a second."""
        if now < self._next_scan:
            return
        self._next_scan = now + _SUSPECT_SCAN_S
        posted = self._transfers.posted_before(now - SUSPECT_AFTER_S)
        found, cleared = self._table.update_suspects(posted, now)
        for peer in found:
            self.must_report_gauges = True
            self._stats.count("peers_suspected")
            logger.warning(
                "NIXL peer suspect: %s | Context: %s",
                peer.engine_id,
                self._context(peer)
                | {"evidence": f"a transfer in flight for {SUSPECT_AFTER_S:.0f} s"},
            )
        for peer in cleared:
            self._log_cleared(peer)

    def find_releasable(
        self, busy: Collection[str], handshaking: Collection[str]
    ) -> str | None:
        """Return an engine to release now, or None.

        Never one with a transfer in flight, not even on a timer: releasing does not
        cancel a transfer, and its late data would land in blocks that belong to
        another request by then.

        Args:
            busy: Engines that vLLM itself has unfinished transfers with.
            handshaking: Engines that a handshake is running with.

        """
        releasable: str | None = None
        in_flight = self._transfers.count()
        for peer in list(self._table.releases.values()):
            release = peer.release
            if release is None or peer.engine_id in handshaking:
                continue
            if peer.engine_id in busy or self._count(peer, in_flight):
                if release.deferred_since is None:
                    release.deferred_since = self.clock()
                    self.must_report_gauges = True
                    self._stats.count("peer_releases_deferred")
                    logger.warning(
                        "NIXL peer release deferred by in-flight reads: %s "
                        "| Context: %s",
                        peer.engine_id,
                        self._release_context(peer, release),
                    )
            elif releasable is None:
                releasable = peer.engine_id
        return releasable

    # -- Coming and going --------------------------------------------------------

    def connected(self, engine_id: str, agents: Iterable[str], address: str) -> None:
        """Record that a handshake has loaded a peer."""
        with self.lock:
            self._table.connect(engine_id, agents, address, self.clock())
            self.next_round_at = -math.inf
            self.must_report_gauges = True
            peer = self._table.get(engine_id)
            if peer is not None and self._quarantine.was_released(engine_id):
                self._stats.count("peers_reconnected")
                logger.info(
                    "NIXL peer reconnected: %s | Context: %s",
                    engine_id,
                    self._context(peer),
                )

    @contextlib.contextmanager
    def releasing(self, engine_id: str, num_dlists: int) -> Iterator[None]:
        """Account for the release of a peer's state, which the caller does inside.

        This is the one place where a peer is forgotten. Its record in the quarantine
        stays.
        """
        start = self.clock()
        try:
            yield
        finally:
            now = self.clock()
            peer = self._table.forget(engine_id)
            self.must_report_gauges = True
        if peer is None or (release := peer.release) is None:
            return
        failed = release.verdict is Verdict.UNREACHABLE
        self._quarantine.released(engine_id, peer.address, now, failed=failed)
        self._stats.count("peers_released")
        self._stats.observe_release(now - release.found_at)
        deferred = start - release.deferred_since if release.deferred_since else 0.0
        logger.info(
            "NIXL peer released: %s | Context: %s",
            engine_id,
            self._release_context(peer, release)
            | {
                "verdict": release.verdict.value,
                "released_dlists": num_dlists,
                "release_ms": round((now - start) * 1e3, 3),
                "found_to_released_s": round(now - release.found_at, 3),
                "deferred_s": round(deferred, 3),
            },
        )

    def engines_in_flight(self) -> set[str]:
        """Return the peers to which a transfer handle is open."""
        owners = map(self._table.of_agent, self._transfers.count())
        return {peer.engine_id for peer in owners if peer is not None}

    # -- Handshakes --------------------------------------------------------------

    def handshake_refusal(
        self, engine_id: str, address: str, *, running: bool
    ) -> str | None:
        """Return why no handshake may be waited for now, or None."""
        if engine_id == self._engine_id:
            logger.warning_once(
                "Refused a request that names this engine, %s, as its NIXL peer: the "
                "router chose one instance for both phases, or two instances share one "
                "engine_id.",
                engine_id,
            )
            return "this engine itself"
        return self._quarantine.refusal(
            engine_id, address, self.clock(), running=running
        )

    def needs_check(self, engine_id: str, address: str) -> bool:
        """Return whether a peer was released or failed lately, so may be dead."""
        with self.lock:
            return self._quarantine.has_record(engine_id, address)

    def handshake_answered(self, engine_id: str) -> None:
        """Record that the peer has answered, so that requests may join."""
        with self.lock:
            self._quarantine.answered(engine_id)

    def handshake_failed(self, engine_id: str, address: str, error: Exception) -> None:
        """Quarantine an engine that does not answer at an address."""
        with self.lock:
            seconds = self._quarantine.handshake_failed(
                engine_id, address, self.clock()
            )
        # Nobody has vouched for this id: it is whatever a request says.
        claimed = engine_id[:_MAX_LOGGED]
        logger.warning(
            "NIXL peer quarantined: %s | Context: %s",
            claimed,
            {
                "engine_id": self._engine_id,
                "remote_engine_id": claimed,
                "remote_address": address,
                "evidence": _evidence(error),
                "refused_for_s": seconds,
            },
        )

    def transfer_refusal(self, engine_id: str) -> str | None:
        """Return why no new transfer with a connected peer may start, or None."""
        peer = self._table.get(engine_id)
        if peer is None or peer.state == "connected":
            return None
        return peer.state

    def count_refused(self) -> None:
        """Count a request that failed at once."""
        with self.lock:  # push mode's writer counts as well
            self._stats.count("peer_requests_refused")

    # -- Evidence: the agent's proxy tells -----------------------------------------

    def sent(self, agent: str) -> None:
        """Count a notification or a posted transfer as the peer's heartbeat."""
        with self.lock:
            if (peer := self._table.of_agent(agent)) is not None:
                peer.last_active = self.clock()

    def finished(self, agent: str) -> None:
        """Take a finished transfer as a proof of life."""
        with self.lock:
            peer = self._table.of_agent(agent)
            if peer is None:
                return
            suspect, unreachable = self._table.mark_alive(peer, self.clock())
            self._quarantine.recovered(peer.engine_id, peer.address)
            if suspect:
                self._log_cleared(peer)
            if unreachable:
                self.next_round_at = -math.inf
                logger.info(
                    "NIXL peer reachable again, a transfer has finished: %s "
                    "| Context: %s",
                    peer.engine_id,
                    self._context(peer),
                )

    def failed(self, agent: str, call: str, error: Exception) -> None:
        """Judge an error that a NIXL call for a peer has raised."""
        kind = f"{type(error).__name__} from {call}"
        with self.lock:
            peer = self._table.of_agent(agent)
            if peer is None:
                return
            if is_disconnect(error):
                self._mark(peer, Verdict.UNREACHABLE, kind, agent)
            elif self._table.record_error(peer, kind):
                logger.warning(
                    "NIXL peer error, not treated as a disconnect: %s | Context: %s",
                    peer.engine_id,
                    self._context(peer)
                    | {
                        "evidence": f"{kind}: {error}"[:_MAX_LOGGED],
                        "failed_agent": _name(agent),
                    },
                )

    def mark_replaced(self, engine_id: str, evidence: str) -> None:
        """Have a peer released that vLLM itself wants gone, once it may go."""
        if (peer := self._table.get(engine_id)) is not None:
            self._mark(peer, Verdict.REPLACED, evidence)

    def _mark(
        self, peer: Peer, verdict: Verdict, evidence: str, agent: str | None = None
    ) -> None:
        if not self._table.mark_for_release(
            peer.engine_id, verdict, evidence, self.clock()
        ):
            return
        assert peer.release is not None
        self.next_round_at = -math.inf
        context = self._release_context(peer, peer.release)
        if verdict is Verdict.UNREACHABLE:
            self._stats.count("peers_unreachable")
            logger.warning(
                "NIXL peer unreachable: %s | Context: %s",
                peer.engine_id,
                context | {"failed_agent": agent and _name(agent)},
            )
        else:
            logger.info(
                "NIXL peer release requested: %s | Context: %s",
                peer.engine_id,
                context,
            )

    # -- For operators -------------------------------------------------------------

    def request_release(
        self, engine_id: str | None = None, address: str | None = None
    ) -> list[str]:
        """Have the peers released that an operator names; return their engine ids."""
        if address is not None:
            # An IPv6 address with or without brackets.
            host, _, port = address.rpartition(":")
            address = address_of(host, port)
        named = [
            peer
            for peer in self._table.peers()
            if engine_id == peer.engine_id or address == peer.address
        ]
        for peer in named:
            self._mark(peer, Verdict.REQUESTED, "the operator has asked for it")
        return [peer.engine_id for peer in named]

    def list_peers(self) -> list[dict[str, Any]]:
        """Return what is known about each connected peer, as plain values."""
        now = self.clock()
        in_flight = self._transfers.count()
        return [
            {
                "engine_id": peer.engine_id,
                "address": peer.address,
                "agents": [_name(agent) for agent in peer.agents],
                "state": peer.state,
                "since_proof_of_life_s": round(now - peer.last_proof_of_life, 3),
                "in_flight_reads": self._count(peer, in_flight),
                "last_error": peer.last_error,
            }
            for peer in self._table.peers()
        ]

    def report_gauges(self) -> None:
        """Set the gauges to what is now.

        Ranks are pooled by their maximum: one with a suspect or a deferred release
        reports it in every step, so that another one's zero does not hide it.
        """
        table = self._table
        # By what is in flight now: a suspicion is scanned for once a second, and a
        # bounded round leaves releases over, but an engine that idles from here on
        # keeps showing what is set here.
        in_flight = self._transfers.count()
        suspect = sum(
            self._count(peer, in_flight) > 0 for peer in table.suspects.values()
        )
        deferred = sum(
            peer.release is not None
            and peer.release.deferred_since is not None
            and self._count(peer, in_flight) > 0
            for peer in table.releases.values()
        )
        self.must_report_gauges = bool(suspect or deferred)
        self._stats.set_gauges(
            {
                "connected_peers": len(table),
                "suspect_peers": suspect,
                "deferred_peer_releases": deferred,
            }
        )

    # -- Log lines -----------------------------------------------------------------

    @staticmethod
    def _count(peer: Peer, in_flight: Counter[str]) -> int:
        return sum(in_flight[agent] for agent in peer.agents)

    def _context(self, peer: Peer) -> dict[str, Any]:
        return {
            "engine_id": self._engine_id,
            "remote_engine_id": peer.engine_id,
            "remote_address": peer.address,
            "remote_agents": [_name(agent) for agent in peer.agents],
        }

    def _release_context(self, peer: Peer, release: Release) -> dict[str, Any]:
        return self._context(peer) | {
            "evidence": release.evidence,
            "since_proof_of_life_s": round(release.proof_of_life_age, 3),
        }

    def _log_cleared(self, peer: Peer) -> None:
        logger.info(
            "NIXL peer no longer suspect: %s | Context: %s",
            peer.engine_id,
            self._context(peer),
        )


def _evidence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_LOGGED]


def _name(agent: str | bytes) -> str:
    # NIXL returns the names of agents as bytes.
    return agent.decode(errors="replace") if isinstance(agent, bytes) else agent
