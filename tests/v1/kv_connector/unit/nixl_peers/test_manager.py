# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A peer's life in the manager alone: no worker, no NIXL, a clock made of numbers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.agent import OpenTransfers
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.manager import PeerManager

Lines = Callable[[str], list[str]]

INTERVAL = 2.0
FIRST_HEARTBEAT = 1.1 * INTERVAL
WHERE = "host:7000"


class nixlRemoteDisconnectError(Exception):  # noqa: N801, N818
    """NIXL's classes are known by name."""


class nixlBackendError(Exception):  # noqa: N801, N818
    """Proves nothing."""


class Setup:
    """A manager and all that it is given."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.counted: Counter[str] = Counter()
        self.release_times: list[float] = []
        self.gauges: dict[str, int] = {}
        self.transfers = OpenTransfers()
        self.sent: list[str] = []
        self.broken: dict[str, Exception] = {}
        """What a heartbeat to an agent raises."""
        self.manager = PeerManager(
            INTERVAL, "me", self.transfers, self, lambda: self.now
        )

    # What the manager counts with.

    def count(self, name: str, n: int = 1) -> None:
        self.counted[name] += n

    def observe_release(self, seconds: float) -> None:
        self.release_times.append(seconds)

    def set_gauges(self, values: Mapping[str, int]) -> None:
        self.gauges = dict(values)

    # What it sends with: as the proxy, which has errors judged.

    def send_heartbeat(self, agent: str) -> None:
        if (error := self.broken.get(agent)) is not None:
            self.manager.failed(agent, "send_notif", error)
            raise error
        self.sent.append(agent)

    # What a worker does.

    def connect(self, engine_id: str, *agents: str) -> None:
        names = agents or (f"{engine_id}-agent",)
        self.manager.connected(engine_id, names, WHERE)

    def lose(self, engine_id: str, error: Exception | None = None) -> None:
        error = error or nixlRemoteDisconnectError("gone")
        self.manager.failed(f"{engine_id}-agent", "transfer", error)

    def read(self, handle: str, engine_id: str) -> None:
        """Have a read in flight."""
        self.transfers.opened(handle, f"{engine_id}-agent")
        self.transfers.posted(handle, self.now)

    def release(self, *handshaking: str, busy: tuple[str, ...] = ()) -> list[str]:
        """Release what may go now, as rounds do one by one."""
        engine_ids: list[str] = []
        while engine_id := self.manager.find_releasable(busy, handshaking):
            with self.manager.releasing(engine_id, 1):
                engine_ids.append(engine_id)
        return engine_ids

    def round(self, seconds: float = 0.0) -> None:
        """Let time pass, then run rounds until none is left."""
        self.now += seconds
        if self.now >= self.manager.next_round_at:
            self.manager.update_suspects(self.now)
            while self.manager.send_due_heartbeats(self, self.now):
                pass
            self.release()
            self.manager.plan_next_round()

    def reported(self) -> dict[str, int]:
        """Return the gauges that a step reports, if any."""
        self.gauges = {}
        if self.manager.must_report_gauges:
            self.manager.report_gauges()
        return self.gauges

    def states(self) -> dict[str, str]:
        listed = self.manager.list_peers()
        return {peer["engine_id"]: peer["state"] for peer in listed}


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    assert all(time >= 0 for time in setup.release_times)


# -- A round -------------------------------------------------------------------------


def test_between_heartbeats_a_round_has_work_once_a_second(setup: Setup):
    setup.connect("p")
    setup.round()
    looks = 0
    for _ in range(18):
        setup.now += 0.1
        if setup.now >= setup.manager.next_round_at:
            looks += 1
            setup.round()
    assert looks == 1 and setup.sent == []
    setup.round(0.5)
    assert setup.sent == ["p-agent"]


def test_a_round_sends_32_heartbeats_at_most(setup: Setup):
    for i in range(100):
        setup.connect(f"p{i}")
    setup.now += 10 * INTERVAL
    left = [setup.manager.send_due_heartbeats(setup, setup.now) for _ in range(5)]
    assert left == [True, True, True, False, False]
    assert len(setup.sent) == len(set(setup.sent)) == 100
    assert setup.counted["peer_heartbeats_sent"] == 100


def test_a_round_sends_no_more_after_a_heartbeat_that_fails(setup: Setup):
    """NIXL prints a line about each of them, which takes its time."""
    for i in range(10):
        setup.connect(f"p{i}")
        setup.broken[f"p{i}-agent"] = nixlBackendError("?")
    setup.now += 10 * INTERVAL
    for failed in (1, 2, 3):
        assert setup.manager.send_due_heartbeats(setup, setup.now)
        assert setup.counted["peer_heartbeats_failed"] == failed
    assert setup.counted["peer_heartbeats_sent"] == 0


def test_a_peer_found_dead_gets_no_further_heartbeat(setup: Setup):
    setup.connect("p", "a0", "a1", "a2")
    setup.broken["a1"] = nixlRemoteDisconnectError("gone")
    setup.round(FIRST_HEARTBEAT)
    assert setup.sent == ["a0"]
    assert "p" not in setup.manager
    assert setup.counted == {
        "peer_heartbeats_sent": 1,
        "peer_heartbeats_failed": 1,
        "peers_unreachable": 1,
        "peers_released": 1,
    }


def test_a_rank_that_fails_for_another_reason_does_not_silence_the_rest(
    setup: Setup,
):
    setup.connect("p", "a0", "a1", "a2")
    setup.broken["a1"] = nixlBackendError("?")
    setup.round(FIRST_HEARTBEAT)
    assert setup.sent == ["a0", "a2"]
    assert setup.states() == {"p": "connected"}


# -- Release -----------------------------------------------------------------------


def test_nothing_is_released_under_a_read_in_flight(setup: Setup, lines: Lines):
    setup.connect("p")
    setup.read("x", "p")
    setup.lose("p")
    for _ in range(100):
        setup.now += 1000
        assert setup.release() == []
    assert setup.counted["peer_releases_deferred"] == 1
    assert setup.reported()["deferred_peer_releases"] == 1
    setup.transfers.closed("x")
    assert setup.release() == ["p"]
    assert setup.release_times == [100_000.0]
    (line,) = lines("NIXL peer released: p")
    assert "'found_to_released_s': 100000.0" in line
    assert "'deferred_s': 99000.0" in line
    assert len(lines("NIXL peer release deferred by in-flight reads: p")) == 1


def test_nor_while_vllm_holds_a_request_of_its_own(setup: Setup):
    setup.connect("p")
    setup.lose("p")
    assert setup.release(busy=("p",)) == []
    assert setup.counted["peer_releases_deferred"] == 1
    assert setup.release() == ["p"]


def test_nor_while_a_handshake_runs(setup: Setup):
    setup.connect("p")
    setup.connect("q")
    setup.lose("p")
    setup.lose("q")
    assert setup.release("p") == ["q"]
    assert setup.counted["peer_releases_deferred"] == 0
    assert setup.release() == ["p"]


def test_deferred_peers_keep_none_that_may_go_waiting(setup: Setup):
    for i in range(10):
        setup.connect(f"p{i}")
        setup.read(f"x{i}", f"p{i}")
        setup.lose(f"p{i}")
    setup.connect("free")
    setup.lose("free")
    assert setup.release() == ["free"]


def test_a_peer_is_forgotten_even_if_its_release_raises(setup: Setup):
    setup.connect("p")
    setup.lose("p")
    with pytest.raises(ValueError), setup.manager.releasing("p", 1):
        raise ValueError
    assert "p" not in setup.manager and setup.release() == []


def test_a_release_for_reasons_of_vllms_own_is_neither_counted_nor_held_against_it(
    setup: Setup, lines: Lines
):
    setup.connect("p")
    with setup.manager.releasing("p", 1):
        pass
    assert "p" not in setup.manager
    setup.connect("p")
    assert not setup.counted and lines("NIXL peer re") == []


def test_what_a_release_reports(setup: Setup, lines: Lines):
    setup.manager.connected("p", ["a0", b"a1"], WHERE)  # type: ignore[list-item]
    setup.now += 3
    setup.manager.failed("a0", "transfer", nixlRemoteDisconnectError("gone"))
    with setup.manager.releasing("p", 4):
        setup.now += 0.25
    assert setup.release_times == [0.25]
    (found,) = lines("NIXL peer unreachable: p")
    (line,) = lines("NIXL peer released: p")
    for fact in (
        "'engine_id': 'me'",
        "'remote_engine_id': 'p'",
        "'remote_address': 'host:7000'",
        "'remote_agents': ['a0', 'a1']",
        "'evidence': 'nixlRemoteDisconnectError from transfer'",
        "'since_proof_of_life_s': 3.0",
    ):
        assert fact in found and fact in line
    assert "'failed_agent': 'a0'" in found
    for fact in ("'verdict': 'unreachable'", "'released_dlists': 4"):
        assert fact in line
    for fact in ("'release_ms': 250.0", "'deferred_s': 0.0"):
        assert fact in line


# -- Evidence ------------------------------------------------------------------------


def test_the_same_disconnect_is_found_once(setup: Setup, lines: Lines):
    setup.connect("p")
    for _ in range(10):
        setup.lose("p")
    assert setup.counted["peers_unreachable"] == 1
    assert len(lines("NIXL peer unreachable: p")) == 1


def test_an_error_of_an_agent_that_is_nobodys_changes_nothing(setup: Setup):
    setup.connect("p")
    setup.lose("q")
    setup.lose("q", nixlBackendError("?"))
    setup.manager.finished("q-agent")
    setup.manager.sent("q-agent")
    setup.manager.mark_replaced("q", "?")
    assert setup.states() == {"p": "connected"} and not setup.counted


def test_an_untyped_error_is_shown_and_logged_once_per_call(setup: Setup, lines: Lines):
    setup.connect("p")
    for _ in range(3):
        for call in ("send_notif", "transfer"):
            setup.manager.failed("p-agent", call, nixlBackendError("why"))
    (peer,) = setup.manager.list_peers()
    assert peer["state"] == "connected"
    assert peer["last_error"] == "nixlBackendError from transfer"
    first, second = lines("NIXL peer error, not treated as a disconnect: p")
    assert "nixlBackendError from send_notif: why" in first
    assert "nixlBackendError from transfer: why" in second


def test_what_is_sent_stands_for_a_heartbeat_but_proves_no_life(setup: Setup):
    setup.connect("p")
    for _ in range(20):
        setup.manager.sent("p-agent")
        setup.round(INTERVAL / 2)
    assert setup.sent == []
    (peer,) = setup.manager.list_peers()
    assert peer["since_proof_of_life_s"] == 20.0
    setup.manager.finished("p-agent")
    (peer,) = setup.manager.list_peers()
    assert peer["since_proof_of_life_s"] == 0.0


def test_a_finished_read_takes_back_a_disconnect_and_the_quarantine(
    setup: Setup, lines: Lines
):
    for _ in range(3):
        setup.connect("p")
        setup.lose("p")
        setup.release()
    assert setup.manager.handshake_refusal("p", WHERE, running=False)
    setup.connect("p")
    setup.read("x", "p")
    setup.lose("p")
    assert setup.manager.transfer_refusal("p") == "unreachable"
    setup.manager.finished("p-agent")
    assert setup.manager.transfer_refusal("p") is None
    assert setup.release() == []
    assert setup.manager.handshake_refusal("p", WHERE, running=False) is None
    assert not setup.manager.needs_check("p", WHERE)
    assert len(lines("NIXL peer reachable again, a transfer has finished: p")) == 1


def test_a_stuck_read_makes_a_suspect_that_is_never_released(
    setup: Setup, lines: Lines
):
    setup.connect("p")
    setup.connect("q")
    setup.read("stuck", "p")
    setup.round(59.9)
    assert setup.manager.transfer_refusal("p") is None
    setup.round(1.0)
    for _ in range(100):
        setup.round(100.0)
    assert setup.manager.transfer_refusal("p") == "suspect"
    assert setup.states() == {"p": "suspect", "q": "connected"}
    assert setup.reported() == {
        "connected_peers": 2,
        "suspect_peers": 1,
        "deferred_peer_releases": 0,
    }
    assert setup.counted["peers_suspected"] == 1
    assert setup.counted["peers_released"] == 0
    (line,) = lines("NIXL peer suspect: p")
    assert "a transfer in flight for 60 s" in line
    # A suspect gets heartbeats: they are what finds it dead.
    assert "p-agent" in setup.sent
    setup.manager.finished("p-agent")
    assert setup.states()["p"] == "connected"
    assert len(lines("NIXL peer no longer suspect: p")) == 1


def test_a_suspicion_ends_with_its_read_in_the_next_look(setup: Setup, lines: Lines):
    setup.connect("p")
    setup.read("stuck", "p")
    setup.round(61)
    setup.transfers.closed("stuck")
    setup.round(1.0)
    assert setup.states() == {"p": "connected"}
    assert len(lines("NIXL peer no longer suspect: p")) == 1
    assert setup.reported()["suspect_peers"] == 0


# -- Handshakes ----------------------------------------------------------------------


def test_the_engine_itself_is_no_peer(setup: Setup):
    refusal = setup.manager.handshake_refusal("me", WHERE, running=False)
    assert refusal == "this engine itself"


def test_a_failed_handshake_quarantines_and_says_so(setup: Setup, lines: Lines):
    assert not setup.manager.needs_check("p", WHERE)
    setup.manager.handshake_failed("p", WHERE, TimeoutError("no answer"))
    assert setup.manager.needs_check("p", WHERE)
    refusal = setup.manager.handshake_refusal("p", WHERE, running=False)
    assert refusal == "quarantined for another 1.0 s"
    (line,) = lines("NIXL peer quarantined: p")
    assert "'remote_address': 'host:7000'" in line and "'refused_for_s': 1.0" in line
    setup.now += 1
    assert setup.manager.handshake_refusal("p", WHERE, running=False) is None
    setup.now += 10
    assert setup.manager.handshake_refusal("p", WHERE, running=True) is not None
    setup.manager.handshake_answered("p")
    assert setup.manager.handshake_refusal("p", WHERE, running=True) is None


def test_a_reconnected_peer_is_counted_until_it_has_read(setup: Setup, lines: Lines):
    setup.connect("p")
    assert lines("NIXL peer reconnected") == []
    setup.lose("p")
    setup.release()
    setup.connect("p")
    assert setup.counted["peers_reconnected"] == 1
    assert len(lines("NIXL peer reconnected: p")) == 1
    setup.manager.finished("p-agent")
    setup.connect("p")
    assert setup.counted["peers_reconnected"] == 1


# -- The operator --------------------------------------------------------------------


def test_an_operator_names_an_engine_or_an_address(setup: Setup, lines: Lines):
    setup.connect("p")
    setup.connect("q")
    setup.manager.connected("elsewhere", ["e"], "host:7001")
    assert setup.manager.request_release("nobody") == []
    assert setup.manager.request_release(address="host:1") == []
    assert setup.manager.request_release() == []
    assert setup.manager.request_release("p") == ["p"]
    assert setup.manager.request_release(address="host:7000") == ["p", "q"]
    assert setup.manager.transfer_refusal("q") == "releasing"
    # No read takes that back.
    setup.manager.finished("q-agent")
    assert sorted(setup.release()) == ["p", "q"]
    assert setup.states() == {"elsewhere": "connected"}
    assert len(lines("NIXL peer release requested: ")) == 2
    assert setup.counted["peers_unreachable"] == 0
    assert setup.counted["peers_released"] == 2


def test_a_peer_that_vllm_wants_gone_waits_for_its_reads(setup: Setup):
    setup.connect("p")
    setup.read("x", "p")
    setup.manager.mark_replaced("p", "it has registered its KV cache again")
    assert setup.manager.transfer_refusal("p") == "releasing" and setup.release() == []
    setup.manager.finished("p-agent")
    setup.transfers.closed("x")
    assert setup.release() == ["p"]


def test_gauges_are_reported_when_they_change_and_while_something_is_wrong(
    setup: Setup,
):
    assert setup.reported() == {}
    setup.connect("p")
    assert setup.reported() == {
        "connected_peers": 1,
        "suspect_peers": 0,
        "deferred_peer_releases": 0,
    }
    assert setup.reported() == {}
    setup.read("x", "p")
    setup.round(61)
    # Another rank's zero must not hide it: every step says so.
    for _ in range(3):
        assert setup.reported()["suspect_peers"] == 1
    setup.lose("p")
    setup.release()
    for _ in range(3):
        assert setup.reported()["deferred_peer_releases"] == 1
    setup.transfers.closed("x")
    setup.release()
    assert setup.reported() == {
        "connected_peers": 0,
        "suspect_peers": 0,
        "deferred_peer_releases": 0,
    }
    assert setup.reported() == {}


@pytest.mark.parametrize("written", ["[fd00::7]:5600", "fd00::7:5600"])
def test_an_ipv6_address_is_known_with_and_without_brackets(setup: Setup, written: str):
    setup.manager.connected("p", ["a"], "[fd00::7]:5600")
    assert setup.manager.request_release(address=written) == ["p"]
