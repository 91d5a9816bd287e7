# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A NIXL agent with a state per peer, for faults that cannot be had on demand.

It behaves as NIXL 1.5 was measured to; `test_fake_nixl_contract.py` holds it
against the real one. Breaches of the two rules of its use are collected in
``violations`` (code under test may swallow an exception raised here):

* nothing of a peer is released while a transfer handle to it is open,
* never two threads inside at once.
"""

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from nixl._bindings import (
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)


class PeerState(enum.Enum):
    """What the connection to a peer is like."""

    ALIVE = "alive"
    DYING = "dying"
    """Gone, but ``sends_left`` more sends succeed and reads stay in progress."""
    FAILED = "failed"
    """The endpoint has failed: every call raises a disconnect."""
    INVALIDATED = "invalidated"
    """NIXL has dropped the peer's metadata: every call raises not-found."""
    HUNG = "hung"
    """Stopped: sends succeed, reads stay in progress."""


@dataclass
class FakePeer:
    """One remote agent as this agent sees it."""

    name: str
    metadata: bytes
    state: PeerState = PeerState.ALIVE
    sends_left: int = 0
    received: list[bytes] = field(default_factory=list)

    def die(self, sends_left: int = 0) -> None:
        """Lose the peer; that many sends still succeed."""
        self.state = PeerState.DYING if sends_left else PeerState.FAILED
        self.sends_left = sends_left


@dataclass
class _Xfer:
    agent: str
    done: bool = False
    open: bool = True


@dataclass
class _Dlist:
    agent: str
    open: bool = True


