# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The proxy in front of NIXL alone, on a fake agent and for an observer that notes."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from nixl._bindings import (
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import agent
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.agent import (
    NixlAgentProxy,
    OpenTransfers,
)

from .fake_nixl import FakeNixl
from .gate import LONG, Gate, in_thread

Lines = Callable[[str], list[str]]

NO_IDS = np.array([])
GONE = nixlRemoteDisconnectError("gone")


class Notes:
    """What the proxy has told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def sent(self, agent: str) -> None:
        self.told.append(("sent", agent))

    def finished(self, agent: str) -> None:
        self.told.append(("finished", agent))

    def failed(self, agent: str, call: str, error: Exception) -> None:
        self.told.append(("failed", agent, call, error))


class Setup:
    """A proxy and all that it is connected to."""

    def __init__(self) -> None:
        self.nixl = FakeNixl("decoder")
        self.notes = Notes()
        self.transfers = OpenTransfers()
        self.now = 1000.0
        self.proxy = NixlAgentProxy(
            self.nixl, self.notes, self.transfers, lambda: self.now
        )

    def load(self, name: str) -> int:
        """Load a peer; return its descriptor list."""
        assert self.proxy.add_remote_agent(f"{name}/0".encode()) == name
        return self.proxy.prep_xfer_dlist(name, [])

    def make(self, dlist: int) -> int:
        """Make a read out of a peer's descriptor list."""
        local = self.proxy.prep_xfer_dlist("NIXL_INIT_AGENT", [])
        return self.proxy.make_prepped_xfer("READ", local, NO_IDS, dlist, NO_IDS)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    assert setup.nixl.violations == []


# -- One thread at a time ------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "args"), [("deregister_memory", ("descs",)), ("get_new_notifs", ())]
)
def test_a_call_waits_for_the_one_of_another_thread(
    setup: Setup, call: str, args: tuple[str, ...]
):
    """Whether the proxy defines it or hands it on."""
    gate = Gate(setup.nixl, call)
    order: list[str] = []

    def first() -> None:
        getattr(setup.proxy, call)(*args)
        order.append("first")

    def second() -> None:
        setup.proxy.add_remote_agent(b"p/0")
        order.append("second")

    threads = [in_thread(first)]
    assert gate.inside.wait(LONG)
    threads.append(in_thread(second))
    threads[1].join(0.05)
    assert order == [] and setup.nixl.peers == {}
    gate.go.set()
    for thread in threads:
        thread.join(LONG)
    assert setup.nixl.peers.keys() == {"p"}


def test_many_threads_are_never_inside_together(setup: Setup):
    setup.load("p")
    start = threading.Barrier(4)

    def use() -> None:
        start.wait(LONG)
        for _ in range(300):
            setup.proxy.send_heartbeat("p")
            setup.proxy.drain()
            setup.proxy.check_remote_metadata("p")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [in_thread(use) for _ in range(4)]
        for thread in threads:
            thread.join(LONG)
    finally:
        sys.setswitchinterval(interval)
    assert setup.nixl.heartbeats() == 1200
    # The fixture looks for violations.


def test_building_descriptors_keeps_nobody_waiting(setup: Setup, lines: Lines):
    """A peer with millions of blocks takes seconds of Python."""
    gate = Gate(setup.nixl, "get_xfer_descs")
    builder = in_thread(lambda: setup.proxy.get_xfer_descs([]))
    assert gate.inside.wait(LONG)
    setup.load("p")
    gate.go.set()
    builder.join(LONG)
    assert lines("A NIXL call has not returned") == []


def test_what_is_no_call_is_the_agents(setup: Setup):
    assert setup.proxy.name == "decoder"
    with pytest.raises(AttributeError):
        _ = setup.proxy.no_such_thing


# -- A call that hangs ----------------------------------------------------------------


def test_behind_a_hung_call_only_the_first_one_waits(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
):
    waits: list[float] = []
    lock = threading.Lock()

    class CountingLock:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if blocking:
                waits.append(timeout)
                timeout = 0.01
            return lock.acquire(blocking, timeout)

        def release(self) -> None:
            lock.release()

    with monkeypatch.context() as patch:
        patch.setattr(agent.threading, "Lock", CountingLock)
        setup = Setup()
    gate = Gate(setup.nixl, "deregister_memory")
    hung = in_thread(lambda: setup.proxy.deregister_memory("descs"))
    assert gate.inside.wait(LONG)
    setup.load("p")
    setup.proxy.send_heartbeat("p")
    assert waits == [agent._PATIENCE_S] == [10.0]
    assert setup.nixl.heartbeats() == 1
    assert len(lines("A NIXL call has not returned for 10.0 s")) == 1
    # It returns after all: from then on calls are alone again, and patient.
    gate.go.set()
    hung.join(LONG)
    gate = Gate(setup.nixl, "get_new_notifs")
    again = in_thread(setup.proxy.get_new_notifs)
    assert gate.inside.wait(LONG)
    setup.proxy.send_heartbeat("p")
    setup.proxy.send_heartbeat("p")
    assert waits == [10.0, 10.0]
    gate.go.set()
    again.join(LONG)


