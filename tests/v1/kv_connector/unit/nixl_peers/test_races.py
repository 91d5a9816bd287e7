# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Orders of events between threads that are hard to come by, made to happen."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.agent import (
    NixlAgentProxy,
    OpenTransfers,
)

from .fake_nixl import FakeNixl


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
