# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fake NIXL agent answers as a real one does: one set of tests for both."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nixl._bindings import (
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

from tests.support.agent_process import make_agent
from tests.support.fork_server import DEFAULT_ENV, Child, ForkServer, environment
from tests.support.waiting import wait_until
from tests.v1.kv_connector.unit.nixl_peers.fake_nixl import FakeNixl, PeerState

PIECES = 16
PIECE = 1 << 20


class Side(abc.ABC):
    """An agent, a peer's metadata, and what a test can do to the peer."""

    agent: Any
    metadata: bytes
    other_metadata: bytes
    """Of another agent with the peer's name."""
    local: Any
    """Descriptor list of our own memory."""
    name: Any
    """The peer as `add_remote_agent` has named it."""
    remote: Any
    """Descriptor list of the peer's memory."""

    @abc.abstractmethod
    def connect(self) -> None:
        """Load the peer, prepare its descriptor list."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Let the peer die."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Let the peer hang."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Let a hung peer go on."""

    @abc.abstractmethod
    def invalidate(self) -> None:
        """Make NIXL drop the peer's metadata."""

    @abc.abstractmethod
    def notify_us(self, message: bytes) -> None:
        """Let the peer send us a notification."""

    def send(self) -> None:
        self.agent.send_notif(self.name, notif_msg=b"HB:")

    def make_read(self) -> Any:
        ids = list(range(PIECES))
        return self.agent.make_prepped_xfer("READ", self.local, ids, self.remote, ids)

    def start_read(self) -> Any:
        handle = self.make_read()
        assert self.agent.transfer(handle) in ("PROC", "DONE")
        return handle


class FakeSide(Side):
    metadata = b"peer/1"
    other_metadata = b"peer/2"

    def __init__(self) -> None:
        self.agent = FakeNixl()
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", [])

    def connect(self) -> None:
        self.name = self.agent.add_remote_agent(self.metadata)
        self.remote = self.agent.prep_xfer_dlist(self.name, [])
        self._peer = self.agent.peers[self.name]

    def start_read(self) -> Any:
        handle = super().start_read()
        if self._peer.state is PeerState.ALIVE:
            self.agent.finish_reads(self.name)
        return handle

    def kill(self) -> None:
        self._peer.die(sends_left=2)

    def stop(self) -> None:
        self._peer.state = PeerState.HUNG

    def resume(self) -> None:
        self._peer.state = PeerState.ALIVE
        self.agent.finish_reads(self.name)

    def invalidate(self) -> None:
        self._peer.state = PeerState.INVALIDATED

    def notify_us(self, message: bytes) -> None:
        self.agent.notifs["peer"] = [message]


class RealSide(Side):
    def __init__(self, spawn: Callable[[], Child]):
        self._peer, other = spawn(), spawn()
        self.metadata, self._address = self._peer.call("describe")
        self.other_metadata, _ = other.call("describe")
        with environment(**DEFAULT_ENV):
            self.agent = make_agent("us")
        self._memory = torch.zeros(PIECES * PIECE, dtype=torch.uint8)
        self.agent.register_memory(self._memory)
        self.local = self._prepare("NIXL_INIT_AGENT", self._memory.data_ptr())

    def _prepare(self, agent: Any, base: int) -> Any:
        pieces = [(base + i * PIECE, PIECE, 0) for i in range(PIECES)]
        return self.agent.prep_xfer_dlist(agent, pieces, "DRAM")

    def connect(self) -> None:
        self.name = self.agent.add_remote_agent(self.metadata)
        self.remote = self._prepare(self.name, self._address)

    def kill(self) -> None:
        self._peer.kill()

    def stop(self) -> None:
        self._peer.stop()

    def resume(self) -> None:
        self._peer.resume()

    def invalidate(self) -> None:
        # NIXL 1.5 does it on request only, later ones on a failed transfer too.
        self.agent.remove_remote_agent(self.name)

    def notify_us(self, message: bytes) -> None:
        self._peer.call("notify", self.agent.get_agent_metadata(), message)


