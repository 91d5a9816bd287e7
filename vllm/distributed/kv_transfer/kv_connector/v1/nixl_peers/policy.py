# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When a NIXL peer gets a heartbeat, and what an error or a stuck transfer means.

Plain Python over plain values: no vLLM, torch or NIXL import, no clock, no thread.
Every time is in seconds on the caller's one monotonic clock.
"""

import enum
import heapq
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

HEARTBEAT_INTERVAL_KEY = "peer_heartbeat_interval"
DEFAULT_HEARTBEAT_INTERVAL_S = 2.0
# Below this the monitor would do little else than wake up.
MIN_HEARTBEAT_INTERVAL_S = 0.01
# A year: longer ones, up to integers that no float holds, mean "practically never".
_MAX_HEARTBEAT_INTERVAL_S = 365 * 86400.0

# A peer without traffic for t seconds is sent a heartbeat every t / 10 seconds,
# never more often than the configured interval, never less than every 30 s.
IDLE_FRACTION = 10
MAX_IDLE_INTERVAL_S = 30.0
# Peers that became active together come due over this part of an interval.
JITTER = 0.1

# A transfer that is in flight for this long, while nothing else from its peer
# finishes, makes the peer suspect. An outage that heals within a minute loses nothing.
SUSPECT_AFTER_S = 60.0

# Error classes are compared by name, so that no NIXL package has to be imported:
# they live in nixl_cu12, nixl_cu13 or nixl_rocm, depending on the installation.
_DISCONNECT_ERRORS = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError"})


def parse_heartbeat_interval(value: object) -> float:
    """Check the value of ``peer_heartbeat_interval``.

    Args:
        value: The value from ``kv_connector_extra_config``, in seconds.

    Returns:
        The interval in seconds; 0.0 turns the feature off.

    Raises:
        ValueError: If the value is neither 0 nor a finite number of at least
            ``MIN_HEARTBEAT_INTERVAL_S``.

    """
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)  # an int to Python, but `true` is no duration
        or not (value == 0 or MIN_HEARTBEAT_INTERVAL_S <= value < math.inf)
    ):
        raise ValueError(
            f"kv_connector_extra_config['{HEARTBEAT_INTERVAL_KEY}'] is {value!r}, but "
            "must be a finite number of seconds: 0 turns the peer heartbeat off, else "
            f"at least {MIN_HEARTBEAT_INTERVAL_S} (the default is "
            f"{DEFAULT_HEARTBEAT_INTERVAL_S})."
        )
    return float(min(value, _MAX_HEARTBEAT_INTERVAL_S))


def is_nixl_error(error: BaseException) -> bool:
    """Return whether ``error`` is one of NIXL's own exception classes."""
    return any(c.__name__.startswith("nixl") for c in type(error).__mro__)


def is_disconnect(error: BaseException) -> bool:
    """Return whether ``error`` proves that the connection to a peer is gone.

    Only two classes do: ``nixlRemoteDisconnectError`` (UCX reported a reset, closed or
    timed-out endpoint) and ``nixlNotFoundError`` (NIXL has dropped the metadata of an
    agent that is still held here). UCX maps every other failure to
    ``nixlBackendError``, and an unknown status to a plain ``RuntimeError``: neither
    says that the peer is gone.
    """
    return any(c.__name__ in _DISCONNECT_ERRORS for c in type(error).__mro__)


class Verdict(enum.Enum):
    """Why a peer's state is to be released."""

    UNREACHABLE = "unreachable"
    """A NIXL call for the peer raised a typed disconnect."""
    REPLACED = "replaced"
    """vLLM itself wants the loaded state gone, and a transfer is in flight."""
    REQUESTED = "requested"
    """The operator has asked for it."""


@dataclass(slots=True)
class Release:
    """A release that is due as soon as nothing is in flight."""

    verdict: Verdict
    evidence: str
    """What was seen, for the log."""
    found_at: float
    proof_of_life_age: float
    """Seconds since the last proof of life, when found."""
    deferred_since: float | None = None
    """When a transfer in flight first deferred the release."""


