# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Handshakes of the worker: refused, joined, failed; and the engine's own id."""

import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from nixl._bindings import nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import agent, handshake

from .decoder import HOST, Decoder
from .fake_nixl import PeerState
from .gate import LONG, Gate, in_thread

Lines = Callable[[str], list[str]]

INTERVAL = 2.0
FIRST_HEARTBEAT = 1.1 * INTERVAL


# -- The engine's own id -------------------------------------------------------------


@pytest.mark.parametrize("port", [5600, 1])
def test_a_request_that_names_this_engine_fails_alone(
    decoder: Decoder, lines: Lines, port: int
):
    """A router may pick one instance for both phases (llm-d-router#2135)."""
    decoder.connect("p")
    decoder.prefills["decoder"] = TimeoutError("no answer")
    for i in range(3):
        decoder.request(f"own{i}", "decoder", blocks=(2,), port=port)
        decoder.lease_heartbeat("decoder", "r", port=port)
        decoder.step(0.1)
        decoder.run_handshakes()
        decoder.step(0.1)
    assert decoder.failed == ["own0", "own1", "own2"]
    assert decoder.attempts == ["p"]
    assert decoder.worker.release_peers("decoder")["result"] == "unknown"
    for i in range(6):
        decoder.read(f"good{i}", "p")
    assert decoder.finished == [f"good{i}" for i in range(6)]
    assert decoder.states() == {"p": "connected"}
    assert len(lines("Refused a request that names this engine")) <= 1


@pytest.mark.parametrize(
    "where",
    [
        {"host": ["a", "list"]},
        {"port": {"a": "dict"}},
        {"port": None},
        {"host": 5 * "é"},
    ],
)
def test_a_request_with_a_senseless_address_fails_alone(
    decoder: Decoder, where: dict[str, Any]
):
    """Whoever may set ``kv_transfer_params`` may write anything there."""
    decoder.connect("p")
    decoder.prefills["odd"] = TypeError("no address")
    for i in range(2):
        decoder.request(f"odd{i}", "odd", blocks=(2,), **where)
        decoder.step()
        decoder.run_handshakes()
        decoder.step(2)
    assert decoder.failed == ["odd0", "odd1"]
    decoder.read("good", "p")
    assert decoder.finished == ["good"]


def test_a_long_engine_id_makes_no_long_line_of_ours(decoder: Decoder, lines: Lines):
    decoder.prefills["x" * 10**6] = TimeoutError("no answer")
    decoder.connect("x" * 10**6)
    (line,) = lines("NIXL peer quarantined: x")
    assert len(line) < 1000


def test_nothing_cleans_up_the_engine_itself(decoder: Decoder):
    decoder.connect("p")
    decoder.worker._cleanup_remote_engine("decoder")
    decoder.read("good", "p")
    assert decoder.finished == ["good"]


# -- Healing and quarantine ------------------------------------------------------------


def test_a_released_peer_connects_again_with_its_next_request(
    decoder: Decoder, lines: Lines
):
    """The connection broke, the peer lives (vllm#52234)."""
    decoder.connect("p")
    decoder.release_all()
    decoder.read("r", "p")
    assert decoder.finished == ["r"] and decoder.failed == []
    assert len(lines("NIXL peer reconnected: p")) == 1


def test_all_connections_break_in_one_interval_and_all_heal(decoder: Decoder):
    engines = [f"p{i}" for i in range(8)]
    for engine in engines:
        decoder.connect(engine)
    decoder.release_all()
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
    decoder.release_all()
    decoder.counted()
    decoder.prefills["p"] = TimeoutError("no answer")
    attempts = []
    for i in range(1000):
        decoder.request(f"r{i}", "p", blocks=(i,))
        decoder.step(0.1)
        if decoder.handshakes.pending:
            attempts.append(decoder.clock.now)
            decoder.run_handshakes()
            decoder.step()
        assert decoder.failed[-1] == f"r{i}"
    waits = [round(b - a) for a, b in zip(attempts, attempts[1:])]
    assert waits == [1, 2, 4, 8, 16, 32]
    assert len(decoder.failed) == len(set(decoder.failed)) == 1000
    assert decoder.worker.get_block_ids_with_load_errors() == set(range(1000))
    refused = decoder.counted()["peer_requests_refused"]
    assert refused == 1000 - len(attempts)


def test_a_released_peer_that_connects_through_its_address_is_used_at_once(
    decoder: Decoder,
):
    decoder.prefills["p"] = TimeoutError("no answer")
    for _ in range(3):
        decoder.connect("p", port=6000)
        decoder.clock.now += 60
    decoder.prefills["p"] = ["p-agent"]
    decoder.read("r", "p")
    assert decoder.finished == ["r"]
    # The read has cleared the record: the next failure starts from the beginning.
    decoder.release_all()
    decoder.read("again", "p")
    assert decoder.finished == ["r", "again"]


