# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The policy alone: plain values in, decisions out, on a clock made of numbers."""

import math
import subprocess
import sys
from collections.abc import Iterator

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

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import (
    policy as nixl_peer_policy,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
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


def take_all(table: PeerTable, now: float, active: dict[str, float] | None = None):
    return list(iter(lambda: table.take_due(now, active or {}), None))


def beats(table: PeerTable, start: float, stop: float, every: float) -> Iterator[float]:
    """Yield the times at which ``p`` is sent a heartbeat."""
    for i in range(1, round((stop - start) / every) + 1):
        now = start + i * every
        for _ in take_all(table, now, {"p": now}):
            yield now


# -- The knob ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 0.01, 1, 2.5, 3600])
def test_an_interval_is_a_number_of_seconds(value: float):
    parsed = parse_heartbeat_interval(value)
    assert parsed == value and isinstance(parsed, float)


@pytest.mark.parametrize(
    "value",
    [
        -1,
        -0.1,
        1e-300,
        0.009,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        "2",
        None,
        [2],
    ],
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


def due_of(table: PeerTable, engine_id: str = "p") -> float:
    peer = table.get(engine_id)
    assert peer is not None
    return peer.due


def test_nothing_is_due_without_peers(table: PeerTable):
    assert table.take_due(T0, {}) is None
    table.sync({}, T0)
    assert table.next_look == T0 + INTERVAL


def test_next_look_is_flat_until_a_peer_comes_due_or_an_interval_has_passed(
    table: PeerTable,
):
    table.connect("p", T0)
    due = due_of(table)
    table.sync({"p": {}}, T0 + 1)
    assert table.next_look == due
    for tenth in range(10):
        assert table.take_due(T0 + 1 + tenth / 10, {}) is None
        assert table.next_look == due
    assert take_all(table, due, {}) == ["p"]
    assert table.next_look == T0 + 1 + INTERVAL
    table.sync({"p": {}}, T0 + 1 + INTERVAL)
    assert table.next_look == due + INTERVAL


def test_more_than_once_per_interval_sync_does_nothing(table: PeerTable):
    table.sync({}, T0)
    table.sync({"p": {}}, T0 + 0.9 * INTERVAL)
    assert "p" not in table
    table.sync({"p": {}}, T0 + INTERVAL)
    assert "p" in table


def test_peers_that_connect_together_spread_over_a_tenth(table: PeerTable):
    dues = []
    for i in range(200):
        table.connect(f"p{i}", T0)
        peer = table.get(f"p{i}")
        assert peer is not None
        dues.append(peer.due - T0 - INTERVAL)
    assert all(0 <= d < 0.1 * INTERVAL for d in dues)
    tenths = [int(d / (0.01 * INTERVAL)) for d in dues]
    assert max(tenths.count(tenth) for tenth in range(10)) < 40


def test_lateness_does_not_add_up(table: PeerTable):
    table.connect("p", T0)
    first = due_of(table)
    sent = []
    for i in range(1, 1001):
        now = T0 + 0.3 * i
        # Last traffic at the connect would let the interval grow.
        sent += [now for _ in take_all(table, now, {"p": now - INTERVAL * 1.1})]
    for n, at in enumerate(sent):
        assert 0 <= at - (first + n * INTERVAL) <= 0.3 + 1e-6


@pytest.mark.parametrize("late, next_beat", [(0, 1), (0.4, 1), (0.6, 2), (7.4, 8)])
def test_beats_missed_or_near_are_skipped(
    table: PeerTable, late: float, next_beat: int
):
    table.connect("p", T0)
    first = due_of(table)
    assert take_all(table, first + late * INTERVAL, {}) == ["p"]
    assert due_of(table) == pytest.approx(first + next_beat * INTERVAL)


def test_traffic_stands_for_a_heartbeat(table: PeerTable):
    table.connect("p", T0)
    assert list(beats(table, T0, T0 + 100, every=0.5)) == []


@pytest.mark.parametrize(
    "idle, interval", [(0, 2), (19, 2), (100, 10), (299, 29.9), (301, 30), (10**6, 30)]
)
def test_the_interval_grows_with_idleness_up_to_30_s(idle: float, interval: float):
    table = PeerTable(INTERVAL)
    table.connect("p", T0 - idle)
    sent = []
    # Long enough to see three beats; the idle time is held where it is.
    for i in range(1, 2000):
        now = T0 + 0.1 * i
        sent += [now for _ in take_all(table, now, {"p": now - idle})]
    assert not sent if idle < INTERVAL else len(sent) >= 3
    # The first beat is late here, and a late beat does not shift the next one.
    for a, b in zip(sent[1:], sent[2:]):
        assert b - a == pytest.approx(interval, abs=0.2 + 1e-6)


def test_a_configured_interval_above_30_s_is_kept():
    table = PeerTable(120.0)
    table.connect("p", T0)
    sent = [t for i in range(1, 1000) for t in take_all(table, T0 + i, {"p": T0})]
    assert len(sent) == 8


def test_traffic_after_a_long_idle_brings_the_interval_back(table: PeerTable):
    table.connect("p", T0)
    now = T0 + 10_000
    take_all(table, now, {"p": T0})
    active = {"p": now + 1}
    sent = [
        now + 1 + 0.1 * i
        for i in range(1, 100)
        for _ in take_all(table, now + 1 + 0.1 * i, active)
    ]
    assert sent[0] - active["p"] <= 1.1 * INTERVAL + 0.1
    assert len(sent) == 4


def test_a_forgotten_peer_is_not_due(table: PeerTable):
    table.connect("p", T0)
    table.connect("q", T0)
    assert table.forget("p") is not None
    assert table.forget("p") is None
    assert take_all(table, T0 + 10, {}) == ["q"]
    assert "p" not in table and "q" in table


def test_only_the_newest_entry_of_a_reconnected_peer_counts(table: PeerTable):
    table.connect("p", T0)
    old_due = due_of(table)
    table.forget("p")
    table.connect("p", T0 + 1)
    assert take_all(table, old_due, {}) == []
    assert take_all(table, old_due + 1, {}) == ["p"]
    assert take_all(table, old_due + 1, {}) == []


def test_a_peer_that_connects_and_goes_for_ever_leaves_no_entries(table: PeerTable):
    for i in range(1000):
        table.connect("p", T0 + i)
        table.forget("p")
        table.take_due(T0 + i, {})
    assert len(table._schedule) <= 3


def test_sync_makes_the_table_hold_what_is_loaded(table: PeerTable):
    table.connect("stays", T0, address=("host", 1))
    table.connect("goes", T0)
    table.lose("goes", Verdict.UNREACHABLE, "?", T0)
    table.sync({"stays": {}, "new": {}}, T0 + 1)
    assert {p.engine_id for p in table.peers()} == {"stays", "new"}
    assert table.lost == {}
    stays, new = table.get("stays"), table.get("new")
    assert stays is not None and stays.address == ("host", 1)
    assert new is not None and new.address is None and new.connected_at == T0 + 1


# -- Loss ----------------------------------------------------------------------------


def test_the_first_evidence_stands(table: PeerTable):
    table.connect("p", T0)
    assert table.lose("p", Verdict.UNREACHABLE, "first", T0 + 3)
    assert not table.lose("p", Verdict.REPLACED, "second", T0 + 4)
    loss = table.lost["p"]
    assert (loss.verdict, loss.evidence) == (Verdict.UNREACHABLE, "first")
    assert (loss.found_at, loss.quiet_for) == (T0 + 3, 3)


def test_an_unknown_peer_cannot_be_lost(table: PeerTable):
    assert not table.lose("p", Verdict.UNREACHABLE, "?", T0)
    assert table.lost == {}
    # Nor does anything else that is said of it leave a trace.
    table.heard("p", T0)
    table.asked("p", T0)
    assert not table.unanswered("p", T0, T0 + 100)
    assert not table.is_first_error("p", "kind")
    assert table.peers() == []


def test_a_lost_peer_gets_no_heartbeat_and_no_question(table: PeerTable):
    table.connect("p", T0, address=("host", 1))
    table.lose("p", Verdict.UNREACHABLE, "?", T0)
    assert take_all(table, T0 + 1000, {}) == []
    peer = table.get("p")
    assert peer is not None and not table.wants_question(peer, T0 + 1000, T0)


def test_a_reconnected_peer_is_not_lost(table: PeerTable):
    table.connect("p", T0)
    table.lose("p", Verdict.UNREACHABLE, "?", T0)
    table.forget("p")
    table.connect("p", T0 + 1)
    assert table.lost == {}
    assert table.lose("p", Verdict.UNREACHABLE, "?", T0 + 2)


def test_an_error_is_new_once_per_peer_and_kind(table: PeerTable):
    table.connect("p", T0)
    table.connect("q", T0)
    assert table.is_first_error("p", "a") and not table.is_first_error("p", "a")
    assert table.is_first_error("p", "b") and table.is_first_error("q", "a")
    table.forget("p")
    table.connect("p", T0)
    assert table.is_first_error("p", "a")


# -- Silence -------------------------------------------------------------------------


def leave_unanswered(table: PeerTable, *asked: float, answer_after: float = 5) -> bool:
    """Let questions of those times go unanswered; return the last verdict."""
    silent = False
    for at in asked:
        table.asked("p", at)
        silent = table.unanswered("p", at, at + answer_after)
    return silent


def test_silence_takes_three_questions_and_30_s(table: PeerTable):
    table.connect("p", T0)
    # Three are soon unanswered, but not for long enough.
    assert not leave_unanswered(table, T0 + 10, T0 + 20, T0 + 30)
    assert leave_unanswered(table, T0 + 40)


def test_a_long_time_alone_is_not_silence(table: PeerTable):
    table.connect("p", T0)
    assert not leave_unanswered(table, T0 + 10, T0 + 500)
    assert leave_unanswered(table, T0 + 510)


def test_an_answer_starts_the_count_again(table: PeerTable):
    table.connect("p", T0)
    leave_unanswered(table, T0 + 10, T0 + 20)
    table.heard("p", T0 + 29)
    assert not leave_unanswered(table, T0 + 30, T0 + 40, T0 + 50)
    assert leave_unanswered(table, T0 + 60)


def test_a_question_older_than_the_last_proof_of_life_counts_not(table: PeerTable):
    table.connect("p", T0)
    leave_unanswered(table, T0 + 10, T0 + 20, T0 + 30)
    table.asked("p", T0 + 40)
    table.heard("p", T0 + 42)
    assert not table.unanswered("p", T0 + 40, T0 + 45)
    peer = table.get("p")
    assert peer is not None and peer.unanswered == 0


def test_a_question_of_before_a_reconnect_counts_not(table: PeerTable):
    table.connect("p", T0)
    table.asked("p", T0 + 10)
    table.forget("p")
    table.connect("p", T0 + 12)
    assert not table.unanswered("p", T0 + 10, T0 + 15)
    peer = table.get("p")
    assert peer is not None and peer.unanswered == 0


def test_hearing_a_silent_peer_clears_the_verdict(table: PeerTable):
    table.connect("p", T0)
    table.lose("p", Verdict.SILENT, "?", T0 + 40)
    assert take_all(table, T0 + 50, {}) == []
    table.heard("p", T0 + 60)
    assert table.lost == {}
    assert take_all(table, T0 + 60 + INTERVAL, {}) == ["p"]
    assert take_all(table, T0 + 60 + INTERVAL, {}) == []
    assert table.lose("p", Verdict.SILENT, "?", T0 + 100)


def test_hearing_a_silent_peer_before_its_next_beat_leaves_one_beat(table: PeerTable):
    table.connect("p", T0)
    take_all(table, T0 + 1.1 * INTERVAL, {"p": T0})
    table.lose("p", Verdict.SILENT, "?", T0 + 2.5)
    table.heard("p", T0 + 2.6)
    sent = [t for i in range(26, 87) for t in take_all(table, T0 + i / 10, {"p": T0})]
    assert len(sent) == 3


@pytest.mark.parametrize("verdict", [Verdict.UNREACHABLE, Verdict.REPLACED])
def test_hearing_clears_no_other_verdict(table: PeerTable, verdict: Verdict):
    table.connect("p", T0)
    table.lose("p", verdict, "?", T0)
    table.heard("p", T0 + 1)
    assert table.lost["p"].verdict is verdict


@pytest.mark.parametrize(
    "interval, question_interval",
    [(0.1, 5), (0.6, 5), (1, 7.5), (2, 15), (4, 30), (7, 30)],
)
def test_the_question_interval_is_some_beats_within_bounds(
    interval: float, question_interval: float
):
    assert PeerTable(interval).question_interval == question_interval


def test_when_a_question_is_wanted(table: PeerTable):
    table.connect("p", T0, address=("host", 1))
    peer = table.get("p")
    assert peer is not None
    wait = table.question_interval
    assert not table.wants_question(peer, T0 + wait - 0.1, T0)
    assert table.wants_question(peer, T0 + wait, T0)
    table.asked("p", T0 + wait)
    assert not table.wants_question(peer, T0 + 2 * wait - 0.1, T0)
    assert table.wants_question(peer, T0 + 2 * wait, T0)
    table.heard("p", T0 + 2 * wait)
    assert not table.wants_question(peer, T0 + 3 * wait - 0.1, T0 + wait)


def test_an_idle_peer_is_asked_less_until_it_fails_to_answer(table: PeerTable):
    table.connect("p", T0, address=("host", 1))
    peer = table.get("p")
    assert peer is not None
    now = T0 + 10_000
    table.heard("p", now)
    assert not table.wants_question(peer, now + 29, T0)
    assert table.wants_question(peer, now + 30, T0)
    table.asked("p", now + 30)
    table.unanswered("p", now + 30, now + 35)
    assert not table.wants_question(peer, now + 44, T0)
    assert table.wants_question(peer, now + 45, T0)


def test_quiet_peers_are_looked_for_ten_times_per_question_interval(table: PeerTable):
    wait = table.question_interval
    table.connect("quiet", T0, address=("host", 1))
    table.connect("heard", T0, address=("host", 2))
    table.connect("asked", T0, address=("host", 3))
    table.heard("heard", T0 + 1)
    last_active = dict.fromkeys(("quiet", "heard", "asked"), T0)
    assert table.take_quiet(T0 + 0.95 * wait, last_active) == []
    assert table.take_quiet(T0 + wait, last_active) == []
    quiet = table.take_quiet(T0 + 1.05 * wait, last_active)
    assert [peer.engine_id for peer in quiet] == ["quiet", "asked"]
    table.asked("asked", T0 + 1.05 * wait)
    quiet = table.take_quiet(T0 + 1.15 * wait, last_active)
    assert [peer.engine_id for peer in quiet] == ["quiet", "heard"]


def test_a_peer_without_an_address_is_not_asked(table: PeerTable):
    table.connect("p", T0)
    peer = table.get("p")
    assert peer is not None and not table.wants_question(peer, T0 + 1000, T0)


# -- Quarantine ----------------------------------------------------------------------


def quarantine_s(table: PeerTable, engine_id: str, now: float) -> float:
    """Return for how long a handshake is refused from now on."""
    seconds = 0
    while table.refuse_handshake(engine_id, now + seconds, running=False):
        seconds += 1
    return seconds


def test_the_first_handshake_after_a_release_is_free(table: PeerTable):
    table.released("p", T0)
    assert table.refuse_handshake("p", T0, running=False) is None
    assert table.has_history("p") and table.was_released("p")


def test_an_engine_without_history_is_never_refused(table: PeerTable):
    table.handshake_failed("q", T0)
    assert table.refuse_handshake("p", T0, running=True) is None
    assert not table.has_history("p") and not table.was_released("p")


def test_releases_back_off_from_the_second(table: PeerTable):
    spans = []
    for _ in range(10):
        table.released("p", T0)
        spans.append(quarantine_s(table, "p", T0))
    assert spans == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_failed_handshakes_back_off_from_the_first(table: PeerTable):
    spans = []
    for _ in range(9):
        table.handshake_failed("p", T0)
        spans.append(quarantine_s(table, "p", T0))
    assert spans == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not table.was_released("p")


def test_a_failed_handshake_after_a_release_is_the_second_strike(table: PeerTable):
    table.released("p", T0)
    table.handshake_failed("p", T0)
    assert quarantine_s(table, "p", T0) == 1


def test_the_back_off_survives_thousands_of_strikes(table: PeerTable):
    for i in range(5000):
        table.handshake_failed("p", T0 + 60 * i)
        table.released("p", T0 + 60 * i)
    assert quarantine_s(table, "p", T0 + 60 * 4999) == 60


def test_a_refusal_says_how_long(table: PeerTable):
    for _ in range(3):
        table.handshake_failed("p", T0)
    assert (
        table.refuse_handshake("p", T0 + 1, running=False)
        == "quarantined for another 3.0 s"
    )
    assert table.refuse_handshake("p", T0 + 4, running=False) is None


def test_forgetting_a_peer_keeps_its_back_off(table: PeerTable):
    table.connect("p", T0)
    table.handshake_failed("p", T0)
    table.forget("p")
    assert table.refuse_handshake("p", T0, running=False) is not None


def test_old_records_are_pruned(table: PeerTable):
    table.handshake_failed("old", T0)
    table.handshake_failed("new", T0 + 500)
    table.handshake_failed("other", T0 + 602)
    assert not table.has_history("old")
    assert table.has_history("new") and table.has_history("other")
    # Its own record is not too young to be pruned either.
    for _ in range(5):
        table.handshake_failed("new", T0 + 500)
    table.handshake_failed("new", T0 + 2000)
    assert quarantine_s(table, "new", T0 + 2000) == 1


def test_only_requests_that_come_soon_join_a_trial(table: PeerTable):
    table.handshake_failed("p", T0)
    now = T0 + 2
    assert table.refuse_handshake("p", now, running=False) is None
    assert table.refuse_handshake("p", now + 0.5, running=True) is None
    refusal = table.refuse_handshake("p", now + 0.6, running=True)
    assert refusal is not None and "trial" in refusal
    # The next trial is a new one.
    assert table.refuse_handshake("p", now + 10, running=False) is None
    assert table.refuse_handshake("p", now + 10.1, running=True) is None


def test_the_free_handshake_is_no_trial(table: PeerTable):
    table.released("p", T0)
    assert table.refuse_handshake("p", T0 + 100, running=True) is None


def test_a_finished_read_clears_the_record(table: PeerTable):
    for _ in range(4):
        table.released("p", T0)
    table.recovered("p")
    assert not table.has_history("p") and not table.was_released("p")
    table.released("p", T0)
    assert table.refuse_handshake("p", T0, running=False) is None
    table.recovered("nobody")


# -- Any sequence --------------------------------------------------------------------

ENGINES = st.sampled_from(["a", "b", "c"])


class Heartbeats(RuleBasedStateMachine):
    """Peers come, go, talk and fall silent while steps of any length pass."""

    @initialize(interval=st.sampled_from([0.1, 1.0, 2.0, 7.0, 45.0]))
    def start(self, interval: float):
        self.interval = interval
        self.table = PeerTable(interval)
        self.now = T0
        self.loaded: dict[str, object] = {}
        self.active: dict[str, float] = {}
        # Last beat of the peer's grid that was used, and last word to the peer.
        self.slots: dict[str, float] = {}
        self.quiet_since: dict[str, float] = {}

    @rule(seconds=st.floats(0.01, 5.0), steps=st.integers(1, 20))
    def steps(self, seconds: float, steps: int):
        for _ in range(steps):
            self.now += seconds
            for engine_id in take_all(self.table, self.now, self.active):
                peer = self.table.get(engine_id)
                assert peer is not None and peer.loss is None
                slot = peer.last_sent
                assert slot <= self.now
                # At most one heartbeat per slot, and slots are an interval apart.
                assert slot - self.slots.get(engine_id, -math.inf) > 0.999 * (
                    self.interval
                )
                self.slots[engine_id] = slot
                self.quiet_since[engine_id] = self.now
            for peer in self.table.peers():
                if peer.loss is None:
                    active = self.active.get(peer.engine_id, peer.connected_at)
                    idle_rule = min((self.now - active) / 10, 30.0)
                    most = max(1.5 * self.interval, idle_rule + 0.1 * self.interval)
                    quiet = self.now - self.quiet_since[peer.engine_id]
                    assert quiet <= most + 1e-6
            self.table.sync(self.loaded, self.now)
            assert self.now < self.table.next_look <= self.now + self.interval

    @rule(engine_id=ENGINES)
    def connect(self, engine_id: str):
        self.table.forget(engine_id)
        self.table.connect(engine_id, self.now)
        self.loaded[engine_id] = {}
        self.active[engine_id] = self.quiet_since[engine_id] = self.now
        self.slots.pop(engine_id, None)

    @rule(engine_id=ENGINES)
    def forget(self, engine_id: str):
        self.table.forget(engine_id)
        self.loaded.pop(engine_id, None)
        self.active.pop(engine_id, None)

    @rule(engine_id=ENGINES)
    def talk(self, engine_id: str):
        if engine_id in self.table:
            self.active[engine_id] = self.quiet_since[engine_id] = self.now

    @rule(engine_id=ENGINES, verdict=st.sampled_from(Verdict))
    def lose(self, engine_id: str, verdict: Verdict):
        self.table.lose(engine_id, verdict, "?", self.now)

    @rule(engine_id=ENGINES)
    def hear(self, engine_id: str):
        peer = self.table.get(engine_id)
        was_silent = peer is not None and peer.loss is not None
        self.table.heard(engine_id, self.now)
        if was_silent and engine_id not in self.table.lost:
            self.quiet_since[engine_id] = self.now

    @invariant()
    def lost_engines_are_lost_peers(self):
        lost = {p.engine_id for p in self.table.peers() if p.loss is not None}
        assert self.table.lost.keys() == lost


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
    command = [sys.executable, "-I", "-S", "-c", script, nixl_peer_policy.__file__]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
