# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What to do about NIXL peers: when to send, what an error means, when to let go.

Plain Python over plain values: no vLLM, torch or NIXL import, no clock, no
thread. The worker gathers facts, asks here, and acts. Every time is in seconds
on the caller's one monotonic clock.
"""

import enum
import heapq
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

HEARTBEAT_INTERVAL_KEY = "peer_heartbeat_interval"
DEFAULT_HEARTBEAT_INTERVAL_S = 2.0
# Below this the monitor would do little else than wake up.
MIN_HEARTBEAT_INTERVAL_S = 0.01
# A year: longer ones, up to integers that no float holds, mean "practically never".
_MAX_HEARTBEAT_INTERVAL_S = 365 * 86400.0

# A peer without traffic for t seconds is sent a heartbeat every t / 10 seconds,
# never more often than the configured interval, never less than every 30 s.
_IDLE_FRACTION = 10
_MAX_IDLE_INTERVAL_S = 30.0
# Peers that became active together come due over this part of an interval.
_SPREAD = 0.1

# A silent peer has left this many questions unanswered, over this long.
_MIN_UNANSWERED = 3
_MIN_SILENCE_S = 30.0
# Heartbeat intervals between two questions, and bounds in seconds. At the default
# interval three questions take just that long; each costs as much as ten heartbeats.
_INTERVALS_PER_QUESTION = 7.5
_MIN_QUESTION_INTERVAL_S = 5.0
_MAX_QUESTION_INTERVAL_S = 30.0
# Looks for quiet peers per question interval: each look is at every peer.
_LOOKS_PER_QUESTION = 10

_MIN_QUARANTINE_S = 1.0
_MAX_QUARANTINE_S = 60.0
# A trial that succeeds does so in milliseconds. Requests that come later than this
# after its start do not wait for its time-out.
_TRIAL_JOIN_S = 0.5
_MAX_DOUBLINGS = math.ceil(math.log2(_MAX_QUARANTINE_S / _MIN_QUARANTINE_S))
# Engine ids of dead instances never come back: their records must not pile up.
_FORGET_QUARANTINE_S = 600.0

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


class Verdict(enum.Enum):
    """Why a peer's state is to be released."""

    UNREACHABLE = "unreachable"
    """A NIXL call for the peer raised a typed disconnect."""
    SILENT = "silent"
    """The peer left several questions unanswered."""
    REPLACED = "replaced"
    """Another engine answers at the peer's address."""
    RETIRED = "retired"
    """The operator has asked for its release."""


def is_nixl_error(error: BaseException) -> bool:
    """Return whether ``error`` is one of NIXL's own exception classes."""
    return any(c.__name__.startswith("nixl") for c in type(error).__mro__)


def is_disconnect(error: BaseException) -> bool:
    """Return whether ``error`` proves that the connection to a peer is gone.

    Only two classes do: ``nixlRemoteDisconnectError`` (UCX reported a reset,
    closed or timed-out endpoint) and ``nixlNotFoundError`` (NIXL has dropped the
    metadata of an agent that we still hold). UCX maps every other failure to
    ``nixlBackendError``, and an unknown status to a plain ``RuntimeError``:
    neither says that the peer is gone.
    """
    return any(c.__name__ in _DISCONNECT_ERRORS for c in type(error).__mro__)


@dataclass(slots=True)
class Loss:
    """The first evidence that a peer is gone."""

    verdict: Verdict
    evidence: str
    """What was seen, for the log."""
    found_at: float
    quiet_for: float
    """Seconds since the last proof of life, when found."""
    held_since: float | None = None
    """When an open read first held the release back."""