def test_a_connection_that_keeps_breaking_backs_off(decoder: Decoder):
    """Each unload/load cycle leaves file descriptors behind in NIXL."""
    decoder.prefills["p"] = ["p-agent"]
    decoder.nixl.states["p-agent"] = PeerState.FAILED
    for i in range(3000):
        decoder.request(f"r{i}", "p")
        decoder.step(0.1)
        decoder.run_handshakes()
    assert len(decoder.attempts) <= 12
    decoder.step()
    assert len(decoder.failed) == len(set(decoder.failed))


def test_releases_that_the_operator_asks_for_quarantine_nobody(decoder: Decoder):
    decoder.connect("p", port=6000)
    for i in range(4):
        assert decoder.worker.release_peers("p")["result"] == "released"
        decoder.read(f"r{i}", "p")
    assert decoder.finished == ["r0", "r1", "r2", "r3"]


# -- Half-open attempts ------------------------------------------------------------


def quarantine(decoder: Decoder) -> None:
    """Have an engine released whose next handshake has failed."""
    decoder.connect("p", port=6000)
    decoder.release_all()
    decoder.prefills["p"] = TimeoutError("no answer")
    decoder.request("first", "p")
    decoder.step()
    decoder.run_handshakes()
    decoder.step(2.0)
    assert decoder.failed == ["first"]


def test_only_who_comes_with_an_unanswered_attempt_waits_for_it(decoder: Decoder):
    quarantine(decoder)
    decoder.request("attempt", "p")
    decoder.request("joins", "p")
    decoder.step()
    assert len(decoder.handshakes.pending) == 1
    decoder.request("late", "p")
    decoder.step(0.6)
    assert decoder.failed == ["first", "late"]
    # The peer is back: those that waited are served.
    decoder.prefills["p"] = ["p-agent"]
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["attempt", "joins"]


def test_a_request_joins_an_attempt_that_the_peer_has_answered(decoder: Decoder):
    """Loading a peer with many descriptors takes seconds."""
    quarantine(decoder)
    decoder.prefills["p"] = ["p-agent"]

    def requests_come_while_it_loads(*_: Any) -> None:
        decoder.request("late", "p", blocks=(3,))
        decoder.step(2.4)

    decoder.nixl.before["prep_xfer_dlist"] = requests_come_while_it_loads
    decoder.request("attempt", "p")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.failed == ["first"]
    assert decoder.finished == ["attempt", "late"]


# -- Addresses -----------------------------------------------------------------------


def test_a_wrong_address_hurts_only_itself(decoder: Decoder):
    """NAT: the address that a prefill binds is not the one to reach it at."""

    def answers(host: str, port: int) -> Any:
        return ["p-agent"] if port == 6000 else TimeoutError("no answer")

    decoder.prefills["p"] = answers
    decoder.request("wrong", "p", port=9)
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    # It is quarantined through that address, and through no other.
    decoder.request("wrong again", "p", port=9)
    decoder.step(0.1)
    decoder.step()
    assert decoder.failed == ["wrong", "wrong again"]
    decoder.read("right", "p", blocks=(3,), port=6000)
    assert decoder.finished == ["right"]
    assert decoder.attempts == ["p", "p"]


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "?"), zmq.ZMQError(24)])
def test_missing_descriptors_say_nothing_about_a_peer(
    decoder: Decoder, error: Exception
):
    decoder.prefills["p"] = error
    decoder.request("unlucky", "p")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    assert decoder.failed == ["unlucky"]
    decoder.prefills["p"] = ["p-agent"]
    decoder.read("next", "p", blocks=(3,))
    assert decoder.finished == ["next"]


def test_a_name_that_does_not_resolve_says_nothing_about_a_peer(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
):
    """ZMQ reports it as a time-out."""

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "?")

    decoder.prefills["p"] = zmq.Again()
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    decoder.request("unlucky", "p", host="prefill-0")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    assert decoder.failed == ["unlucky"]
    decoder.prefills["p"] = ["p-agent"]
    decoder.read("next", "p", blocks=(3,), host="prefill-0")
    assert decoder.finished == ["next"]


@pytest.mark.parametrize(
    "bind, hosts",
    [
        ("127.0.0.1", ["127.0.0.1", "localhost"]),
        ("[::1]", ["::1", "[::1]"]),
    ],
)
def test_a_live_listener_passes_the_check(bind: str, hosts: list[str]):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listener.setsockopt(zmq.IPV6, 1)
        port = listener.bind_to_random_port(f"tcp://{bind}")
        for host in hosts:
            handshake.check_listener(host, port)


@pytest.mark.parametrize("state", ["dead", "dying", "stopped"])
def test_no_other_does(state: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handshake, "_CONNECT_TIMEOUT_S", 0.05)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        if state == "dead":
            listener.close()
        dying = threading.Thread(target=lambda: listener.accept()[0].close())
        if state == "dying":
            dying.start()
        with pytest.raises(OSError):
            handshake.check_listener(HOST, port)
        if state == "dying":
            dying.join()