def test_a_call_that_raises_lets_the_next_one_in(setup: Setup):
    setup.load("p")
    setup.nixl.raises["check_remote_metadata"] = [RuntimeError("?")]
    with pytest.raises(RuntimeError):
        setup.proxy.check_remote_metadata("p")
    other = in_thread(lambda: setup.proxy.send_heartbeat("p"))
    other.join(LONG)
    assert setup.nixl.heartbeats() == 1


# -- Errors and proofs of life -------------------------------------------------------


def test_what_is_told_about_a_read(setup: Setup):
    handle = setup.make(setup.load("p"))
    assert setup.notes.told == []
    setup.proxy.transfer(handle)
    assert setup.proxy.check_xfer_state(handle) == "PROC"
    assert setup.notes.told == [("sent", "p")]
    setup.nixl.finish_reads("p")
    assert setup.proxy.check_xfer_state(handle) == "DONE"
    assert setup.notes.told == [("sent", "p"), ("finished", "p")]
    setup.proxy.release_xfer_handle(handle)


def test_a_notification_is_told_and_a_heartbeat_is_none(setup: Setup):
    setup.load("p")
    setup.proxy.send_notif("p", notif_msg=b"r:1")
    setup.proxy.send_heartbeat("p")
    assert setup.notes.told == [("sent", "p")]
    assert setup.nixl.peers["p"].received == [b"r:1", b"HB:"]


@pytest.mark.parametrize("error", [GONE, nixlBackendError("?"), OSError("?")])
@pytest.mark.parametrize(
    "call",
    ["make_prepped_xfer", "transfer", "check_xfer_state", "send_notif", "heartbeat"],
)
def test_an_error_is_told_with_the_agent_that_it_belongs_to(
    setup: Setup, call: str, error: Exception
):
    setup.load("other")
    dlist = setup.load("p")
    handle = 0 if call == "make_prepped_xfer" else setup.make(dlist)
    do: dict[str, Callable[[], Any]] = {
        "make_prepped_xfer": lambda: setup.make(dlist),
        "transfer": lambda: setup.proxy.transfer(handle),
        "check_xfer_state": lambda: setup.proxy.check_xfer_state(handle),
        "send_notif": lambda: setup.proxy.send_notif("p", notif_msg=b"r:1"),
        "heartbeat": lambda: setup.proxy.send_heartbeat("p"),
    }
    method = "send_notif" if call == "heartbeat" else call
    setup.nixl.raises[method] = [error]
    with pytest.raises(type(error)):
        do[call]()
    assert setup.notes.told == [("failed", "p", method, error)]


# -- Transfers in flight -----------------------------------------------------------


def test_a_handle_is_in_flight_from_its_making_to_its_release(setup: Setup):
    p, q = setup.load("p"), setup.load("q")
    handles = [setup.make(p), setup.make(p), setup.make(q)]
    assert setup.transfers.count() == {"p": 2, "q": 1}
    setup.proxy.transfer(handles[0])
    setup.nixl.finish_reads("p")
    setup.proxy.check_xfer_state(handles[0])
    assert setup.transfers.count() == {"p": 2, "q": 1}
    setup.proxy.release_xfer_handle(handles[0])
    assert setup.transfers.count() == {"p": 1, "q": 1}
    setup.proxy.release_xfer_handle(handles[1])
    setup.proxy.release_xfer_handle(handles[2])
    assert not +setup.transfers.count()


def test_a_handle_that_cannot_be_released_stays_in_flight(setup: Setup):
    handle = setup.make(setup.load("p"))
    setup.nixl.raises["release_xfer_handle"] = [nixlBackendError("?")]
    with pytest.raises(nixlBackendError):
        setup.proxy.release_xfer_handle(handle)
    assert setup.transfers.count() == {"p": 1}
    setup.proxy.release_xfer_handle(handle)
    assert not +setup.transfers.count()


def test_a_transfer_that_cannot_be_made_or_posted_is_not_under_way(setup: Setup):
    dlist = setup.load("p")
    setup.nixl.raises["make_prepped_xfer"] = [GONE]
    with pytest.raises(nixlRemoteDisconnectError):
        setup.make(dlist)
    assert not +setup.transfers.count()
    handle = setup.make(dlist)
    setup.nixl.raises["transfer"] = [GONE]
    with pytest.raises(nixlRemoteDisconnectError):
        setup.proxy.transfer(handle)
    # The handle is in NIXL all the same, but no read can be stuck.
    assert setup.transfers.count() == {"p": 1}
    assert list(setup.transfers.posted_before(setup.now + 100)) == []


