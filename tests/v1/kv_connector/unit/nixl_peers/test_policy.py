# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The policy alone: plain values in, decisions out, on a clock made of numbers."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import policy
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    SUSPECT_AFTER_S,
    Peer,
    PeerTable,
    Verdict,
    is_disconnect,
    is_nixl_error,
    parse_heartbeat_interval,
)

INTERVAL = 2.0
T0 = 1000.0


@pytest.fixture
def table() -> PeerTable:
    return PeerTable(INTERVAL)


def connect(table: PeerTable, *engine_ids: str, now: float = T0) -> Peer:
    """Connect to engines of one agent; return the last one."""
    for engine_id in engine_ids:
        table.connect(engine_id, [f"{engine_id}-agent"], "host:1", now)
    return peer_of(table, engine_ids[-1])


def peer_of(table: PeerTable, engine_id: str) -> Peer:
    peer = table.get(engine_id)
    assert peer is not None
    return peer


def take_all(table: PeerTable, now: float) -> list[str]:
    """Take every heartbeat that is due now."""
    return [peer.engine_id for peer in iter(lambda: table.take_due(now), None)]


def beats(
    table: PeerTable,
    duration: float,
    every: float = 0.1,
    start: float = T0,
    each: Callable[[float], None] = lambda now: None,
) -> Iterator[float]:
    """Yield the times at which heartbeats are taken, looking every so often."""
    for i in range(1, round(duration / every) + 1):
        now = start + i * every
        each(now)
        for _ in take_all(table, now):
            yield now


# -- The option --------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 0.01, 1, 2.5, 3600])
def test_an_interval_is_a_number_of_seconds(value: float):
    parsed = parse_heartbeat_interval(value)
    assert parsed == value and isinstance(parsed, float)


@pytest.mark.parametrize("value", [10.0**300, 10**400])
def test_an_interval_beyond_a_year_means_practically_never(value: float):
    assert parse_heartbeat_interval(value) == 365 * 86400


@pytest.mark.parametrize(
    "value",
    [-1, -0.1, 1e-300, 0.009, math.nan, math.inf, -math.inf, True, False, "2", None],
)
def test_a_bad_interval_is_named_with_what_would_do(value: object):
    with pytest.raises(ValueError) as e:
        parse_heartbeat_interval(value)
    for part in ("peer_heartbeat_interval", repr(value), "finite number", "2.0"):
        assert part in str(e.value)


# -- Errors --------------------------------------------------------------------------


def error_class(name: str, *bases: type) -> type[Exception]:
    return type(name, bases or (RuntimeError,), {})


@pytest.mark.parametrize("name", ["nixlRemoteDisconnectError", "nixlNotFoundError"])
def test_two_classes_prove_a_disconnect_whatever_package_they_are_from(name: str):
    error = error_class(name)
    derived = error_class("ForkError", error)
    for cls in (error, derived):
        assert is_disconnect(cls("?")) and is_nixl_error(cls("?"))


@pytest.mark.parametrize("name", ["nixlBackendError", "nixlNotAllowedError"])
def test_other_nixl_errors_prove_nothing(name: str):
    error = error_class(name)("?")
    assert is_nixl_error(error) and not is_disconnect(error)


def test_foreign_errors_prove_nothing():
    for error in (RuntimeError("nixlNotFoundError"), OSError(), ConnectionResetError()):
        assert not is_nixl_error(error) and not is_disconnect(error)


# -- Schedule ------------------------------------------------------------------------


def test_nothing_is_due_without_peers(table: PeerTable):
    assert table.next_due == math.inf
    assert table.take_due(T0) is None


def test_next_due_is_when_the_first_peer_comes_due(table: PeerTable):
    due = connect(table, "p").due
    assert T0 + INTERVAL <= table.next_due == due < T0 + 1.1 * INTERVAL
    assert table.take_due(due - 0.001) is None
    assert table.next_due == due
    assert take_all(table, due) == ["p"]
    assert table.next_due == due + INTERVAL
    table.forget("p")
    assert take_all(table, due + INTERVAL) == []
    assert table.next_due == math.inf


def test_peers_that_connect_together_spread_over_a_tenth(table: PeerTable):
    dues = [connect(table, f"p{i}").due - T0 - INTERVAL for i in range(200)]
    assert all(0 <= due < 0.1 * INTERVAL for due in dues)
    tenths = [int(due / (0.01 * INTERVAL)) for due in dues]
    assert max(tenths.count(tenth) for tenth in range(10)) < 40