# -- What a handshake leaves behind ------------------------------------------------


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


def test_an_engine_id_that_comes_back_is_another_agent(decoder: Decoder):
    """A configured engine id restarts in the dark: identity is the agent."""
    decoder.connect("p", "old-agent", port=6000)
    decoder.nixl.peers["old-agent"].state = PeerState.HUNG
    decoder.prefills["p"] = ["new-agent"]
    decoder.steps(3 * INTERVAL)
    # Nothing has told of the dead one yet; then UCX does.
    decoder.nixl.peers["old-agent"].die()
    decoder.steps(2 * INTERVAL)
    assert decoder.nixl.peers == {}
    decoder.request("r", "p")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("new-agent")
    decoder.step()
    assert decoder.finished == ["r"]
    assert set(decoder.nixl.peers) == {"new-agent"}


def test_a_request_that_waits_behind_a_released_handshake_connects_again(
    decoder: Decoder,
):
    decoder.prefills["p"] = ["p-agent"]
    decoder.request("r", "p")
    decoder.step()
    decoder.run_handshakes()
    # Released between its handshake and the step that would have read.
    assert decoder.worker.release_peers("p")["result"] == "released"
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"] and decoder.failed == []


def test_a_release_between_a_handshake_and_its_callback_is_not_claimed(
    decoder: Decoder,
):
    decoder.prefills["p"] = ["p-agent"]
    decoder.worker._ensure_handshake("p", HOST, 6000, 1)
    ((future, run, args),) = decoder.handshakes.pending
    result = run(*args)
    assert decoder.worker.release_peers("p") == {
        "result": "busy",
        "engine_ids": ["p"],
        "in_flight_reads": 0,
    }
    future.set_result(result)
    assert decoder.worker.release_peers("p")["result"] == "released"
    assert decoder.is_clean("p")


# -- Requests that read nothing ----------------------------------------------------


def test_a_request_whose_blocks_are_local_ends_well_without_its_peer(
    decoder: Decoder,
):
    """It only has to notify a dead, released peer (vllm#56640)."""
    decoder.connect("p", port=6000)
    decoder.release_all()
    decoder.prefills["p"] = TimeoutError("no answer")
    for i in range(3):
        # The first one waits for the handshake, the others are refused.
        decoder.request(f"r{i}", "p", blocks=())
        decoder.step(0.1)
        decoder.run_handshakes()
        decoder.step(0.1)
    assert decoder.finished == ["r0", "r1", "r2"] and decoder.failed == []
    assert "peer_requests_refused" not in decoder.counted()


def test_it_still_notifies_a_peer_that_can_be_reached(decoder: Decoder):
    decoder.connect("p", port=6000)
    decoder.release_all()
    decoder.request("r", "p", blocks=())
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.nixl.peers["p-agent"].received == [b"remote-r:1"]


# -- Loading beside the step ---------------------------------------------------------


# Called while a peer is loaded, between NIXL calls.
IN_PYTHON = "_validate_remote_agent_handshake"


def load_in_thread(decoder: Decoder, engine_id: str) -> threading.Thread:
    """Have another thread do the handshake with an engine."""
    decoder.prefills[engine_id] = [f"{engine_id}-agent"]
    decoder.worker._ensure_handshake(engine_id, HOST, 7000, 1)
    return in_thread(decoder.run_handshakes)


def test_a_step_does_not_wait_for_a_peer_to_be_loaded(decoder: Decoder):
    decoder.connect("p")
    gate = Gate(decoder.worker, IN_PYTHON)
    loader = load_in_thread(decoder, "big")
    assert gate.inside.wait(LONG)
    decoder.read("r", "p")
    assert decoder.finished == ["r"]
    gate.go.set()
    loader.join(LONG)
    assert decoder.connected == {"p", "big"}


def test_a_step_goes_on_beside_a_nixl_call_that_never_returns(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, lines: Lines
):
    monkeypatch.setattr(agent, "_PATIENCE_S", 0.01)
    decoder.connect("p")
    gate = Gate(decoder.nixl, "add_remote_agent")
    loader = load_in_thread(decoder, "hangs")
    assert gate.inside.wait(LONG)
    decoder.read("r", "p")
    assert decoder.finished == ["r"]
    assert len(lines("A NIXL call has not returned")) == 1
    gate.go.set()
    loader.join(LONG)


def test_two_peers_are_loaded_one_after_the_other(decoder: Decoder):
    """Stock's loading code is written for one handshake thread."""
    gate = Gate(decoder.worker, IN_PYTHON)
    first = load_in_thread(decoder, "first")
    assert gate.inside.wait(LONG)
    second = load_in_thread(decoder, "second")
    decoder.step()
    assert "second-agent" not in decoder.nixl.peers
    gate.go.set()
    for thread in (first, second):
        thread.join(LONG)
    assert decoder.connected == {"first", "second"}