def test_transfers_posted_before_a_time(setup: Setup):
    p, q = setup.load("p"), setup.load("q")
    unposted = setup.make(p)
    for dlist, now in ((p, 1000.0), (q, 1001.0), (p, 1002.0)):
        setup.now = now
        setup.proxy.transfer(setup.make(dlist))
    posted_before = setup.transfers.posted_before
    assert list(posted_before(999.0)) == []
    assert list(posted_before(1001.0)) == [("p", 1000.0), ("q", 1001.0)]
    assert len(list(posted_before(2000.0))) == 3
    setup.proxy.release_xfer_handle(unposted)


# -- Loading and unloading -----------------------------------------------------------


def test_a_handshake_sees_the_agents_that_its_own_thread_loads(setup: Setup):
    with setup.proxy.record_loads() as loaded:
        setup.load("a0")
        other = in_thread(lambda: setup.load("b0"))
        other.join(LONG)
        setup.nixl.raises["add_remote_agent"] = [GONE]
        with pytest.raises(nixlRemoteDisconnectError):
            setup.load("a1")
        setup.load("a2")
    setup.load("later")
    assert loaded == ["a0", "a2"]
    with setup.proxy.record_loads() as loaded:
        pass
    assert loaded == []


def test_unloading_goes_on_after_a_failure(setup: Setup, lines: Lines):
    dlist = setup.load("p")
    setup.nixl.raises["release_dlist_handle"] = [nixlBackendError("?")]
    setup.nixl.raises["remove_remote_agent"] = [nixlNotFoundError("?")]
    setup.proxy.release_dlist_handle(dlist)
    setup.proxy.remove_remote_agent("p")
    assert len(lines("NIXL could not fully unload agent p: nixl")) == 2
    # A failure to unload is no evidence: the peer is about to be forgotten.
    assert setup.notes.told == []
    setup.proxy.remove_remote_agent("p")
    assert setup.nixl.peers == {}


# -- Notifications -----------------------------------------------------------------


def test_draining_takes_heartbeats_and_keeps_the_rest_in_order(setup: Setup):
    setup.nixl.notifs = {"a": [b"1", b"HB:x,y", b"2"], "b": [b"3"]}
    assert setup.proxy.drain() == ["x,y"]
    setup.nixl.notifs = {"a": [b"4", b"HB:"]}
    assert setup.proxy.drain() == [""]
    assert setup.proxy.kept_notifs() == [b"1", b"2", b"4", b"3"]
    setup.nixl.notifs = {"a": [b"5", b"HB:z"], "c": [b"6"]}
    assert setup.proxy.get_new_notifs() == {
        "a": [b"1", b"2", b"4", b"5", b"HB:z"],
        "b": [b"3"],
        "c": [b"6"],
    }
    assert setup.proxy.get_new_notifs() == {}
    assert setup.proxy.kept_notifs() == []


def test_a_heartbeat_that_is_no_text_ends_no_round(setup: Setup):
    setup.nixl.notifs = {"a": [b"HB:\xff", b"1"]}
    (payload,) = setup.proxy.drain()
    assert payload == "\N{REPLACEMENT CHARACTER}"
    assert setup.proxy.kept_notifs() == [b"1"]


def test_kept_notifications_come_even_if_no_new_ones_can_be_had(
    setup: Setup, lines: Lines
):
    setup.nixl.notifs = {"a": [b"1"]}
    setup.proxy.drain()
    setup.nixl.raises["get_new_notifs"] = [nixlBackendError("?")] * 3
    assert setup.proxy.drain() == []
    assert setup.proxy.get_new_notifs() == {"a": [b"1"]}
    assert setup.proxy.get_new_notifs() == {}
    assert len(lines("NIXL could not report notifications")) == 1


def test_an_error_that_is_not_nixls_is_not_hidden(setup: Setup):
    setup.nixl.raises["get_new_notifs"] = [MemoryError()]
    with pytest.raises(MemoryError):
        setup.proxy.get_new_notifs()


def test_the_proxy_passes_for_the_agent(setup: Setup):
    """Forks, and vLLM's own tests, look at the worker's agent and set things on it."""
    assert isinstance(setup.proxy, FakeNixl)
    setup.proxy.anything = "set"  # type: ignore[attr-defined]
    assert setup.nixl.anything == setup.proxy.anything == "set"  # type: ignore[attr-defined]
    with mock.patch.object(setup.proxy, "send_notif") as send:
        setup.proxy.send_notif("p", notif_msg=b"?")
    send.assert_called_once()
    assert setup.nixl.send_notif.__func__ is FakeNixl.send_notif