@pytest.fixture(params=["fake", "real"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    """A connected pair: the fake one, and one of two real agents."""
    if request.param == "fake":
        side: Side = FakeSide()
        side.connect()
        yield side
        assert side.agent.violations == []
        return
    fork_server: ForkServer = request.getfixturevalue("fork_server")
    with contextlib.ExitStack() as stack:

        def spawn() -> Child:
            arguments = {"name": "peer", "size": PIECES * PIECE}
            child = fork_server.spawn(
                "peer", "tests.support.agent_process:AgentProcess", arguments, {}
            )
            return stack.enter_context(contextlib.closing(child))

        side = RealSide(spawn)
        side.connect()
        yield side


def wait_for_disconnect(call: Callable[[], Any]) -> None:
    """Repeat a call until it raises a disconnect, and nothing else."""

    def raises() -> bool:
        try:
            call()
        except nixlRemoteDisconnectError:
            return True
        return False

    wait_until(raises, 20)


def test_alive(side: Side):
    side.send()
    assert side.agent.check_remote_metadata(side.name)
    handle = side.start_read()
    wait_until(lambda: side.agent.check_xfer_state(handle) == "DONE", 20)
    side.agent.release_xfer_handle(handle)
    side.agent.release_dlist_handle(side.remote)
    side.agent.remove_remote_agent(side.name)
    assert not side.agent.check_remote_metadata(side.name)


def test_dead(side: Side):
    side.send()
    side.stop()
    handle = side.start_read()
    side.kill()

    # The first sends may succeed. Once one has failed, so does everything.
    wait_for_disconnect(side.send)
    wait_for_disconnect(lambda: side.agent.check_xfer_state(handle))
    with pytest.raises(nixlRemoteDisconnectError):
        side.send()
    again = side.make_read()
    with pytest.raises(nixlRemoteDisconnectError):
        side.agent.transfer(again)
    assert side.agent.check_remote_metadata(side.name), "it says nothing of health"
    with pytest.raises(nixlNotAllowedError):
        side.agent.add_remote_agent(side.other_metadata)

    side.agent.release_xfer_handle(handle)
    side.agent.release_xfer_handle(again)
    side.agent.release_dlist_handle(side.remote)
    side.agent.remove_remote_agent(side.name)
    assert not side.agent.check_remote_metadata(side.name)
    with pytest.raises(nixlNotFoundError):
        side.send()


def test_invalidated(side: Side):
    side.send()
    side.invalidate()
    assert not side.agent.check_remote_metadata(side.name)
    with pytest.raises(nixlNotFoundError):
        side.send()
    with pytest.raises(nixlNotFoundError):
        side.make_read()
    side.agent.release_dlist_handle(side.remote)
    side.agent.remove_remote_agent(side.name)
    assert side.agent.add_remote_agent(side.other_metadata) == side.name
    assert side.agent.check_remote_metadata(side.name)


def test_hung(side: Side):
    side.send()
    side.stop()
    handle = side.start_read()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        side.send()
        assert side.agent.check_xfer_state(handle) == "PROC"
        time.sleep(0.05)
    side.resume()
    wait_until(lambda: side.agent.check_xfer_state(handle) == "DONE", 20)
    side.agent.release_xfer_handle(handle)


def test_a_read_in_progress_can_be_let_go(side: Side):
    side.send()
    side.stop()
    handle = side.start_read()
    assert side.agent.check_xfer_state(handle) == "PROC"
    side.agent.release_xfer_handle(handle)


def test_an_unknown_agent_can_be_removed(side: Side):
    side.agent.remove_remote_agent("nobody")
    assert not side.agent.check_remote_metadata("nobody")
    with pytest.raises(nixlNotFoundError):
        side.agent.send_notif("nobody", notif_msg=b"HB:")


def test_one_name_has_one_metadata(side: Side):
    assert side.agent.add_remote_agent(side.metadata) == side.name
    with pytest.raises(nixlNotAllowedError):
        side.agent.add_remote_agent(side.other_metadata)
    side.agent.release_dlist_handle(side.remote)
    side.agent.remove_remote_agent(side.name)
    assert side.agent.add_remote_agent(side.other_metadata) == side.name


def test_notifications_are_fetched_once(side: Side):
    side.notify_us(b"r1:1")
    fetched: dict[str, list[bytes]] = {}
    wait_until(lambda: fetched.update(side.agent.get_new_notifs()) or fetched, 20)
    assert fetched == {"peer": [b"r1:1"]}
    assert side.agent.get_new_notifs() == {}
