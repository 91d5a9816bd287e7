# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Orders of events between threads that are hard to come by, made to happen."""

from collections.abc import Callable
from typing import Any

from nixl._bindings import nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.agent import (
    NixlAgentProxy,
    OpenTransfers,
)

from .decoder import HOST, Decoder
from .fake_nixl import FakeNixl

INTERVAL = 2.0
GONE = nixlRemoteDisconnectError("gone")


class GivenUpBeside:
    """A lock that is got in the moment in which another thread stops waiting."""

    def __init__(self) -> None:
        self.proxy: Any = None
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Get the lock, but not at once."""
        if not blocking:
            return False
        self.proxy._is_stuck = True
        self.held = True
        return True

    def release(self) -> None:
        """Give the lock back."""
        self.held = False


def test_a_call_that_gets_the_lock_gives_it_back_whoever_stops_waiting():
    """Kept for good, it would let all later calls in beside each other."""
    proxy = NixlAgentProxy(FakeNixl("decoder"), None, OpenTransfers(), lambda: 0.0)  # type: ignore[arg-type]
    proxy._lock = lock = GivenUpBeside()  # type: ignore[assignment]
    lock.proxy = proxy
    proxy.get_new_notifs()
    assert not lock.held
    assert not proxy._is_stuck


def test_a_peer_evicted_before_it_is_recorded_leaves_no_ghost(decoder: Decoder):
    """A step may evict a peer between stock's callback and ours.

    A record of it could never be released, and its release be tried for ever.
    """
    decoder.prefills["p"] = ["p-agent"]
    future = decoder.worker._ensure_handshake("p", HOST, 6000, 1)
    assert future is not None
    ours = future._done_callbacks.pop()  # type: ignore[attr-defined]
    decoder.run_handshakes()
    decoder.worker._cleanup_remote_engine("p")
    ours(future)
    assert decoder.states() == {}
    decoder.steps(2 * INTERVAL)
    assert decoder.worker.release_peers("p")["result"] == "unknown"


def test_an_older_handshake_does_not_overwrite_the_record_of_a_newer_one(
    decoder: Decoder,
):
    decoder.prefills["p"] = ["p-agent"]
    future = decoder.worker._ensure_handshake("p", HOST, 6000, 1)
    assert future is not None
    ours = future._done_callbacks.pop()  # type: ignore[attr-defined]
    decoder.run_handshakes()
    decoder.worker._cleanup_remote_engine("p")
    decoder.connect("p", port=7000)
    ours(future)
    (peer,) = decoder.worker.list_peers()["peers"]
    assert peer["address"] == f"{HOST}:7000"


def test_a_suspect_found_unreachable_is_not_said_to_be_well_again(
    decoder: Decoder, lines: Callable[[str], list[str]]
):
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.steps(62, every=1.0)
    assert decoder.states() == {"p": "suspect"}
    decoder.worker._peers.failed("p-agent", "send_notif", GONE)
    decoder.step()
    assert decoder.states() == {"p": "unreachable"}
    assert decoder.counted()["suspect_peers"] == 0
    decoder.steps(5)
    assert lines("NIXL peer no longer suspect: p") == []