@dataclass(slots=True)
class Peer:
    """One remote engine with loaded state."""

    engine_id: str
    agents: tuple[str, ...]
    address: str
    """Where its side channel was reached, as "host:port"."""
    connected_at: float
    last_active: float
    """When something other than a heartbeat was last sent to it, or a read posted."""
    last_proof_of_life: float
    """Last proof of life: a finished transfer or the handshake, never a send."""
    due: float
    """When the schedule looks at this peer next."""
    offset: float
    """Its fixed jitter, in seconds."""
    last_slot: float = -math.inf
    """The due time that the last heartbeat was sent for."""
    suspect_since: float | None = None
    release: Release | None = None
    last_error: str | None = None
    logged_errors: set[str] = field(default_factory=set)
    """Names of untyped errors already logged for this peer."""

    @property
    def state(self) -> str:
        """One word for operators."""
        if self.release is not None:
            unreachable = self.release.verdict is Verdict.UNREACHABLE
            return "unreachable" if unreachable else "releasing"
        return "connected" if self.suspect_since is None else "suspect"


class PeerTable:
    """The connected peers, their heartbeat schedule and the verdicts on them.

    Not thread-safe: the manager's lock guards it. Asking whether a heartbeat is due
    is one comparison with :attr:`next_due`, however many peers there are.
    """

    def __init__(self, interval: float):
        """Create an empty table.

        Args:
            interval: Heartbeat interval in seconds, > 0.

        """
        self.interval = interval
        self.next_due = math.inf
        """When to call :meth:`take_due` next."""
        self.releases: dict[str, Peer] = {}
        """Peers to release, by engine id."""
        self.suspects: dict[str, Peer] = {}
        self._peers: dict[str, Peer] = {}
        self._by_agent: dict[str, Peer] = {}
        self._schedule: list[tuple[float, str]] = []

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, engine_id: str) -> Peer | None:
        """Return what is known about a connected peer."""
        return self._peers.get(engine_id)

    def of_agent(self, agent: str) -> Peer | None:
        """Return the peer that an agent belongs to."""
        return self._by_agent.get(agent)

    def peers(self) -> list[Peer]:
        """Return a snapshot of the connected peers."""
        return list(self._peers.values())

    # -- Coming and going --------------------------------------------------

    def connect(
        self, engine_id: str, agents: Iterable[str], address: str, now: float
    ) -> None:
        """Add a peer whose state has just been loaded.

        The handshake counts as the first heartbeat and as a proof of life.
        """
        self.forget(engine_id)
        offset = zlib.crc32(engine_id.encode()) / 2**32 * JITTER * self.interval
        due = now + self.interval + offset
        peer = Peer(engine_id, tuple(agents), address, now, now, now, due, offset)
        self._peers[engine_id] = peer
        self._by_agent |= dict.fromkeys(peer.agents, peer)
        self._reschedule(peer, due)

    def forget(self, engine_id: str) -> Peer | None:
        """Drop everything about a peer; return what was known."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self.releases.pop(engine_id, None)
            self.suspects.pop(engine_id, None)
            for agent in peer.agents:
                if self._by_agent.get(agent) is peer:
                    del self._by_agent[agent]
        return peer

    # -- Heartbeats ----------------------------------------------------------

    def take_due(self, now: float) -> Peer | None:
        """Return one peer to send a heartbeat to now, and plan its next one.

        Anything else sent to a peer counts as its heartbeat, so a peer in use comes
        due an interval after its last activity. Between heartbeats a peer keeps its
        own schedule: a late step delays one heartbeat and does not shift the rest. A
        peer that is to be released gets none (NIXL prints a line per failure).
        """
        while self._schedule and self._schedule[0][0] <= now:
            due, engine_id = heapq.heappop(self._schedule)
            peer = self._peers.get(engine_id)
            if peer is None or peer.due != due or peer.release is not None:
                continue
            interval = self.interval_after(now - peer.last_active)
            earliest = max(
                peer.last_active + interval + peer.offset, peer.last_slot + interval
            )
            if earliest > now:
                # Looked at again within an interval even if the heartbeat is
                # further off: a read in between makes it due sooner.
                self._reschedule(peer, min(earliest, now + self.interval))
                continue
            peer.last_slot = due
            # Skip slots that have passed, or are less than half an interval off.
            missed = math.floor((now - due) / self.interval + 0.5)
            self._reschedule(peer, due + (missed + 1) * self.interval)
            return peer
        self._refresh_next_due()
        return None

    def interval_after(self, idle: float) -> float:
        """Return the heartbeat interval to a peer without traffic for ``idle``."""
        return max(self.interval, min(idle / IDLE_FRACTION, MAX_IDLE_INTERVAL_S))

    def _reschedule(self, peer: Peer, due: float) -> None:
        peer.due = due
        heapq.heappush(self._schedule, (due, peer.engine_id))
        self._refresh_next_due()

    def _refresh_next_due(self) -> None:
        self.next_due = self._schedule[0][0] if self._schedule else math.inf

    # -- Evidence ------------------------------------------------------------

    def mark_for_release(
        self, engine_id: str, verdict: Verdict, evidence: str, now: float
    ) -> bool:
        """Record that a peer is to be released; return whether that is news."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        if peer.release is not None:
            if verdict is not Verdict.UNREACHABLE:
                # Whoever asks for the release of an unreachable peer means it,
                # whatever finishes until then.
                peer.release.verdict = verdict
            return False
        if verdict is Verdict.UNREACHABLE:
            peer.last_error = evidence
        peer.release = Release(verdict, evidence, now, now - peer.last_proof_of_life)
        self.releases[engine_id] = peer
        # It is no suspect any more, which is not to say that it is well again.
        self.suspects.pop(engine_id, None)
        peer.suspect_since = None
        return True

    def mark_alive(self, peer: Peer, now: float) -> tuple[bool, bool]:
        """Record that a transfer with a peer has finished.

        It takes back a suspicion, and a disconnect that was found before: another
        endpoint may have failed for a moment. A heartbeat decides again an interval
        later, since over cuda_ipc a mapping, and so a read, outlives its process.

        Returns:
            Whether the peer was suspect, and whether it was unreachable.

        """
        peer.last_proof_of_life = now
        suspect = self.suspects.pop(peer.engine_id, None) is not None
        peer.suspect_since = None
        release = peer.release
        if release is None or release.verdict is not Verdict.UNREACHABLE:
            return suspect, False
        peer.release = None
        del self.releases[peer.engine_id]
        self._reschedule(peer, now + self.interval)
        return suspect, True

    def update_suspects(
        self, posted: Iterable[tuple[str, float]], now: float
    ) -> tuple[list[Peer], list[Peer]]:
        """Find the peers of which a transfer is stuck.

        Args:
            posted: Agent and time of posting of every transfer in flight.
            now: Current time.

        Returns:
            The peers that have become suspect, and those that no longer are.

        """
        stuck: dict[str, Peer] = {}
        for agent, posted_at in posted:
            peer = self._by_agent.get(agent)
            if (
                peer is not None
                and peer.release is None
                and now - posted_at >= SUSPECT_AFTER_S
                and peer.last_proof_of_life <= posted_at
            ):
                stuck[peer.engine_id] = peer
        found = [peer for peer in stuck.values() if peer.suspect_since is None]
        cleared = [p for p in self.suspects.values() if p.engine_id not in stuck]
        for peer in found:
            peer.suspect_since = now
        for peer in cleared:
            peer.suspect_since = None
        self.suspects = stuck
        return found, cleared

    def record_error(self, peer: Peer, kind: str) -> bool:
        """Record an untyped error; return whether its kind is new for this peer."""
        peer.last_error = kind
        if kind in peer.logged_errors:
            return False
        peer.logged_errors.add(kind)
        return True
