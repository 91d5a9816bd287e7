# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The worker's steps against a fake NIXL agent: heartbeats, evidence, release."""

import logging
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from decoder import Decoder, make_decoder
from fake_nixl import FakeNixl, PeerState
from nixl._bindings import (
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from worker_factory import make_connector, make_vllm_config

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorRole,
    nixl_connector,
)
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import Verdict

INTERVAL = 2.0
# A peer's place within the spread of an interval is at most this late.
FIRST_BEAT = 1.1 * INTERVAL


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM's loggers print, which do not propagate to the root."""
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog
    vllm_logger.removeHandler(caplog.handler)


def lines(logs: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [m for r in logs.records if (m := r.getMessage()).startswith(start)]


# -- Heartbeats ------------------------------------------------------------------


def test_nothing_is_sent_to_a_peer_just_connected(decoder: Decoder):
    decoder.connect("p")
    decoder.steps(INTERVAL - 0.1)
    assert decoder.nixl.called("send_notif") == []


def test_one_heartbeat_per_interval_without_drift(decoder: Decoder):
    decoder.connect("p")
    # Steps do not fall on the beat: each heartbeat is a little late, none is lost
    # and the lateness does not add up.
    decoder.steps(FIRST_BEAT + 8 * INTERVAL, every=0.3)
    assert decoder.nixl.heartbeats() == 9


def test_a_late_step_sends_one_heartbeat_and_catches_up_none(decoder: Decoder):
    decoder.connect("p")
    decoder.step(10 * INTERVAL)
    decoder.step()
    assert decoder.nixl.heartbeats() == 1


def test_every_agent_of_a_peer_gets_the_empty_heartbeat(decoder: Decoder):
    decoder.connect("p", "a0", "a1", "a2", "a3")
    decoder.steps(FIRST_BEAT)
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
        decoder.step(FIRST_BEAT / 100)
        now_sent = decoder.nixl.heartbeats()
        most, sent = max(most, now_sent - sent), now_sent
    assert sent == 100
    assert most < 20


def test_a_step_sends_a_bounded_number_of_heartbeats(decoder: Decoder):
    for i in range(100):
        decoder.connect(f"p{i}")
    decoder.step(10 * INTERVAL)
    assert decoder.nixl.heartbeats() == 32
    for _ in range(3):
        decoder.step()
    assert decoder.nixl.heartbeats() == 100


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


def test_a_fork_may_connect_a_peer_behind_our_back(decoder: Decoder):
    """Tests of forks put engines into the stock maps themselves."""
    decoder.nixl.add_remote_agent(b"x-agent/0")
    decoder.worker._remote_agents["x"] = {(0, 0): "x-agent"}
    decoder.worker._engine_by_address["p", 7000] = "x"
    decoder.step()
    decoder.steps(FIRST_BEAT)
    assert decoder.nixl.heartbeats("x-agent") == 1


# -- Release -----------------------------------------------------------------------


def test_a_dead_peer_is_released(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    decoder.nixl.peers["a1"].die()
    decoder.steps(FIRST_BEAT)
    assert decoder.is_clean("p")
    assert sorted(decoder.nixl.called("remove_remote_agent")) == ["a0", "a1"]
    assert not any(d.open for d in decoder.nixl.dlists.values() if d.agent[0] == "a")


def test_a_dying_peer_is_released_at_the_first_send_that_fails(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].die(sends_left=2)
    decoder.steps(FIRST_BEAT + INTERVAL)
    assert decoder.connected == {"p"}
    decoder.steps(INTERVAL)
    assert decoder.connected == set()


def test_lost_metadata_is_released_too(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].state = PeerState.INVALIDATED
    decoder.steps(FIRST_BEAT)
    assert decoder.is_clean("p")


def test_a_dead_peer_is_kept_while_a_read_is_in_flight(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    peer = decoder.nixl.peers["p-agent"]
    # The endpoint for notifications has failed; the read's own still lives.
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.steps(FIRST_BEAT + INTERVAL)
    assert decoder.worker._peers.lost and decoder.connected == {"p"}
    assert peer.received == []
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.is_clean("p")


def test_new_reads_from_a_held_peer_fail_at_once(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.steps(FIRST_BEAT)
    decoder.request("late", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["late"]
    assert decoder.worker.get_block_ids_with_load_errors() == {2}
    assert decoder.nixl.open_handles("p-agent") == 1


def test_a_read_that_fails_releases_its_peer_in_the_same_step(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.peers["p-agent"].die()
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
    decoder.nixl.peers["p-agent"].die()
    decoder.lease_heartbeat("p", "remote-r")
    decoder.step()
    assert decoder.is_clean("p")
    assert decoder.worker.nixl_wrapper is decoder.nixl


def test_a_failed_notification_releases_its_peer(decoder: Decoder):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].die()
    # A full prefix cache hit reads nothing and only notifies the prefill.
    decoder.request("r", "p", blocks=())
    decoder.step()
    assert decoder.finished == ["r"] and decoder.failed == []
    assert decoder.is_clean("p")


@pytest.mark.parametrize(
    "error",
    [nixlBackendError("NIXL_ERR_BACKEND"), RuntimeError("BAD_STATUS"), OSError("?")],
)
def test_untyped_errors_never_release(
    decoder: Decoder, error: Exception, logs: pytest.LogCaptureFixture
):
    decoder.connect("p")
    decoder.nixl.raises["send_notif"] = [error] * 1000
    decoder.steps(100 * INTERVAL, every=INTERVAL)
    assert decoder.connected == {"p"}
    assert len(lines(logs, "NIXL peer error, not taken for a disconnect: p")) == 1


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
    decoder.nixl.peers["dead-agent"].die()
    decoder.request("r", "alive")
    decoder.steps(FIRST_BEAT)
    assert decoder.connected == {"alive"}
    decoder.nixl.finish_reads("alive-agent")
    decoder.step()
    assert decoder.finished == ["r"]


def test_notification_only_peers_are_released(decoder: Decoder):
    """They have agents, but no descriptor lists (vllm#49345)."""
    decoder.connect("p")
    decoder.worker.dst_xfer_side_handles.pop("p")
    decoder.nixl.peers["p-agent"].die()
    decoder.steps(FIRST_BEAT)
    assert decoder.is_clean("p")


def test_the_stock_pass_may_release_the_same_peer_first(decoder: Decoder):
    decoder.connect("old", port=7000)
    decoder.nixl.peers["old-agent"].die()
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.worker._send_heartbeat("old")
    assert "old" in decoder.worker._peers.lost
    # A replacement at the same address makes the stock pass release it.
    decoder.connect("new", port=7000)
    decoder.step()
    assert decoder.connected == {"new"}
    assert decoder.is_clean("old")
    assert decoder.nixl.called("remove_remote_agent") == ["old-agent"]


def test_release_of_an_unknown_engine_is_harmless(decoder: Decoder):
    decoder.worker._cleanup_remote_engine("nobody")
    decoder.worker._release_unreachable_remote_engines()
    assert decoder.nixl.called("remove_remote_agent") == []


def test_a_nixl_error_during_release_leaves_nothing_else_behind(
    decoder: Decoder, logs: pytest.LogCaptureFixture
):
    decoder.connect("p", "a0", "a1")
    decoder.nixl.peers["a0"].die()
    decoder.nixl.raises["release_dlist_handle"] = [nixlBackendError("?")]
    decoder.nixl.raises["remove_remote_agent"] = [nixlBackendError("?")]
    decoder.steps(FIRST_BEAT)
    assert decoder.is_clean("p")
    assert "a1" in decoder.nixl.called("remove_remote_agent")
    assert len(lines(logs, "NIXL could not free all of peer p")) == 1


def test_nothing_is_released_while_a_handshake_to_the_peer_runs(decoder: Decoder):
    decoder.connect("p")
    decoder.connect("q")
    decoder.worker._handshake_futures["p"] = object()
    for agent in ("p-agent", "q-agent"):
        decoder.nixl.peers[agent].die()
    decoder.steps(FIRST_BEAT)
    # A handshake that hangs does not pin another peer's state.
    assert decoder.connected == {"p"}
    del decoder.worker._handshake_futures["p"]
    decoder.step()
    assert decoder.connected == set()


def test_ranks_with_engine_ids_of_their_own_go_alone(decoder: Decoder):
    """vllm#39907: one dead rank must not take the living one with it."""
    decoder.connect("p_dp0", port=7000)
    decoder.connect("p_dp1", port=7001)
    decoder.nixl.peers["p_dp0-agent"].die()
    decoder.steps(FIRST_BEAT)
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
            decoder.steps(FIRST_BEAT, every=0.5)
            decoder.nixl.raises.clear()
            decoder.nixl.finish_reads("p-agent")
            decoder.steps(0.5)
            decoder.clock.now += 1000
    assert len(decoder.finished) + len(decoder.failed) == 27
    assert len(set(decoder.finished + decoder.failed)) == 27


def test_a_peer_that_stays_dead_makes_few_log_lines(
    decoder: Decoder, logs: pytest.LogCaptureFixture
):
    """llm-d#187: ten million lines after all prefills had crashed."""
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")] * 10**4
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    logs.clear()
    decoder.steps(10_000 * 0.1)
    assert decoder.connected == {"p"}
    assert len(logs.records) <= 5
    assert len(lines(logs, "NIXL peer unreachable: p")) == 1
    assert len(lines(logs, "NIXL peer held by open reads: p")) == 1


def test_what_a_release_logs(decoder: Decoder, logs: pytest.LogCaptureFixture):
    decoder.connect("p", "a0", "a1", port=7000)
    decoder.nixl.peers["a1"].die()
    decoder.steps(FIRST_BEAT)
    (found,) = lines(logs, "NIXL peer unreachable: p")
    (released,) = lines(logs, "NIXL peer released: p")
    for fact in ("'remote_address': 'p:7000'", "['a0', 'a1']", "heartbeat", "'a1'"):
        assert fact in found
    for fact in ("'released_dlists': 2", "'held_by_reads_s': 0.0", "release_ms"):
        assert fact in released


def test_a_silent_peer_that_answers_while_held_is_used_again(decoder: Decoder):
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    peers = decoder.worker._peers
    peers.lose("p", Verdict.SILENT, "no answer", decoder.clock.now)
    decoder.step(60)
    peer = peers.get("p")
    assert peers.wants_question(peer, decoder.clock.now, peer.connected_at)
    peers.heard("p", decoder.clock.now)
    decoder.request("r", "p", blocks=(2,))
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert sorted(decoder.finished) == ["r", "stuck"] and decoder.failed == []


def test_leases_are_renewed_while_a_read_holds_the_release(decoder: Decoder):
    """Else the prefill could free the blocks under a read that still ends well."""
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.steps(FIRST_BEAT)
    assert "p" in decoder.worker._peers.lost
    decoder.lease_heartbeat("p", "remote-r")
    decoder.step()
    assert decoder.nixl.peers["p-agent"].received == [b"HB:remote-r"]


@pytest.mark.skipif(
    "registration_generation" not in RemoteMeta.__dataclass_fields__,
    reason="vLLM has sleep mode for NIXL from 0.33 on",
)
def test_a_new_registration_releases_nothing_under_an_open_read(decoder: Decoder):
    decoder.connect("p")
    decoder.request("open", "p")
    decoder.step()
    decoder.request("newer", "p", blocks=(2,))
    decoder._metadata.reqs_to_recv["newer"].remote.registration_generation = 1
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
def test_the_kv_cache_is_not_unregistered_under_an_open_read(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    with pytest.raises(RuntimeError, match=r"Reads from \['p'\] are open"):
        decoder.worker.unregister_kv_caches()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    decoder.worker.unregister_kv_caches()
    assert decoder.is_clean("p")
    decoder.worker.restore_kv_caches()


def test_kept_notifications_do_not_wait_for_nixl(decoder: Decoder):
    decoder.worker._reqs_to_process.add("sent")
    decoder.worker._kept_notifs["d"] = [b"sent:1"]
    decoder.nixl.raises["get_new_notifs"] = [nixlBackendError("?")]
    assert decoder.step().finished_sending == {"sent"}


# -- Handshakes --------------------------------------------------------------------


def test_a_released_peer_connects_again_with_its_next_request(
    decoder: Decoder, logs: pytest.LogCaptureFixture
):
    """The connection broke, the peer lives (vllm#52234)."""
    decoder.connect("p")
    decoder.lose_all()
    decoder.read("r", "p")
    assert decoder.finished == ["r"] and decoder.failed == []
    assert len(lines(logs, "NIXL peer reconnected: p")) == 1


def test_all_connections_break_in_one_tick_and_all_heal(decoder: Decoder):
    engines = [f"p{i}" for i in range(8)]
    for engine in engines:
        decoder.connect(engine)
    decoder.lose_all()
    for engine in engines:
        decoder.request(f"r-{engine}", engine)
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    for engine in engines:
        decoder.nixl.finish_reads(f"{engine}-agent")
    decoder.step()
    assert sorted(decoder.finished) == [f"r-{engine}" for engine in engines]


def test_requests_to_a_quarantined_engine_fail_at_once(decoder: Decoder):
    decoder.connect("p")
    decoder.lose_all()
    decoder.prefills["p"] = TimeoutError("no answer")
    attempts = []
    for i in range(1000):
        decoder.request(f"r{i}", "p", blocks=(i,))
        decoder.step(0.1)
        if decoder.handshakes.pending or decoder.retries.pending:
            attempts.append(decoder.clock.now)
            decoder.run_handshakes()
            decoder.step()
        assert decoder.failed[-1] == f"r{i}"
    waits = [round(b - a) for a, b in zip(attempts, attempts[1:])]
    assert waits == [1, 2, 4, 8, 16, 32]
    assert len(decoder.failed) == len(set(decoder.failed)) == 1000
    assert decoder.worker.get_block_ids_with_load_errors() == set(range(1000))


def test_only_who_comes_with_the_trial_waits_for_it(decoder: Decoder):
    decoder.connect("p")
    decoder.lose_all()
    decoder.prefills["p"] = TimeoutError("no answer")
    decoder.request("first", "p")
    decoder.step()
    decoder.run_handshakes()
    decoder.step(2.0)
    decoder.request("trial", "p")
    decoder.request("joins", "p")
    decoder.step()
    assert len(decoder.retries.pending) == 1
    decoder.request("late", "p")
    decoder.step(0.6)
    assert decoder.failed == ["first", "late"]
    # The peer is back: those that waited are served.
    decoder.prefills["p"] = ["p-agent"]
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["joins", "trial"]


def test_a_new_peer_never_queues_behind_attempts_at_dead_ones(decoder: Decoder):
    dead = [f"dead{i}" for i in range(10)]
    for engine in dead:
        decoder.connect(engine)
    decoder.lose_all()
    for engine in dead:
        decoder.request(f"r-{engine}", engine)
    decoder.prefills["healthy"] = ["healthy-agent"]
    decoder.request("r", "healthy")
    decoder.step()
    assert [args[3] for _, _, args in decoder.handshakes.pending] == ["healthy"]
    assert [args[3] for _, _, args in decoder.retries.pending] == dead


def test_a_live_listener_passes_the_probe():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        nixl_connector._probe_listener(
            "127.0.0.1", listener.bind_to_random_port("tcp://127.0.0.1")
        )


@pytest.mark.parametrize("state", ["dead", "dying", "stopped"])
def test_no_other_does(state: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_connector, "_PROBE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if state == "dead":
            listener.close()
        dying = threading.Thread(target=lambda: listener.accept()[0].close())
        if state == "dying":
            dying.start()
        with pytest.raises(OSError):
            nixl_connector._probe_listener("127.0.0.1", port)
        if state == "dying":
            dying.join()


def test_a_finished_read_clears_the_quarantine(decoder: Decoder):
    decoder.prefills["p"] = TimeoutError("no answer")
    for _ in range(3):
        decoder.connect("p")
        decoder.clock.now += 60
    decoder.prefills["p"] = ["p-agent"]
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert not decoder.worker._peers.has_history("p")


def test_a_connection_that_keeps_breaking_backs_off(decoder: Decoder):
    """Each remove/add cycle leaves file descriptors behind in NIXL."""
    decoder.prefills["p"] = ["p-agent"]
    decoder.nixl.states["p-agent"] = PeerState.FAILED
    for i in range(3000):
        decoder.request(f"r{i}", "p")
        decoder.step(0.1)
        decoder.run_handshakes()
    assert len(decoder.attempts) <= 12
    decoder.step()
    assert len(decoder.failed) == len(set(decoder.failed))


def test_a_handshake_that_fails_half_way_leaves_nothing_loaded(decoder: Decoder):
    """The peer died between two of its ranks: its rkeys must not stay."""
    decoder.prefills["p"] = ["a0", "a1", TimeoutError("no answer"), "a3"]
    decoder.connect("p")
    assert decoder.connected == set()
    assert decoder.nixl.peers == {}
    assert decoder.is_clean("p")
    decoder.prefills["p"] = ["b0", "b1", "b2", "b3"]
    decoder.clock.now += 2
    decoder.connect("p")
    assert decoder.connected == {"p"}


def test_an_agent_that_loads_but_does_not_fit_leaves_nothing_loaded(decoder: Decoder):
    decoder.nixl.raises["prep_xfer_dlist"] = [nixlRemoteDisconnectError("gone")]
    decoder.connect("p")
    assert decoder.nixl.peers == {}
    assert decoder.is_clean("p")


def test_a_request_that_waits_behind_a_released_handshake_shakes_hands_again(
    decoder: Decoder,
):
    decoder.prefills["p"] = ["p-agent"]
    decoder.request("r", "p")
    decoder.step()
    decoder.run_handshakes()
    # Released between its handshake and the step that would have read.
    decoder.nixl.peers["p-agent"].die()
    decoder.worker._send_heartbeat("p")
    decoder.worker._release_unreachable_remote_engines()
    assert decoder.connected == set()
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"] and decoder.failed == []


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


def test_a_worker_built_without_its_constructor(decoder: Decoder):
    """Tests of forks set the stock attributes only, on object.__new__."""
    # Among them the stock ones that fixtures of vLLM's own tests leave out.
    ours = vars(NixlConnectorWorker).keys()
    assert {"_engine_last_active", "_handshake_lock", "_handshake_futures"} < ours
    bare = object.__new__(NixlConnectorWorker)
    for name, value in vars(decoder.worker).items():
        if name not in ours:
            setattr(bare, name, value)
    assert "_peers" not in vars(bare)
    bare.xfer_stats = NixlKVConnectorStats()  # what stock's constructor sets
    decoder.worker = bare
    decoder.prefills["p"] = ["p-agent"]
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    del bare.xfer_stats  # only a transfer needs it
    decoder.nixl.peers["p-agent"].die()
    decoder.steps(FIRST_BEAT)
    assert decoder.is_clean("p")
    bare.shutdown()