def test_lateness_does_not_add_up(table: PeerTable):
    peer = connect(table, "p")
    first = peer.due

    def keep_the_interval(now: float) -> None:
        peer.last_active = now - 1.1 * INTERVAL  # else it would grow

    sent = list(beats(table, 300, every=0.3, each=keep_the_interval))
    assert len(sent) > 140
    for n, at in enumerate(sent):
        assert 0 <= at - (first + n * INTERVAL) <= 0.3 + 1e-6


@pytest.mark.parametrize("late, next_beat", [(0, 1), (0.4, 1), (0.6, 2), (7.4, 8)])
def test_beats_missed_or_near_are_skipped(
    table: PeerTable, late: float, next_beat: int
):
    peer = connect(table, "p")
    first = peer.due
    assert take_all(table, first + late * INTERVAL) == ["p"]
    assert peer.due == pytest.approx(first + next_beat * INTERVAL)


def test_traffic_stands_for_a_heartbeat(table: PeerTable):
    peer = connect(table, "p")

    def talk(now: float) -> None:
        peer.last_active = now

    assert list(beats(table, 100, every=0.5, each=talk)) == []


@pytest.mark.parametrize(
    "idle, interval", [(3, 2), (19, 2), (100, 10), (299, 29.9), (301, 30), (10**6, 30)]
)
def test_the_interval_grows_with_idleness_up_to_30_s(
    table: PeerTable, idle: float, interval: float
):
    peer = connect(table, "p", now=T0 - idle)

    def stay_as_idle(now: float) -> None:
        peer.last_active = now - idle

    sent = list(beats(table, 200, each=stay_as_idle))
    assert len(sent) >= 3
    # The first beat is late here, and a late beat does not shift the next one.
    for a, b in zip(sent[1:], sent[2:]):
        assert b - a == pytest.approx(interval, abs=0.2 + 1e-6)


def test_a_configured_interval_above_30_s_is_kept():
    table = PeerTable(120.0)
    connect(table, "p")
    assert len(list(beats(table, 1000, every=1))) == 8


def test_traffic_after_a_long_idle_brings_the_interval_back(table: PeerTable):
    peer = connect(table, "p")
    now = T0 + 10_000
    take_all(table, now)
    peer.last_active = now + 1
    sent = list(beats(table, 10, start=now + 1))
    assert sent[0] - peer.last_active <= 1.1 * INTERVAL + 0.1
    assert len(sent) == 4


def test_a_forgotten_peer_is_not_due(table: PeerTable):
    connect(table, "p", "q")
    assert table.forget("p") is not None
    assert table.forget("p") is None
    assert take_all(table, T0 + 10) == ["q"]
    assert "p" not in table and "q" in table and len(table) == 1


def test_only_the_newest_entry_of_a_reconnected_peer_counts(table: PeerTable):
    old_due = connect(table, "p").due
    connect(table, "p", now=T0 + 1)
    assert take_all(table, old_due) == []
    assert take_all(table, old_due + 1) == ["p"]
    assert take_all(table, old_due + 1) == []


@pytest.mark.parametrize("goes", [True, False])
def test_a_peer_that_connects_for_ever_leaves_no_entries(table: PeerTable, goes: bool):
    for i in range(1000):
        connect(table, "p", now=T0 + i)
        if goes:
            table.forget("p")
        table.take_due(T0 + i)
    assert len(table._schedule) <= 4


def test_an_agent_belongs_to_the_engine_that_loaded_it_last(table: PeerTable):
    table.connect("old", ["shared", "own"], None, T0)
    table.connect("new", ["shared"], None, T0)
    table.forget("old")
    assert table.of_agent("shared") is table.get("new")
    assert table.of_agent("own") is None
    table.forget("new")
    assert table.of_agent("shared") is None


# -- Releases ----------------------------------------------------------------------


def test_the_first_evidence_stands(table: PeerTable):
    peer = connect(table, "p")
    assert table.mark_for_release("p", Verdict.UNREACHABLE, "first", T0 + 3)
    assert not table.mark_for_release("p", Verdict.UNREACHABLE, "second", T0 + 4)
    # Whoever asks for it is not told that it goes for another reason.
    assert not table.mark_for_release("p", Verdict.REQUESTED, "third", T0 + 5)
    assert not table.mark_for_release("p", Verdict.UNREACHABLE, "fourth", T0 + 6)
    release = peer.release
    assert release is not None
    assert (release.verdict, release.evidence) == (Verdict.REQUESTED, "first")
    assert (release.found_at, release.proof_of_life_age) == (T0 + 3, 3)
    assert table.releases == {"p": peer}


