# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers that live, but of which a part does not answer: what the reads say counts."""

import contextlib
import socket
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq

from tests.support.peers import Decoder, Prefill
from tests.support.waiting import SLACK_S, wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import manager, policy

INTERVAL = 0.5
AT_ONCE = SLACK_S

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


@pytest.fixture
def suspect_after(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a read may be stuck: 2 s, not a minute."""
    seconds = 2.0
    monkeypatch.setattr(policy, "SUSPECT_AFTER_S", seconds)
    monkeypatch.setattr(manager, "SUSPECT_AFTER_S", seconds)
    return seconds


def watch(decoder: Decoder, seconds: float) -> None:
    """Step for a while."""
    end = time.monotonic() + seconds
    decoder.wait_until(lambda: time.monotonic() >= end, seconds + 30)


def end_listener(prefill: Prefill) -> None:
    """Ask for a rank that the prefill lacks: the end of the stock listener."""
    with zmq.Context() as context, context.socket(zmq.REQ) as question:
        question.connect(f"tcp://{prefill.host}:{prefill.port}")
        question.send(msgspec.msgpack.encode((GET_META_MSG, 0, 7)))

        def refuses() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection((prefill.host, prefill.port), 1).close()
                return False
            return True

        wait_until(refuses, 10, prefill.evidence)
        question.close(linger=0)


def test_a_peer_with_a_dead_handshake_port_serves(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    prefill = start_prefill("prefill")
    decoder.read(prefill)
    end_listener(prefill)
    watch(decoder, 6 * INTERVAL)
    decoder.read(prefill, [2, 3])
    watch(decoder, INTERVAL)
    decoder.read(prefill, [4, 5])
    assert decoder.failed == []
    assert decoder.lines("NIXL peer") == []


def test_a_peer_whose_interpreter_is_busy_serves(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    """A kernel compilation takes a minute; what was prefilled before can be read."""
    busy_s = 8 * INTERVAL
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    prefill = start_prefill("prefill")
    decoder.read(prefill)
    early, late = decoder.start(prefill, [2, 3]), None

    prefill.child.tell("hold_interpreter", busy_s)
    prefill.child.responsive = False
    took = decoder.wait_until(lambda: early in decoder.finished, 10)
    watch(decoder, busy_s - 3 * INTERVAL)
    late = decoder.start(prefill, [4, 5])
    took = max(took, decoder.wait_until(lambda: late in decoder.finished, 10))
    assert not prefill.child.has_answered, "it was not busy for long enough"
    assert took < AT_ONCE, decoder.evidence()
    decoder.check(prefill, [2, 3, 4, 5], [2, 3, 4, 5])

    prefill.child.answer()
    prefill.child.responsive = True
    decoder.read(prefill, [6, 7])
    assert decoder.failed == []
    assert decoder.lines("NIXL peer") == []


def test_a_hung_peer_is_suspect_until_it_goes_on(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, suspect_after: float
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    hung, idle = start_prefill("hung"), start_prefill("idle")
    healthy = start_prefill("healthy")
    for prefill in (hung, idle, healthy):
        decoder.read(prefill)
    handshakes = decoder.agent.calls["add_remote_agent"]

    hung.stop()
    idle.stop()
    stuck = decoder.start(hung, [2, 3])
    found = decoder.wait_until(lambda: decoder.lines("NIXL peer suspect: hung"), 10)
    assert suspect_after - 0.1 < found < suspect_after + 2.0
    peer = decoder.peers()["hung"]
    assert peer["state"] == "suspect" and peer["in_flight_reads"] == 1

    # Nothing more gets stuck, nothing is released, nobody else is suspect.
    refused = {decoder.start(hung, [i]) for i in (4, 5, 6)}
    decoder.wait_until(lambda: refused <= set(decoder.failed), AT_ONCE)
    for _ in range(3):
        decoder.read(healthy)
    watch(decoder, suspect_after)
    assert decoder.in_flight == {stuck}
    assert decoder.connected == {"hung", "idle", "healthy"}
    states = {name: peer["state"] for name, peer in decoder.peers().items()}
    assert states == {"hung": "suspect", "idle": "connected", "healthy": "connected"}

    hung.resume()
    idle.resume()
    assert decoder.wait_for(stuck), decoder.evidence()
    decoder.check(hung, [2, 3], [2, 3])
    assert decoder.peers()["hung"]["state"] == "connected"
    decoder.read(hung, [4, 5])
    decoder.read(idle)
    assert decoder.agent.calls["add_remote_agent"] == handshakes
    assert set(decoder.failed) == refused
    # One line of either kind, and none of any other.
    assert len(decoder.lines("NIXL peer no longer suspect: hung")) == 1
    assert len(decoder.lines("NIXL peer")) == 2
    assert decoder.agent.violations == []


def test_a_hung_peer_that_dies_is_released(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, suspect_after: float
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    hung = start_prefill("hung")
    decoder.read(hung)
    hung.stop()
    stuck = decoder.start(hung, [2, 3])
    decoder.wait_until(lambda: decoder.lines("NIXL peer suspect: hung"), 10)
    hung.kill()
    decoder.wait_until(lambda: not decoder.connected, 10)
    assert decoder.failed == [stuck]
    assert len(decoder.lines("NIXL peer released: hung")) == 1
    assert decoder.agent.violations == []