class FakeNixl:
    """Stands in for ``nixl_agent``: the calls that the connector worker makes."""

    def __init__(self, name: str = "fake", config: Any = None):
        """Create an agent without peers."""
        self.name = name
        self.peers: dict[str, FakePeer] = {}
        """Agents loaded at present, by name."""
        self.states: dict[str, PeerState] = {}
        """State that an agent has when it is loaded (again)."""
        self.calls: list[tuple[str, Any, int]] = []
        """Every call: its name, first argument and thread id."""
        self.notifs: dict[str, list[bytes]] = {}
        """Notifications that wait to be fetched, by sender."""
        self.raises: dict[str, list[Exception]] = {}
        """Errors that the next calls of a method raise, by method name."""
        self.before: dict[str, Callable[..., None]] = {}
        """What happens once, just before the next call of a method."""
        self.lost_metadata: set[str] = set()
        self.violations: list[str] = []
        self.xfers: dict[int, _Xfer] = {}
        self.dlists: dict[int, _Dlist] = {}
        self._ids = itertools.count(1)
        self._inside: int | None = None

    # -- For tests -----------------------------------------------------------

    def called(self, method: str) -> list[Any]:
        """Return the first argument of every call of a method."""
        return [arg for name, arg, _ in self.calls if name == method]

    def heartbeats(self, agent: str | None = None) -> int:
        """Return how many empty heartbeats an agent (or all) was sent."""
        return sum(
            p.received.count(b"HB:")
            for p in self.peers.values()
            if agent in (None, p.name)
        )

    def open_handles(self, agent: str) -> int:
        """Return the number of open transfer handles to an agent."""
        return sum(x.open and x.agent == agent for x in self.xfers.values())

    def finish_reads(self, agent: str) -> None:
        """Complete every posted read from an agent."""
        for xfer in self.xfers.values():
            if xfer.agent == agent:
                xfer.done = True

    def finish_one_read(self, agent: str, newest: bool = False) -> None:
        """Complete one posted read from an agent, the oldest or the newest."""
        pending = [x for x in self.xfers.values() if x.agent == agent and not x.done]
        pending[-1 if newest else 0].done = True

    def metadata_is_lost(self, agent: str) -> None:
        """Let NIXL say that it has no metadata of an agent, and nothing else."""
        self.lost_metadata.add(agent)

    @contextlib.contextmanager
    def _call(self, method: str, arg: Any = None) -> Iterator[None]:
        if (happens := self.before.pop(method, None)) is not None:
            happens()
        me = threading.get_ident()
        if self._inside not in (None, me):
            self.violations.append(f"{method}: two threads inside NIXL")
        self._inside = me
        self.calls.append((method, arg, me))
        try:
            if queued := self.raises.get(method):
                raise queued.pop(0)
            yield
        finally:
            self._inside = None

    def _release_of(self, agent: str, method: str) -> None:
        if count := self.open_handles(agent):
            self.violations.append(f"{method}: {count} open handles to {agent}")

    # -- Peers ----------------------------------------------------------------

    def add_remote_agent(self, metadata: bytes) -> str:
        """Load a peer; its metadata starts with its name, up to a slash."""
        name = metadata.decode().split("/")[0]
        with self._call("add_remote_agent", name):
            known = self.peers.get(name)
            if known is not None and known.metadata != metadata:
                raise nixlNotAllowedError("NIXL_ERR_NOT_ALLOWED")
            if known is None:
                state = self.states.get(name, PeerState.ALIVE)
                self.peers[name] = FakePeer(name, metadata, state)
            return name

    def remove_remote_agent(self, agent: str) -> None:
        """Unload a peer; an unknown one is no error."""
        with self._call("remove_remote_agent", agent):
            self._release_of(agent, "remove_remote_agent")
            self.peers.pop(agent, None)

    def check_remote_metadata(self, agent: str) -> bool:
        """Return whether a peer's metadata is loaded; says nothing of its health."""
        with self._call("check_remote_metadata", agent):
            peer = self.peers.get(agent)
            return (
                peer is not None
                and peer.state is not PeerState.INVALIDATED
                and agent not in self.lost_metadata
            )

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Send a notification; success does not prove that the peer lives."""
        with self._call("send_notif", agent):
            peer = self._peer(agent)
            if peer.state is PeerState.DYING:
                if peer.sends_left <= 0:
                    peer.state = PeerState.FAILED
                peer.sends_left -= 1
            self._raise_if_failed(peer)
            peer.received.append(bytes(notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return and clear the notifications that have arrived."""
        with self._call("get_new_notifs"):
            notifs, self.notifs = self.notifs, {}
            return notifs

    def _peer(self, agent: str) -> FakePeer:
        peer = self.peers.get(agent)
        if peer is None or peer.state is PeerState.INVALIDATED:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        return peer

    @staticmethod
    def _raise_if_failed(peer: FakePeer) -> None:
        if peer.state is PeerState.FAILED:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    # -- Memory and transfers --------------------------------------------------

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """Return the descriptors as they are."""
        return descs

    get_xfer_descs = get_reg_descs

    def register_memory(self, descs: Any, backends: Any = ()) -> Any:
        """Accept any memory."""
        with self._call("register_memory"):
            return descs

    def deregister_memory(self, descs: Any) -> None:
        """Accept any memory."""
        with self._call("deregister_memory"):
            return

    def get_agent_metadata(self) -> bytes:
        """Return the metadata of this agent."""
        return f"{self.name}/0".encode()

    def prep_xfer_dlist(
        self, agent: str, descs: Any, mem_type: str | None = None
    ) -> int:
        """Prepare a descriptor list of a peer, or of this agent."""
        with self._call("prep_xfer_dlist", agent):
            if agent not in ("NIXL_INIT_AGENT", ""):
                self._peer(agent)
            handle = next(self._ids)
            self.dlists[handle] = _Dlist(agent)
            return handle

    def release_dlist_handle(self, handle: int) -> None:
        """Release a descriptor list."""
        dlist = self.dlists[handle]
        with self._call("release_dlist_handle", dlist.agent):
            self._release_of(dlist.agent, "release_dlist_handle")
            dlist.open = False

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_ids: np.ndarray,
        remote: int,
        remote_ids: np.ndarray,
        notif_msg: bytes = b"",
    ) -> int:
        """Make a transfer between two descriptor lists."""
        agent = self.dlists[remote].agent
        with self._call("make_prepped_xfer", agent):
            assert self.dlists[remote].open and self.dlists[local].open
            self._peer(agent)
            handle = next(self._ids)
            self.xfers[handle] = _Xfer(agent)
            return handle

    def transfer(self, handle: int) -> str:
        """Post a transfer."""
        xfer = self.xfers[handle]
        with self._call("transfer", xfer.agent):
            self._raise_if_failed(self._peer(xfer.agent))
            return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """Return DONE, PROC, or raise what has ended the transfer."""
        xfer = self.xfers[handle]
        with self._call("check_xfer_state", xfer.agent):
            if xfer.done:
                return "DONE"
            self._raise_if_failed(self._peer(xfer.agent))
            return "PROC"

    def get_xfer_telemetry(self, handle: int) -> Any:
        """Return made-up telemetry."""
        return SimpleNamespace(
            xferDuration=1, postDuration=1, totalBytes=1, descCount=1
        )

    def release_xfer_handle(self, handle: int) -> None:
        """Release a transfer; does not cancel it."""
        xfer = self.xfers[handle]
        with self._call("release_xfer_handle", xfer.agent):
            xfer.open = False