def test_an_unknown_peer_cannot_be_released(table: PeerTable):
    assert not table.mark_for_release("p", Verdict.UNREACHABLE, "?", T0)
    assert table.releases == {} and table.peers() == []


@pytest.mark.parametrize(
    "verdict, state",
    [
        (Verdict.UNREACHABLE, "unreachable"),
        (Verdict.REPLACED, "releasing"),
        (Verdict.REQUESTED, "releasing"),
    ],
)
def test_a_peer_to_be_released_gets_no_heartbeat(
    table: PeerTable, verdict: Verdict, state: str
):
    peer = connect(table, "p")
    assert peer.state == "connected"
    table.mark_for_release("p", verdict, "?", T0)
    assert take_all(table, T0 + 1000) == []
    assert peer.state == state


def test_a_reconnected_peer_is_not_to_be_released(table: PeerTable):
    connect(table, "p")
    table.mark_for_release("p", Verdict.UNREACHABLE, "?", T0)
    connect(table, "p", now=T0 + 1)
    assert table.releases == {} and peer_of(table, "p").state == "connected"
    assert table.mark_for_release("p", Verdict.UNREACHABLE, "?", T0 + 2)


def test_an_error_is_new_once_per_peer_and_kind(table: PeerTable):
    q = connect(table, "q")
    p = connect(table, "p")
    assert table.record_error(p, "a") and not table.record_error(p, "a")
    assert table.record_error(p, "b") and table.record_error(q, "a")
    assert (p.last_error, q.last_error) == ("b", "a")
    assert table.record_error(connect(table, "p"), "a")


def test_a_finished_transfer_takes_a_disconnect_back(table: PeerTable):
    peer = connect(table, "p")
    table.mark_for_release("p", Verdict.UNREACHABLE, "?", T0 + 10)
    assert take_all(table, T0 + 20) == []
    assert table.mark_alive(peer, T0 + 20) == (False, True)
    assert table.releases == {} and peer.state == "connected"
    # The next heartbeat decides, an interval later.
    assert take_all(table, T0 + 20 + 0.99 * INTERVAL) == []
    assert take_all(table, T0 + 20 + INTERVAL) == ["p"]
    assert take_all(table, T0 + 20 + INTERVAL) == []


@pytest.mark.parametrize("verdict", [Verdict.REPLACED, Verdict.REQUESTED])
def test_it_takes_no_other_verdict_back(table: PeerTable, verdict: Verdict):
    peer = connect(table, "p")
    table.mark_for_release("p", verdict, "?", T0)
    assert table.mark_alive(peer, T0 + 1) == (False, False)
    assert table.releases == {"p": peer}


# -- Suspects ------------------------------------------------------------------------

STUCK = T0 + SUSPECT_AFTER_S


def update(
    table: PeerTable, *posted: tuple[str, float], now: float
) -> tuple[list[str], list[str]]:
    """Update the suspects; return who has become one, and who is none any more."""
    found, cleared = table.update_suspects(posted, now)
    return [p.engine_id for p in found], [p.engine_id for p in cleared]


def test_a_peer_is_suspect_once_a_transfer_is_stuck_for_a_minute(table: PeerTable):
    peer = connect(table, "p")
    posted = ("p-agent", T0)
    assert update(table, posted, now=STUCK - 0.1) == ([], [])
    assert update(table, posted, now=STUCK) == (["p"], [])
    assert update(table, posted, now=STUCK + 1) == ([], [])
    assert peer.state == "suspect" and table.suspects == {"p": peer}
    # Suspicion releases nothing.
    assert table.releases == {}


def test_a_peer_of_which_anything_finished_since_is_not(table: PeerTable):
    peer = connect(table, "p")
    table.mark_alive(peer, T0 + 1)
    assert update(table, ("p-agent", T0), now=STUCK + 100) == ([], [])
    assert update(table, ("p-agent", T0 + 2), now=STUCK + 100) == (["p"], [])