@dataclass(slots=True)
class Peer:
    """One remote engine with loaded state."""

    engine_id: str
    connected_at: float
    last_heard: float
    """Last proof of life: an answer, never a successful send."""
    due: float
    """When the schedule looks at this peer next."""
    offset: float = 0.0
    """Its fixed place within the spread of an interval, in seconds."""
    last_sent: float = -math.inf
    """The due time that the last heartbeat was sent for."""
    address: tuple[str, int] | None = None
    """Host and port of the side channel; None if the handshake was not seen."""
    ask_rank: tuple[int, int] = (0, 0)
    """The (pp_rank, tp_rank) to name in a question."""
    asked_at: float = -math.inf
    unanswered: int = 0
    first_unanswered_at: float = 0.0
    """When the first of the unanswered questions was asked."""
    loss: Loss | None = None
    last_error: str | None = None
    logged_errors: set[str] = field(default_factory=set)
    """Names of untyped errors already logged for this peer."""

    @property
    def address_text(self) -> str | None:
        """The address as "host:port"."""
        return self.address and f"{self.address[0]}:{self.address[1]}"


@dataclass(slots=True)
class _Backoff:
    strikes: int
    """Releases and failed handshakes since the last finished read."""
    until: float
    """End of the quarantine."""
    trial_at: float = -math.inf
    """When the last trial handshake began."""
    released: bool = False
    """Whether the engine's state was released since the last finished read."""


