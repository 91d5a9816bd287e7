# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The worker's steps against a fake NIXL agent: heartbeats, evidence, release."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from nixl._bindings import (
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlKVConnectorStats,
    NixlPullConnectorWorker,
    base_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlConnector,
    NixlConnectorWorker,
)

from .decoder import Decoder, make_decoder
from .fake_nixl import FakeNixl, PeerState
from .worker_factory import make_connector, make_vllm_config

Lines = Callable[[str], list[str]]

INTERVAL = 2.0
# A peer's jitter is at most a tenth of an interval.
FIRST_HEARTBEAT = 1.1 * INTERVAL
GONE = nixlRemoteDisconnectError("gone")


# -- Heartbeats ------------------------------------------------------------------


def test_nothing_is_sent_to_a_peer_just_connected(decoder: Decoder):
    decoder.connect("p")
    decoder.steps(INTERVAL - 0.1)
    assert decoder.nixl.called("send_notif") == []


def test_one_heartbeat_per_interval_without_drift(decoder: Decoder):
    decoder.connect("p")
    # Steps do not fall on the schedule: each heartbeat is a little late, none is lost
    # and the lateness does not add up.
    decoder.steps(FIRST_HEARTBEAT + 8 * INTERVAL, every=0.3)
    assert decoder.nixl.heartbeats() == 9


def test_a_late_step_sends_one_heartbeat_and_catches_up_none(decoder: Decoder):
    decoder.connect("p")
    decoder.step(10 * INTERVAL)
    decoder.step()
    assert decoder.nixl.heartbeats() == 1


def test_every_agent_of_a_peer_gets_the_empty_heartbeat(decoder: Decoder):
    decoder.connect("p", "a0", "a1", "a2", "a3")
    decoder.steps(FIRST_HEARTBEAT)
    assert {p.name: p.received for p in decoder.nixl.peers.values()} == {
        name: [b"HB:"] for name in ("a0", "a1", "a2", "a3")
    }


def test_a_read_counts_as_the_heartbeat(decoder: Decoder):
    decoder.connect("p")
    for i in range(20):
        decoder.request(f"r{i}", "p")
        decoder.step(INTERVAL / 2)
        decoder.nixl.finish_reads("p-agent")
    assert decoder.nixl.heartbeats() == 0


def test_a_lease_heartbeat_counts_as_the_heartbeat(decoder: Decoder):
    decoder.connect("p")
    for _ in range(20):
        decoder.lease_heartbeat("p", "remote-r")
        decoder.step(INTERVAL / 2)
    assert decoder.nixl.heartbeats() == 0
    assert decoder.nixl.peers["p-agent"].received == [b"HB:remote-r"] * 20


def test_peers_that_connected_together_come_due_apart(decoder: Decoder):
    for i in range(100):
        decoder.connect(f"p{i}")
    most, sent = 0, 0
    for _ in range(100):
        decoder.step(FIRST_HEARTBEAT / 100)
        now_sent = decoder.nixl.heartbeats()
        most, sent = max(most, now_sent - sent), now_sent
    assert sent == 100
    assert most < 20


def test_the_interval_to_an_idle_peer_grows_to_30_s_and_back(decoder: Decoder):
    decoder.connect("p")
    decoder.steps(600, every=1.0)
    before = decoder.nixl.heartbeats()
    assert before < 60
    decoder.steps(300, every=1.0)
    assert decoder.nixl.heartbeats() - before == 10
    decoder.request("r", "p")
    decoder.step(0.1)
    decoder.nixl.finish_reads("p-agent")
    before = decoder.nixl.heartbeats()
    decoder.steps(10 * INTERVAL, every=0.1)
    assert decoder.nixl.heartbeats() - before in (9, 10)


# -- One bounded round ---------------------------------------------------------------