def test_a_suspicion_ends_with_the_transfer_or_when_another_finishes(
    table: PeerTable,
):
    peer = connect(table, "p")
    update(table, ("p-agent", T0), now=STUCK)
    assert update(table, now=STUCK + 1) == ([], ["p"])
    assert peer.state == "connected"
    assert update(table, ("p-agent", T0), now=STUCK + 2) == (["p"], [])
    assert table.mark_alive(peer, STUCK + 3) == (True, False)
    assert peer.state == "connected" and table.suspects == {}
    assert update(table, ("p-agent", T0), now=STUCK + 4) == ([], [])


def test_of_several_peers_only_the_stuck_one_is_suspect(table: PeerTable):
    connect(table, "p", "q")
    posted = [("p-agent", T0), ("q-agent", T0 + 1), ("nobody", T0), ("p-agent", T0)]
    assert update(table, *posted, now=STUCK) == (["p"], [])
    assert update(table, *posted, now=STUCK + 1) == (["q"], [])


def test_a_forgotten_peer_is_no_suspect(table: PeerTable):
    connect(table, "p")
    update(table, ("p-agent", T0), now=STUCK)
    table.forget("p")
    assert table.suspects == {}
    assert connect(table, "p", now=STUCK).state == "connected"


# -- Any sequence --------------------------------------------------------------------

ENGINES = st.sampled_from(["a", "b", "c"])


class Heartbeats(RuleBasedStateMachine):
    """Peers come, go, talk and break while steps of any length pass."""

    @initialize(interval=st.sampled_from([0.1, 1.0, 2.0, 7.0, 45.0]))
    def start(self, interval: float):
        self.interval = interval
        self.table = PeerTable(interval)
        self.now = T0
        # Last beat of the peer's grid that was used, and last word to the peer.
        self.slots: dict[str, float] = {}
        self.quiet_since: dict[str, float] = {}

    @rule(seconds=st.floats(0.01, 5.0), steps=st.integers(1, 20))
    def steps(self, seconds: float, steps: int):
        for _ in range(steps):
            self.now += seconds
            for engine_id in take_all(self.table, self.now):
                peer = self.table.get(engine_id)
                assert peer is not None and peer.release is None
                slot = peer.last_slot
                assert slot <= self.now
                # At most one heartbeat per slot, and slots are an interval apart.
                assert slot - self.slots.get(engine_id, -math.inf) > 0.999 * (
                    self.interval
                )
                self.slots[engine_id] = slot
                self.quiet_since[engine_id] = self.now
            for peer in self.table.peers():
                if peer.release is None:
                    idle_rule = min((self.now - peer.last_active) / 10, 30.0)
                    most = max(1.5 * self.interval, idle_rule + 0.1 * self.interval)
                    quiet = self.now - self.quiet_since[peer.engine_id]
                    assert quiet <= most + 1e-6
            assert self.now < self.table.next_due

    @rule(engine_id=ENGINES)
    def connect(self, engine_id: str):
        self.table.connect(engine_id, [engine_id], None, self.now)
        self.quiet_since[engine_id] = self.now
        self.slots.pop(engine_id, None)

    @rule(engine_id=ENGINES)
    def forget(self, engine_id: str):
        self.table.forget(engine_id)

    @rule(engine_id=ENGINES)
    def talk(self, engine_id: str):
        if (peer := self.table.get(engine_id)) is not None:
            peer.last_active = self.quiet_since[engine_id] = self.now

    @rule(engine_id=ENGINES, verdict=st.sampled_from(Verdict))
    def mark_for_release(self, engine_id: str, verdict: Verdict):
        self.table.mark_for_release(engine_id, verdict, "?", self.now)

    @rule(engine_id=ENGINES)
    def finish(self, engine_id: str):
        if (peer := self.table.get(engine_id)) is not None:
            _, was_unreachable = self.table.mark_alive(peer, self.now)
            if was_unreachable:
                self.quiet_since[engine_id] = self.now
                self.slots.pop(engine_id, None)

    @invariant()
    def releases_are_marked_peers(self):
        marked = {p.engine_id for p in self.table.peers() if p.release is not None}
        assert self.table.releases.keys() == marked


def test_one_heartbeat_per_slot_and_none_too_late():
    run_state_machine_as_test(
        Heartbeats,
        settings=settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=80,
            stateful_step_count=30,
        ),
    )


# -- The module ----------------------------------------------------------------------


def test_the_module_needs_nothing_but_the_standard_library():
    script = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('policy', sys.argv[1])\n"
        "sys.modules['policy'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots - sys.stdlib_module_names - {'__main__', 'policy'}))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script, policy.__file__]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
