# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests that name strange engines or addresses; handshakes that do not end."""

import socket
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq

from tests.support.peers import Decoder, Prefill, RemotePrefill
from tests.support.ports import free_port
from tests.support.prefill_process import serve_side_channel
from tests.support.waiting import SLACK_S

INTERVAL = 0.5
STOCK = 0
RELEASED_WITHIN = 2 * INTERVAL + SLACK_S
HANDSHAKE_TIMEOUT_S = 5.0
AT_ONCE = SLACK_S

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


def serve_own_side_channel(decoder: Decoder) -> int:
    """Let a decoder answer handshakes, as a ``kv_both`` instance does."""
    port = free_port()
    payload = msgspec.msgpack.encode(decoder.worker.xfer_handshake_metadata)
    serve_side_channel({(0, 0): payload}, "127.0.0.1", port)
    return port


# -- The engine's own id --------------------------------------------------------


@pytest.mark.parametrize("whose", ["its own", "nobody's", "another instance's"])
@pytest.mark.parametrize("interval", [INTERVAL, STOCK], ids=["ours", "stock"])
def test_a_request_that_names_the_engine_itself_fails_alone(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, whose: str, interval: float
):
    """The address is another's where two instances are configured with one id."""
    engine_id = f"{whose} {interval}"
    decoder = make_decoder(engine_id, peer_heartbeat_interval=interval)
    healthy = start_prefill("healthy")
    if whose == "another instance's":
        itself: RemotePrefill = start_prefill(engine_id)
    else:
        own = whose == "its own"
        port = serve_own_side_channel(decoder) if own else free_port()
        itself = RemotePrefill(engine_id, "127.0.0.1", port, decoder.num_blocks)

    start = time.monotonic()
    refused = decoder.start(itself)
    assert not decoder.wait_for(refused)
    took = time.monotonic() - start
    for first in range(6):
        decoder.read(healthy, [first, first + 1])

    assert decoder.failed == [refused]
    assert decoder.connected == {"healthy"}
    if interval:
        assert took < AT_ONCE
        named = [line for line in decoder.log if "as its NIXL peer" in line]
        assert len(named) == 1
        assert decoder.lines("NIXL peer") == []


# -- Addresses ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listens_on", "named"),
    [("::1", "::1"), ("::1", "[::1]"), ("127.0.0.1", "localhost")],
    ids=["IPv6", "IPv6 in brackets", "host name"],
)
def test_a_released_peer_connects_again_however_its_address_is_written(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, listens_on: str, named: str
):
    if ":" in listens_on:
        try:
            socket.create_server((listens_on, 0), family=socket.AF_INET6).close()
        except OSError as e:
            pytest.skip(f"no IPv6 here: {e}")
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    prefill = start_prefill("prefill", host=listens_on)
    prefill.host = named
    for _ in range(3):
        decoder.read(prefill)
        (peer,) = decoder.peers().values()
        shown = f"[{named}]" if named == "::1" else named
        assert peer["address"] == f"{shown}:{prefill.port}"
        # Operators may write it in either way.
        released = decoder.worker.release_peers(address=f"{named}:{prefill.port}")
        assert released["result"] == "released"
        assert not decoder.connected
    assert decoder.failed == []


@pytest.mark.parametrize("interval", [INTERVAL, STOCK], ids=["ours", "stock"])
def test_a_wrong_address_does_not_stand_in_the_way_of_the_right_one(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, interval: float
):
    decoder = make_decoder(peer_heartbeat_interval=interval)
    prefill, other = start_prefill("prefill"), start_prefill("other")
    wrong = RemotePrefill("prefill", other.host, other.port, prefill.num_blocks)

    assert not decoder.wait_for(decoder.start(wrong))
    decoder.read(prefill)
    decoder.read(other)

    assert len(decoder.failed) == 1
    assert decoder.connected == {"prefill", "other"}


# -- Requests that read nothing --------------------------------------------------


@pytest.mark.parametrize("interval", [INTERVAL, STOCK], ids=["ours", "stock"])
def test_a_request_that_only_notifies_a_dead_peer_ends_well(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, interval: float
):
    """All its blocks are local: whom it notifies is no reason to fail it."""
    decoder = make_decoder(peer_heartbeat_interval=interval)
    target = start_prefill("target")
    decoder.read(target)
    target.kill()
    if interval:
        decoder.wait_until(lambda: not decoder.connected, 30)
    # The first may try a handshake, those after it are refused one. Nobody waits for
    # a local hit: it must not be reported at all.
    for _ in range(2):
        decoder.start(target, [], is_local_hit=True)
        req_id = decoder.start(target, [])
        assert decoder.wait_for(req_id, 10), decoder.evidence()
    decoder.wait_until(lambda: not decoder.handshakes, 10)
    decoder.step()
    assert len(decoder.finished) == 3
    assert decoder.failed == []
    assert decoder.invalid_blocks == set()


# -- An address that accepts and never answers -----------------------------------


def test_handshakes_that_nobody_answers_keep_nobody_waiting(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    target, healthy = start_prefill("target"), start_prefill("healthy")
    newcomer = start_prefill("newcomer")
    decoder.read(target)
    decoder.read(healthy)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        mute = [RemotePrefill(f"mute-{i}", "127.0.0.1", port, 8) for i in range(20)]
        unanswered = [decoder.start(prefill) for prefill in mute]
        start = time.monotonic()
        decoder.step()

        # Neither a new peer, nor a dead one's release, nor a healthy one's reads wait.
        decoder.read(newcomer, [2, 3])
        connected_after = time.monotonic() - start
        target.kill()
        took = decoder.wait_until(lambda: "target" not in decoder.connected, 30)
        decoder.read(healthy)
        assert decoder.failed == [], decoder.evidence()
        assert connected_after < AT_ONCE, decoder.evidence()
        assert took < RELEASED_WITHIN, decoder.evidence()

        decoder.wait_until(lambda: len(decoder.failed) == len(unanswered), 30)
        failed_after = time.monotonic() - start
        print(f"connected after {connected_after:.2f} s, failed after {failed_after}")
        assert failed_after < HANDSHAKE_TIMEOUT_S + AT_ONCE

        # Once nobody has answered, requests need not wait.
        again = decoder.start(mute[0])
        decoder.wait_until(lambda: again in decoder.failed, AT_ONCE)
        decoder.read(healthy)
    assert sorted(decoder.failed) == sorted([*unanswered, again])
    assert decoder.agent.violations == []