class PeerTable:
    """All that the worker knows about its peers, and every decision about them.

    Not thread-safe: the worker's NIXL lock guards it. The cost of a step with
    nothing due is one comparison with :attr:`next_look`, however many peers.
    """

    def __init__(self, interval: float):
        """Create an empty table.

        Args:
            interval: Heartbeat interval in seconds, > 0.

        """
        self.interval = interval
        self.lost: dict[str, Loss] = {}
        """Engines to release, by engine id."""
        self.next_look = -math.inf
        """When to call :meth:`sync` and :meth:`take_due` next."""
        self._peers: dict[str, Peer] = {}
        self._schedule: list[tuple[float, str]] = []
        self._synced_at = -math.inf
        self._looked_for_quiet_at = -math.inf
        self._backoff: dict[str, _Backoff] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, engine_id: str) -> Peer | None:
        """Return what is known about a connected peer."""
        return self._peers.get(engine_id)

    def peers(self) -> list[Peer]:
        """Return a snapshot of the connected peers."""
        return list(self._peers.values())

    # -- Coming and going --------------------------------------------------

    def connect(
        self,
        engine_id: str,
        now: float,
        address: tuple[str, int] | None = None,
        ask_rank: tuple[int, int] = (0, 0),
    ) -> None:
        """Add a peer whose state has just been loaded.

        The handshake counts as the first heartbeat and as a proof of life.
        """
        offset = zlib.crc32(engine_id.encode()) / 2**32 * _SPREAD * self.interval
        due = now + self.interval + offset
        self._peers[engine_id] = peer = Peer(
            engine_id, now, now, due, offset, address=address, ask_rank=ask_rank
        )
        self._reschedule(peer, due)

    def sync(
        self,
        loaded: Mapping[str, object],
        now: float,
        pending: Collection[str] = (),
    ) -> None:
        """Make the table hold exactly the engines with loaded state.

        Handshakes and releases keep it so. State that was loaded or dropped past
        them is noticed here, within an interval: more often this does nothing.

        Args:
            loaded: All engines whose NIXL state is loaded, by engine id.
            now: Current time.
            pending: Engines whose handshake may have connected them already, a
                moment before they are listed as loaded.

        """
        if now < self._synced_at + self.interval:
            return
        if self._peers.keys() != loaded.keys():
            for engine_id in self._peers.keys() - loaded.keys() - set(pending):
                self.forget(engine_id)
            for engine_id in loaded.keys() - self._peers.keys():
                self.connect(engine_id, now)
        self._synced_at = now
        self._refresh_next_look()

    def forget(self, engine_id: str) -> Peer | None:
        """Drop everything about a peer but its back-off; return what was known."""
        self.lost.pop(engine_id, None)
        return self._peers.pop(engine_id, None)

    # -- Heartbeats ----------------------------------------------------------

    def take_due(self, now: float, last_active: Mapping[str, float]) -> str | None:
        """Return one engine to send a heartbeat to now, and plan its next one.

        Anything else sent to a peer counts as its heartbeat, so a peer in use
        comes due an interval after its last activity. Between heartbeats a peer
        keeps its own beat: a late step delays one, and does not shift the rest.
        A peer known to be lost is not sent to (NIXL prints a line per failure).

        Args:
            now: Current time.
            last_active: Last time at which a handshake finished, a read was
                posted or a lease heartbeat was sent, by engine id.

        """
        while self._schedule and self._schedule[0][0] <= now:
            due, engine_id = heapq.heappop(self._schedule)
            peer = self._peers.get(engine_id)
            if peer is None or peer.due != due or peer.loss is not None:
                continue
            active = last_active.get(engine_id, peer.connected_at)
            interval = self._interval_after(now - active)
            earliest = max(active + interval + peer.offset, peer.last_sent + interval)
            if earliest > now:
                # Looked at again within an interval even if the heartbeat is
                # further off: a read in between makes it due sooner.
                self._reschedule(peer, min(earliest, now + self.interval))
                continue
            peer.last_sent = due
            # Skip beats that have passed, or are less than half an interval off.
            missed = math.floor((now - due) / self.interval + 0.5)
            self._reschedule(peer, due + (missed + 1) * self.interval)
            return engine_id
        self._refresh_next_look()
        return None

    def _interval_after(self, idle: float) -> float:
        """Return the heartbeat interval to a peer without traffic for ``idle``."""
        return max(self.interval, min(idle / _IDLE_FRACTION, _MAX_IDLE_INTERVAL_S))

    def _reschedule(self, peer: Peer, due: float) -> None:
        peer.due = due
        heapq.heappush(self._schedule, (due, peer.engine_id))
        self._refresh_next_look()

    def _refresh_next_look(self) -> None:
        self.next_look = self._synced_at + self.interval
        if self._schedule:
            self.next_look = min(self.next_look, self._schedule[0][0])

    # -- Evidence ------------------------------------------------------------

    def lose(self, engine_id: str, verdict: Verdict, evidence: str, now: float) -> bool:
        """Record that a peer is gone.

        Returns:
            Whether this is news: the peer is connected and was not lost before.

        """
        peer = self._peers.get(engine_id)
        if peer is None or peer.loss is not None:
            return False
        peer.last_error = evidence
        peer.loss = Loss(verdict, evidence, now, now - peer.last_heard)
        self.lost[engine_id] = peer.loss
        return True

    def is_first_error(self, engine_id: str, kind: str) -> bool:
        """Return whether an untyped error of this kind is new for this peer."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        peer.last_error = kind
        if kind in peer.logged_errors:
            return False
        peer.logged_errors.add(kind)
        return True

    # -- Proof of life ---------------------------------------------------------

    def heard(self, engine_id: str, now: float) -> None:
        """Record a proof of life; it clears a verdict of silence."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return
        peer.last_heard = now
        peer.unanswered = 0
        if peer.loss is not None and peer.loss.verdict is Verdict.SILENT:
            # A read that was stuck has finished before the peer was released.
            peer.loss = None
            del self.lost[engine_id]
            self._reschedule(peer, now + self.interval)

    @property
    def question_interval(self) -> float:
        """Seconds between two questions to a peer that does not answer."""
        wait = _INTERVALS_PER_QUESTION * self.interval
        return min(max(wait, _MIN_QUESTION_INTERVAL_S), _MAX_QUESTION_INTERVAL_S)

    def take_quiet(self, now: float, last_active: Mapping[str, float]) -> list[Peer]:
        """Return the peers to ask for a sign of life now.

        Args:
            now: Current time.
            last_active: As in :meth:`take_due`.

        """
        wait = self.question_interval
        if now < self._looked_for_quiet_at + wait / _LOOKS_PER_QUESTION:
            return []
        self._looked_for_quiet_at = now
        return [
            peer
            for peer in self.peers()
            # Most peers have answered lately: they cost no more than this.
            if max(peer.last_heard, peer.asked_at) <= now - wait
            and self.wants_question(
                peer, now, last_active.get(peer.engine_id, peer.connected_at)
            )
        ]

    def wants_question(self, peer: Peer, now: float, last_active: float) -> bool:
        """Return whether a quiet peer should be asked for a sign of life now."""
        if peer.address is None:
            return False
        if peer.loss is not None and peer.loss.verdict is not Verdict.SILENT:
            return False
        wait = self.question_interval
        if not peer.unanswered:
            wait = max(wait, self._interval_after(now - last_active))
        return now - max(peer.last_heard, peer.asked_at) >= wait

    def asked(self, engine_id: str, now: float) -> None:
        """Record that a question was sent to a peer."""
        if (peer := self._peers.get(engine_id)) is not None:
            peer.asked_at = now

    def unanswered(self, engine_id: str, asked_at: float, now: float) -> bool:
        """Record that a question was not answered; return whether that is silence.

        Args:
            engine_id: The peer that was asked.
            asked_at: When the question was asked.
            now: Current time.

        """
        peer = self._peers.get(engine_id)
        if peer is None or peer.last_heard > asked_at:
            return False
        if not peer.unanswered:
            peer.first_unanswered_at = asked_at
        peer.unanswered += 1
        return (
            peer.unanswered >= _MIN_UNANSWERED
            and now - peer.first_unanswered_at >= _MIN_SILENCE_S
        )

    # -- Quarantine ------------------------------------------------------------

    def released(self, engine_id: str, now: float) -> None:
        """Record a release: the first re-handshake is free, later ones back off.

        Each remove/add cycle leaves about ten file descriptors behind in NIXL
        over TCP, so a connection that keeps breaking must not cycle freely.
        """
        self._strike(engine_id, now, free=1)
        self._backoff[engine_id].released = True

    def handshake_failed(self, engine_id: str, now: float) -> float:
        """Record a failed handshake; return for how long this quarantines it."""
        self._strike(engine_id, now, free=0)
        return self._backoff[engine_id].until - now

    def _strike(self, engine_id: str, now: float, free: int) -> None:
        for other, backoff in list(self._backoff.items()):
            if now - backoff.until > _FORGET_QUARANTINE_S:
                del self._backoff[other]
        backoff = self._backoff.setdefault(engine_id, _Backoff(0, now))
        # A failed handshake is worse than a release: it counts from the second.
        backoff.strikes = max(backoff.strikes, 1 - free) + 1
        doublings = min(backoff.strikes - 2, _MAX_DOUBLINGS)
        if doublings >= 0:
            quarantine = min(_MIN_QUARANTINE_S * 2**doublings, _MAX_QUARANTINE_S)
            backoff.until = now + quarantine

    def recovered(self, engine_id: str) -> None:
        """Record that a read finished: the connection works again."""
        self._backoff.pop(engine_id, None)

    def was_released(self, engine_id: str) -> bool:
        """Return whether the engine was released since its last finished read."""
        return (b := self._backoff.get(engine_id)) is not None and b.released

    def has_history(self, engine_id: str) -> bool:
        """Return whether the engine was released or failed a handshake lately."""
        return engine_id in self._backoff

    def refuse_handshake(self, engine_id: str, now: float, running: bool) -> str | None:
        """Return why a request must not wait for a handshake now, or None.

        Args:
            engine_id: The engine to shake hands with; its state is not loaded.
            now: Current time.
            running: Whether a handshake to it is queued or running already.

        """
        backoff = self._backoff.get(engine_id)
        if backoff is None or backoff.strikes < 2:
            return None
        if now < backoff.until:
            return f"quarantined for another {backoff.until - now:.1f} s"
        if not running:
            backoff.trial_at = now
        elif now - backoff.trial_at > _TRIAL_JOIN_S:
            return "quarantined, and its trial handshake has not been answered yet"
        return None