def test_a_step_sends_a_bounded_number_of_heartbeats(decoder: Decoder):
    for i in range(100):
        decoder.connect(f"p{i}")
    decoder.step(10 * INTERVAL)
    assert decoder.nixl.heartbeats() == 32
    for _ in range(3):
        decoder.step()
    assert decoder.nixl.heartbeats() == 100


@pytest.mark.parametrize("idle", [False, True])
def test_a_hundred_peers_that_die_at_once_are_released_one_a_round(
    decoder: Decoder, idle: bool
):
    for i in range(100):
        decoder.connect(f"p{i}")
    decoder.kill()
    decoder.clock.now += 10 * INTERVAL
    run = decoder.idle_round if idle else decoder.step
    for _ in range(100):
        before = len(decoder.connected), len(decoder.nixl.called("send_notif"))
        run()
        assert before[0] - len(decoder.connected) <= 1
        assert len(decoder.nixl.called("send_notif")) - before[1] <= 1
    assert decoder.connected == set()


# -- Release -----------------------------------------------------------------------


def test_a_dead_peer_is_released(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    decoder.nixl.peers["a1"].die()
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.is_clean("p")
    assert sorted(decoder.nixl.called("remove_remote_agent")) == ["a0", "a1"]
    assert not any(d.open for d in decoder.nixl.dlists.values() if d.agent[0] == "a")


def test_a_dying_peer_is_released_at_the_first_send_that_fails(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].die(sends_left=2)
    decoder.steps(FIRST_HEARTBEAT + INTERVAL)
    assert decoder.connected == {"p"}
    decoder.steps(INTERVAL)
    assert decoder.connected == set()


def test_lost_metadata_is_released_too(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].state = PeerState.INVALIDATED
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.is_clean("p")


def test_a_dead_peer_is_kept_while_a_read_is_in_flight(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    # Only the operator's word outlasts a read that finishes.
    assert decoder.worker.release_peers("p")["result"] == "busy"
    decoder.steps(FIRST_HEARTBEAT + INTERVAL)
    assert decoder.connected == {"p"}
    assert decoder.nixl.heartbeats() == 0
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.is_clean("p")


def test_new_reads_from_a_peer_whose_release_is_deferred_fail_at_once(
    decoder: Decoder,
):
    decoder.break_under_a_read()
    decoder.request("late", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["late"]
    assert decoder.worker.get_block_ids_with_load_errors() == {2}
    assert decoder.nixl.open_handles("p-agent") == 1
    assert decoder.counted()["peer_requests_refused"] == 1


def test_a_read_that_finishes_after_the_verdict_takes_it_back(
    decoder: Decoder, lines: Lines
):
    """One endpoint failed for a moment, one read is stuck, the others finish."""
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.request("flows", "p", blocks=(2,))
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE]
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.states() == {"p": "unreachable"}
    decoder.nixl.finish_one_read("p-agent", newest=True)
    decoder.step()
    assert decoder.finished == ["flows"]
    assert decoder.states() == {"p": "connected"}
    assert len(lines("NIXL peer reachable again, a transfer has finished: p")) == 1
    decoder.request("next", "p", blocks=(3,))
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert sorted(decoder.finished) == ["flows", "next", "stuck"]
    assert decoder.failed == []


def test_a_peer_that_is_dead_all_the_same_is_found_an_interval_later(
    decoder: Decoder,
):
    """Over cuda_ipc a mapping outlives its process, so a read of it finishes."""
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE, GONE]
    decoder.steps(FIRST_HEARTBEAT)
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.states() == {"p": "connected"}
    decoder.steps(INTERVAL)
    assert decoder.is_clean("p")


def test_a_read_that_fails_releases_its_peer_in_the_same_step(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.kill("p")
    decoder.step()
    assert decoder.failed == ["r"]
    assert decoder.worker.get_block_ids_with_load_errors() == {0, 1}
    assert decoder.is_clean("p")


@pytest.mark.parametrize("call", ["make_prepped_xfer", "transfer"])
@pytest.mark.parametrize("error", [nixlRemoteDisconnectError, nixlNotFoundError])
def test_a_read_that_cannot_be_posted_releases_its_peer(
    decoder: Decoder, call: str, error: type[Exception]
):
    decoder.connect("p")
    decoder.nixl.raises[call] = [error("gone")]
    decoder.request("r", "p")
    decoder.step()
    assert decoder.failed == ["r"]
    assert decoder.is_clean("p")


def test_a_failed_lease_heartbeat_releases_its_peer(decoder: Decoder):
    decoder.connect("p")
    decoder.kill("p")
    decoder.lease_heartbeat("p", "remote-r")
    decoder.step()
    assert decoder.is_clean("p")


def test_a_failed_notification_releases_its_peer(decoder: Decoder):
    decoder.connect("p")
    decoder.kill("p")
    # A full prefix cache hit reads nothing and only notifies the prefill.
    decoder.request("r", "p", blocks=())
    decoder.step()
    assert decoder.finished == ["r"] and decoder.failed == []
    assert decoder.is_clean("p")


@pytest.mark.parametrize(
    "error",
    [nixlBackendError("NIXL_ERR_BACKEND"), RuntimeError("BAD_STATUS"), OSError("?")],
)
def test_untyped_errors_never_release(decoder: Decoder, error: Exception, lines: Lines):
    decoder.connect("p")
    decoder.nixl.raises["send_notif"] = [error] * 1000
    decoder.steps(100 * INTERVAL, every=INTERVAL)
    assert decoder.connected == {"p"}
    assert len(lines("NIXL peer error, not treated as a disconnect: p")) == 1


def test_an_untyped_error_of_a_read_does_not_release(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.raises["transfer"] = [RuntimeError("BAD_STATUS")]
    decoder.request("r", "p")
    decoder.step()
    assert decoder.failed == ["r"]
    assert decoder.connected == {"p"}


def test_of_two_peers_only_the_dead_one_goes(decoder: Decoder):
    decoder.connect("dead")
    decoder.connect("alive")
    decoder.kill("dead")
    decoder.request("r", "alive")
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.connected == {"alive"}
    decoder.nixl.finish_reads("alive-agent")
    decoder.step()
    assert decoder.finished == ["r"]


def test_notification_only_peers_are_released(decoder: Decoder):
    """They have agents, but no descriptor lists (vllm#49345)."""
    decoder.connect("p")
    decoder.worker.dst_xfer_side_handles.pop("p")
    decoder.kill("p")
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.is_clean("p")


def test_release_of_an_unknown_engine_is_harmless(decoder: Decoder):
    decoder.worker._cleanup_remote_engine("nobody")
    decoder.worker._release_unreachable_remote_engines()
    assert decoder.nixl.called("remove_remote_agent") == []


def test_a_nixl_error_during_release_leaves_nothing_else_behind(
    decoder: Decoder, lines: Lines
):
    decoder.connect("p", "a0", "a1")
    decoder.nixl.peers["a0"].die()
    decoder.nixl.raises["release_dlist_handle"] = [nixlBackendError("?")]
    decoder.nixl.raises["remove_remote_agent"] = [nixlBackendError("?")]
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.is_clean("p")
    assert "a1" in decoder.nixl.called("remove_remote_agent")
    assert len(lines("NIXL could not fully unload agent a0")) == 2


def test_nothing_is_released_while_a_handshake_to_the_peer_runs(decoder: Decoder):
    decoder.connect("p")
    decoder.connect("q")
    decoder.worker._handshake_futures["p"] = object()
    decoder.kill()
    decoder.steps(FIRST_HEARTBEAT)
    decoder.step()
    # A handshake that hangs does not pin another peer's state.
    assert decoder.connected == {"p"}
    del decoder.worker._handshake_futures["p"]
    decoder.step()
    assert decoder.connected == set()


def test_ranks_with_engine_ids_of_their_own_go_alone(decoder: Decoder):
    """vllm#39907: one dead rank must not take the living one with it."""
    decoder.connect("p_dp0", port=7000)
    decoder.connect("p_dp1", port=7001)
    decoder.kill("p_dp0")
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.connected == {"p_dp1"}


def test_errors_at_any_call_of_a_step_stay_inside_it(decoder: Decoder):
    """vllm#28120, #41853: a peer's failure ended the decoder's engine."""
    for call in (
        "get_new_notifs",
        "check_xfer_state",
        "send_notif",
        "transfer",
        "make_prepped_xfer",
        "release_xfer_handle",
        "release_dlist_handle",
        "remove_remote_agent",
        "check_remote_metadata",
    ):
        for error in (nixlRemoteDisconnectError, nixlBackendError, nixlNotFoundError):
            decoder.connect("p")
            decoder.nixl.raises[call] = [error("?")]
            decoder.request(f"{call}-{error.__name__}", "p")
            decoder.steps(FIRST_HEARTBEAT, every=0.5)
            decoder.nixl.raises.clear()
            decoder.nixl.finish_reads("p-agent")
            decoder.steps(0.5)
            decoder.clock.now += 1000
    assert len(decoder.finished) + len(decoder.failed) == 27
    assert len(set(decoder.finished + decoder.failed)) == 27


def test_a_peer_that_stays_dead_makes_few_log_lines(
    decoder: Decoder, lines: Lines, caplog: pytest.LogCaptureFixture
):
    """llm-d#187: ten million lines after all prefills had crashed."""
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE] * 10**4
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    caplog.clear()
    decoder.steps(10_000 * 0.1)
    assert decoder.connected == {"p"}
    assert len(caplog.records) <= 5
    assert len(lines("NIXL peer unreachable: p")) == 1
    assert len(lines("NIXL peer release deferred by in-flight reads: p")) == 1


def test_what_a_release_logs(decoder: Decoder, lines: Lines):
    decoder.connect("p", "a0", "a1", port=7000)
    decoder.nixl.peers["a1"].die()
    decoder.steps(FIRST_HEARTBEAT)
    (found,) = lines("NIXL peer unreachable: p")
    (released,) = lines("NIXL peer released: p")
    for fact in ("'remote_address': '127.0.0.1:7000'", "['a0', 'a1']", "'a1'"):
        assert fact in found
    assert "nixlRemoteDisconnectError from send_notif" in found
    for fact in ("'released_dlists': 2", "'deferred_s': 0.0", "release_ms"):
        assert fact in released


def test_leases_are_renewed_while_a_read_defers_the_release(decoder: Decoder):
    """Else the prefill could free the blocks under a read that still ends well."""
    decoder.break_under_a_read()
    decoder.lease_heartbeat("p", "remote-r")
    decoder.step()
    assert decoder.nixl.peers["p-agent"].received == [b"HB:remote-r"]


@pytest.mark.skipif(
    "registration_generation" not in RemoteMeta.__dataclass_fields__,
    reason="vLLM has sleep mode for NIXL from 0.33 on",
)
def test_a_new_registration_releases_nothing_under_a_read(decoder: Decoder):
    decoder.connect("p")
    decoder.request("open", "p")
    decoder.step()
    decoder.request("newer", "p", blocks=(2,))
    decoder.metadata.reqs_to_recv["newer"].remote.registration_generation = 1
    decoder.step()
    assert decoder.failed == ["newer"] and decoder.connected == {"p"}
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["open"]
    assert decoder.is_clean("p")


@pytest.mark.skipif(
    not hasattr(NixlPullConnectorWorker, "unregister_kv_caches"),
    reason="vLLM has sleep mode for NIXL from 0.33 on",
)
def test_the_kv_cache_is_not_unregistered_under_a_read(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    with pytest.raises(RuntimeError, match=r"Transfers with \['p'\] are in flight"):
        decoder.worker.unregister_kv_caches()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    decoder.worker.unregister_kv_caches()
    assert decoder.is_clean("p")
    decoder.worker.restore_kv_caches()


# -- Suspects --------------------------------------------------------------------


def stick(decoder: Decoder, engine_id: str = "p") -> None:
    """Have a read of a peer that hangs be in flight for more than a minute."""
    decoder.connect(engine_id)
    decoder.request("stuck", engine_id)
    decoder.step()
    decoder.nixl.peers[f"{engine_id}-agent"].state = PeerState.HUNG
    decoder.steps(62, every=0.5)


def test_a_peer_with_a_stuck_read_is_suspect_and_refuses_new_ones(
    decoder: Decoder, lines: Lines
):
    stick(decoder)
    assert decoder.states() == {"p": "suspect"}
    decoder.request("next", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["next"]
    counted = decoder.counted()
    assert counted["peers_suspected"] == counted["peer_requests_refused"] == 1
    assert counted["suspect_peers"] == 1
    # Nothing is released, however long it takes: the read's data may still come.
    decoder.steps(3600, every=30)
    assert decoder.connected == {"p"}
    assert len(lines("NIXL peer suspect: p")) == 1


def test_whatever_finishes_lifts_the_suspicion_without_a_handshake(
    decoder: Decoder, lines: Lines
):
    stick(decoder)
    assert decoder.counted()["suspect_peers"] == 1
    decoder.nixl.peers["p-agent"].state = PeerState.ALIVE
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    decoder.request("next", "p", blocks=(2,))
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["stuck", "next"] and decoder.failed == []
    assert decoder.attempts == ["p"]
    assert decoder.counted()["suspect_peers"] == 0
    assert len(lines("NIXL peer no longer suspect: p")) == 1


def test_a_suspect_whose_read_fails_without_a_type_is_used_again(decoder: Decoder):
    stick(decoder)
    decoder.nixl.raises["check_xfer_state"] = [nixlBackendError("?")]
    decoder.steps(1.5)
    assert decoder.failed == ["stuck"]
    assert decoder.states() == {"p": "connected"}


def test_a_suspect_that_is_reported_dead_is_released(decoder: Decoder):
    stick(decoder)
    decoder.kill("p")
    decoder.step()
    assert decoder.failed == ["stuck"]
    assert decoder.is_clean("p")


def test_a_slow_peer_whose_other_reads_finish_is_never_suspect(decoder: Decoder):
    decoder.connect("p")
    decoder.request("slow", "p")
    decoder.step()
    for i in range(10):
        decoder.request(f"r{i}", "p", blocks=(2,))
        decoder.step(30)
        decoder.nixl.finish_one_read("p-agent", newest=True)
        decoder.steps(1)
    assert len(decoder.finished) == 10 and decoder.failed == []


def test_an_outage_of_50_s_loses_nothing(decoder: Decoder):
    decoder.connect("p")
    decoder.request("before", "p")
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    decoder.steps(50)
    decoder.request("during", "p", blocks=(2,))
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.ALIVE
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert sorted(decoder.finished) == ["before", "during"]
    assert decoder.attempts == ["p"]


def test_an_idle_peer_is_never_suspected(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    decoder.steps(600, every=1)
    assert decoder.states() == {"p": "connected"}


# -- vLLM's own release of peers ---------------------------------------------------


def test_the_stock_pass_may_release_the_same_peer_first(decoder: Decoder):
    decoder.connect("old", port=7000)
    decoder.request("r", "old")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE]
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.states()["old"] == "unreachable"
    # A replacement at the same address makes the stock pass release it.
    decoder.connect("new", port=7000)
    decoder.steps(1)
    assert decoder.connected == {"old", "new"}
    decoder.kill("old")
    decoder.step()
    decoder.step()
    assert decoder.connected == {"new"}
    assert decoder.is_clean("old")
    assert decoder.nixl.called("remove_remote_agent") == ["old-agent"]


@pytest.mark.skipif(
    not hasattr(NixlPullConnectorWorker, "_mark_remote_engine_invalid"),
    reason="vLLM releases locally invalid peers from 0.32 on",
)
def test_neither_releases_a_locally_invalid_peer_under_a_read_of_the_other(
    decoder: Decoder,
):
    """Both find the peer after the failed read."""
    decoder.connect("p")
    decoder.request("open", "p")
    decoder.step()
    decoder.nixl.raises["make_prepped_xfer"] = [nixlNotFoundError("?")]
    decoder.nixl.metadata_is_lost("p-agent")
    decoder.request("fails", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["fails"]
    assert "p" in decoder.worker._invalid_remote_engines
    assert decoder.states() == {"p": "unreachable"}
    # Both fail new reads at once, and both wait for the one in flight.
    decoder.request("late", "p", blocks=(3,))
    decoder.steps(5)
    assert decoder.failed == ["fails", "late"] and decoder.connected == {"p"}
    decoder.nixl.raises["check_xfer_state"] = [nixlNotFoundError("?")]
    decoder.steps(1)
    assert decoder.is_clean("p")
    assert decoder.nixl.called("remove_remote_agent") == ["p-agent"]
    assert decoder.worker._invalid_remote_engines == set()


# -- Off, and built without a constructor ------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0])
def test_zero_builds_the_stock_worker(monkeypatch: pytest.MonkeyPatch, value: float):
    monkeypatch.setattr(base_worker, "NixlWrapper", FakeNixl)
    monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    connector = make_connector("d", peer_heartbeat_interval=value)
    assert type(connector.connector_worker) is NixlPullConnectorWorker


@pytest.mark.parametrize("value", [0.5, 7])
def test_the_interval_is_taken_from_the_config(
    monkeypatch: pytest.MonkeyPatch, value: float
):
    decoder = make_decoder(monkeypatch, peer_heartbeat_interval=value)
    decoder.connect("p")
    decoder.steps(0.99 * value, every=value / 100)
    assert decoder.nixl.heartbeats() == 0
    decoder.steps(0.12 * value, every=value / 100)
    assert decoder.nixl.heartbeats() == 1


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize(
    "value", [-1, math.nan, math.inf, 5e-324, True, "2", None, [2]]
)
def test_a_bad_interval_is_refused_at_start(value: Any, role: KVConnectorRole):
    config = make_vllm_config("d", peer_heartbeat_interval=value)
    with pytest.raises(ValueError) as e:
        NixlConnector(config, role, None)
    for part in ("peer_heartbeat_interval", repr(value), "finite number", "0.01"):
        assert part in str(e.value)


def test_a_worker_built_without_its_constructor_is_the_stock_worker(decoder: Decoder):
    """Tests of forks set the stock attributes only, on object.__new__."""
    bare = object.__new__(NixlConnectorWorker)
    for name, value in vars(decoder.worker).items():
        if name not in ("_peers", "_step_lock", "_agent", "_monitor", "_loading"):
            setattr(bare, name, value)
    bare.nixl_wrapper = decoder.nixl
    bare.xfer_stats = NixlKVConnectorStats()
    decoder.worker = bare
    decoder.prefills["p"] = ["p-agent"]
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    decoder.kill("p")
    decoder.steps(10 * FIRST_HEARTBEAT)
    assert decoder.connected == {"p"} and decoder.nixl.heartbeats() == 0
    bare.shutdown()


def test_a_release_that_the_operator_asks_for_outlasts_a_read_that_finishes(
    decoder: Decoder,
):
    """Also of a peer that was unreachable before: it was answered that it goes."""
    decoder.break_under_a_read()
    assert decoder.worker.release_peers("p")["result"] == "busy"
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.is_clean("p")


def test_a_peer_whose_release_is_deferred_is_not_suspect_as_well(
    decoder: Decoder, lines: Lines
):
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE]
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    decoder.steps(120, every=0.5)
    assert decoder.states() == {"p": "unreachable"}
    assert lines("NIXL peer suspect") == []
    assert decoder.counted()["suspect_peers"] == 0
