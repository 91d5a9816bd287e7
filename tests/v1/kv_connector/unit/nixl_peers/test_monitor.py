# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Off the main thread: the monitor's life, its rounds, and two threads at once."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import monitor, worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.monitor import PeerMonitor

from .decoder import HOST, Decoder
from .fake_nixl import PeerState
from .gate import LONG, Gate, in_thread
from .worker_factory import make_connector

Lines = Callable[[str], list[str]]

INTERVAL = 2.0
FIRST_HEARTBEAT = 1.1 * INTERVAL
GONE = nixlRemoteDisconnectError("gone")
THREAD = "vllm-nixl-peer-monitor"


def until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + LONG
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        threading.Event().wait(0.001)
    return value


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not monitor_threads())


# -- The monitor's life ------------------------------------------------------------


class Monitored:
    """A worker that does what the test says in each round."""

    def __init__(self, act: Callable[[], Any] = lambda: False) -> None:
        self.act = act
        self.rounds = 0

    def _run_idle_round(self) -> bool:
        self.rounds += 1
        return bool(self.act())


def start(worker: Any, period: float = 0.001) -> PeerMonitor:
    started = PeerMonitor(worker, period)
    started.start()
    return started


def test_it_runs_rounds_until_stopped():
    worker = Monitored()
    running = start(worker)
    until(lambda: worker.rounds >= 3)
    assert running.is_alive()
    assert running.stop()
    rounds = worker.rounds
    assert not running.is_alive() and monitor_threads() == []
    assert worker.rounds == rounds
    assert running.stop()


def test_one_never_started_is_stopped():
    assert PeerMonitor(Monitored(), 1.0).stop()


def test_a_round_that_leaves_work_is_followed_by_another_at_once():
    left = iter([True] * 5 + [False] * 1000)
    worker = Monitored(lambda: next(left))
    waits: list[float] = []
    running = PeerMonitor(worker, period=0.05)
    stopping = running._stopping
    wait = stopping.wait

    def record(seconds: float) -> bool:
        waits.append(seconds)
        return wait(seconds)

    stopping.wait = record  # type: ignore[method-assign, assignment]
    running.start()
    until(lambda: worker.rounds >= 8)
    running.stop()
    assert waits[:8] == [0.05] + [0.001] * 5 + [0.05] * 2


def test_a_round_that_raises_is_logged_once_per_kind_and_survived(lines: Lines):
    errors = iter([RuntimeError("a"), RuntimeError("b"), ValueError("c")])

    def fail() -> None:
        raise next(errors, RuntimeError("d"))

    worker = Monitored(fail)
    running = start(worker)
    until(lambda: worker.rounds >= 6)
    assert running.stop()
    assert len(lines("NIXL peer monitor: round failed")) == 2


def test_stop_waits_a_second_at_most_for_a_round(monkeypatch: pytest.MonkeyPatch):
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        go.wait(LONG)

    worker = Monitored(hang)
    running = start(worker)
    assert inside.wait(LONG)
    assert monitor._JOIN_TIMEOUT_S == 1.0
    monkeypatch.setattr(monitor, "_JOIN_TIMEOUT_S", 0.01)
    assert not running.stop()
    go.set()
    until(lambda: not running.is_alive())
    assert worker.rounds == 1


def test_a_round_may_stop_it():
    stopped = []
    worker = Monitored()
    running = PeerMonitor(worker, 0.001)
    worker.act = lambda: stopped.append(running.stop())
    running.start()
    until(lambda: stopped and not running.is_alive())
    assert stopped == [True] and worker.rounds == 1


def test_it_ends_with_its_worker():
    ran = threading.Event()
    worker = Monitored(ran.set)
    running = start(worker)
    assert ran.wait(LONG)
    del worker
    gc.collect()
    until(lambda: not running.is_alive())
    running.stop()


# With vLLM left out, which takes long to import and prints on its own.
EXIT_SCRIPT = """
import importlib.util, sys, threading, time
from unittest.mock import MagicMock

sys.modules["vllm"] = sys.modules["vllm.logger"] = MagicMock()
spec = importlib.util.spec_from_file_location("monitor", sys.argv[1])
sys.modules["monitor"] = monitor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(monitor)

class Worker:
    def __init__(self):
        self.inside = threading.Event()
        self.go = threading.Event()
    def _run_idle_round(self):
        self.inside.set()
        if sys.argv[2] == "inside":
            # Goes on once the interpreter has begun to exit.
            threading.main_thread().join()
            print("ended", flush=True)

worker = Worker()
monitor.PeerMonitor(worker, 0.0001).start()
worker.inside.wait()
"""


@pytest.mark.parametrize("where, printed", [("inside", "ended\n"), ("between", "")])
def test_at_exit_a_round_ends_and_nothing_else_is_printed(where: str, printed: str):
    result = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, monitor.__file__, where],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, printed, "")


# -- What a round does while idle --------------------------------------------------


def test_a_round_leaves_nixl_alone_while_steps_run(decoder: Decoder):
    decoder.connect("p")
    decoder.kill("p")
    decoder.step(FIRST_HEARTBEAT - 0.2)
    decoder.nixl.calls.clear()
    assert not decoder.idle_round(0.9 * INTERVAL)
    assert decoder.nixl.calls == []
    assert decoder.connected == {"p"}


def test_an_idle_worker_sends_heartbeats(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    decoder.step()
    # After ten intervals, idle time would let the interval grow.
    decoder.idle(FIRST_HEARTBEAT + 8 * INTERVAL + 0.5)
    assert decoder.nixl.heartbeats("a0") == decoder.nixl.heartbeats("a1") == 9


def test_steps_and_idle_rounds_share_one_schedule(decoder: Decoder):
    """A round does nothing for an interval after a step, then has one to send in."""
    decoder.connect("p")
    sent_at = [decoder.clock.now]
    for i in range(40):
        if i % 7 == 0:
            decoder.step(0.5)
        else:
            decoder.idle_round(0.5)
        if decoder.nixl.heartbeats() == len(sent_at):
            sent_at.append(decoder.clock.now)
    assert decoder.nixl.heartbeats() == len(sent_at) - 1
    gaps = [b - a for a, b in zip(sent_at, sent_at[1:])]
    assert all(INTERVAL / 2 <= gap <= 2 * INTERVAL for gap in gaps)
    assert len(gaps) >= 7


def test_an_idle_worker_releases_a_dead_peer(decoder: Decoder):
    decoder.connect("p", "a0", "a1")
    decoder.step()
    decoder.nixl.peers["a1"].die()
    decoder.idle(FIRST_HEARTBEAT + 0.5)
    assert decoder.is_clean("p")
    assert sorted(decoder.nixl.called("remove_remote_agent")) == ["a0", "a1"]


def test_a_round_says_if_peers_are_left(decoder: Decoder):
    """The monitor goes on at once, and lets go of the lock in between."""
    for i in range(3):
        decoder.connect(f"p{i}")
    decoder.kill()
    decoder.step()
    decoder.clock.now += FIRST_HEARTBEAT
    left = [decoder.idle_round() for _ in range(4)]
    assert left == [True, True, True, False]
    assert decoder.connected == set()


def test_a_deferred_release_keeps_the_monitor_from_spinning(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE]
    assert not decoder.idle_round(FIRST_HEARTBEAT)
    assert decoder.states() == {"p": "unreachable"}
    assert not decoder.idle_round(1.0)


def test_an_idle_worker_keeps_a_peer_while_a_read_is_in_flight(decoder: Decoder):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [GONE]
    decoder.idle(100, every=0.5)
    assert decoder.states() == {"p": "unreachable"}
    # Only a step sees that the read has ended, and reports it first.
    decoder.nixl.raises["check_xfer_state"] = [GONE]
    decoder.idle(100, every=0.5)
    assert decoder.connected == {"p"}
    decoder.step()
    assert decoder.failed == ["r"]
    assert decoder.is_clean("p")


def test_between_the_halves_of_a_step_a_posted_read_keeps_its_peer(
    decoder: Decoder,
):
    decoder.connect("p")
    decoder.step()
    decoder.request("r", "p")
    decoder.start_step(10 * INTERVAL)
    assert decoder.worker.release_peers("p")["result"] == "busy"
    decoder.idle_round(FIRST_HEARTBEAT)
    assert decoder.connected == {"p"}
    decoder.nixl.finish_reads("p-agent")
    decoder.end_step()
    assert decoder.finished == ["r"] and decoder.failed == []
    assert decoder.is_clean("p")


def test_an_idle_worker_finds_a_peer_suspect(decoder: Decoder):
    """Steps may pause while a read hangs; the next request must not get stuck."""
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    decoder.idle(62, every=0.5)
    assert decoder.states() == {"p": "suspect"}
    decoder.request("next", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["next"]


def test_an_untyped_error_while_idle_does_not_release(decoder: Decoder):
    decoder.connect("p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlBackendError("?")] * 100
    decoder.idle(50 * INTERVAL, every=0.5)
    assert decoder.states() == {"p": "connected"}


def test_a_round_sets_the_device_of_its_thread_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
):
    """Unloading rkeys may unmap device memory."""
    devices: list[Any] = []

    class Platform:
        set_device = staticmethod(devices.append)

    monkeypatch.setattr(worker, "current_platform", Platform)
    decoder.step()
    for _ in range(3):
        decoder.idle_round(INTERVAL)
    assert devices == [decoder.worker.device_id]


# -- Notifications -----------------------------------------------------------------


def test_an_idle_round_keeps_notifications_for_the_next_step(decoder: Decoder):
    for req_id in ("r0", "r1", "r2"):
        decoder.serve(req_id)
    decoder.step()
    decoder.nixl.notifs = {"d-agent": [b"r0:1"]}
    decoder.idle_round(INTERVAL)
    assert decoder.nixl.notifs == {}
    decoder.nixl.notifs = {"d-agent": [b"r1:1"], "e-agent": [b"r2:1"]}
    decoder.idle_round(INTERVAL)
    assert decoder.nixl.notifs == {}
    assert decoder.step().finished_sending == {"r0", "r1", "r2"}
    assert decoder.step().finished_sending == set()


def test_notifications_of_several_readers_add_up_over_rounds_and_steps(
    decoder: Decoder,
):
    decoder.serve("r")
    decoder.step()
    for agent in ("d0", "d1"):
        decoder.nixl.notifs = {agent: [b"r:3"]}
        decoder.idle_round(INTERVAL)
    assert decoder.step().finished_sending == set()
    decoder.nixl.notifs = {"d2": [b"r:3"]}
    assert decoder.step().finished_sending == {"r"}


def test_lease_heartbeats_renew_while_idle(decoder: Decoder):
    decoder.serve("r", lease=30.0)
    decoder.serve("expires", lease=30.0)
    decoder.step()
    for _ in range(20):
        decoder.nixl.notifs = {"d-agent": [b"HB:r"]}
        decoder.idle_round(5.0)
    assert decoder.step().finished_sending == {"expires"}
    assert decoder.worker.list_peers()["unread_requests"] == 1


def test_a_nixl_error_while_draining_does_not_end_a_round(decoder: Decoder):
    decoder.connect("p")
    decoder.step()
    decoder.kill("p")
    decoder.nixl.raises["get_new_notifs"] = [GONE] * 10
    decoder.idle(FIRST_HEARTBEAT + 0.5, every=0.5)
    assert decoder.is_clean("p")


# -- Two threads -------------------------------------------------------------------


@pytest.fixture
def run_monitor(decoder: Decoder) -> Iterator[Callable[[], PeerMonitor]]:
    """Have a monitor run the rounds of the decoder's worker, all the time."""
    started: list[PeerMonitor] = []

    def run_monitor() -> PeerMonitor:
        decoder.worker._monitor = running = start(decoder.worker)
        started.append(running)
        return running

    yield run_monitor
    for running in started:
        running.stop()


def lose(decoder: Decoder, *engines: str) -> None:
    """Connect to engines that die; their heartbeats are due and nobody knows."""
    for engine in engines:
        decoder.connect(engine)
    decoder.step()
    decoder.kill(*engines)
    decoder.clock.now += FIRST_HEARTBEAT


@pytest.mark.parametrize(
    "method", ["get_new_notifs", "send_notif", "remove_remote_agent"]
)
def test_a_step_waits_for_one_bounded_round_of_the_monitor(
    decoder: Decoder, run_monitor: Callable[[], PeerMonitor], method: str
):
    engines = [f"p{i}" for i in range(20)]
    lose(decoder, *engines)
    gate = Gate(decoder.nixl, method)
    running = run_monitor()
    assert gate.inside.wait(LONG)
    step = in_thread(decoder.step)
    step.join(0.05)
    assert step.is_alive()
    gate.go.set()
    step.join(LONG)
    assert running.stop()
    # The monitor is kept out by that step: an interval has not passed since.
    removed_by = [t for name, _, t in decoder.nixl.calls if name.startswith("remove")]
    assert step.ident in removed_by
    assert len(removed_by) < len(engines)


def test_steps_and_the_monitor_are_never_inside_nixl_together(
    decoder: Decoder, run_monitor: Callable[[], PeerMonitor]
):
    """The clock runs an interval per step, so both sides always have work."""
    for i in range(5):
        decoder.connect(f"p{i}")
    running = run_monitor()
    for i in range(300):
        sent = decoder.nixl.heartbeats()
        decoder.clock.now += FIRST_HEARTBEAT
        while i % 10 == 0 and decoder.nixl.heartbeats() == sent:
            assert running.is_alive()  # and sends one, or the test times out
        decoder.request(f"r{i}", f"p{i % 5}", blocks=(i,))
        decoder.step()
        decoder.nixl.finish_reads(f"p{i % 5}-agent")
    decoder.step()
    assert running.stop()
    assert len(decoder.finished) == len(set(decoder.finished)) == 300
    # The decoder's fixture looks for violations.


def test_a_step_that_loads_nothing_waits_for_no_handshake(decoder: Decoder):
    """A handshake is outside of NIXL most of the time."""
    decoder.connect("p")
    reached, go = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> list[str]:
        reached.set()
        assert go.wait(LONG)
        return ["q-agent"]

    decoder.prefills["q"] = slow
    decoder.worker._ensure_handshake("q", HOST, 7000, 1)
    loader = in_thread(decoder.run_handshakes)
    assert reached.wait(LONG)
    decoder.read("r", "p")
    assert decoder.finished == ["r"]
    go.set()
    loader.join(LONG)
    assert decoder.connected == {"p", "q"}


# -- Shutdown ----------------------------------------------------------------------


def test_shutdown_waits_for_the_release_it_meets(
    decoder: Decoder, run_monitor: Callable[[], PeerMonitor]
):
    lose(decoder, *(f"p{i}" for i in range(10)))
    gate = Gate(decoder.nixl, "remove_remote_agent")
    running = run_monitor()
    assert gate.inside.wait(LONG)
    stopping = in_thread(decoder.worker.shutdown)
    stopping.join(0.05)
    assert stopping.is_alive()
    gate.go.set()
    stopping.join(LONG)
    assert not running.is_alive()
    assert decoder.nixl.peers == {}
    # The monitor did not go on to the other peers.
    removed_by = [t for name, _, t in decoder.nixl.calls if name.startswith("remove")]
    assert sum(t == stopping.ident for t in removed_by) >= 8


def test_shutdown_does_not_hang_behind_nixl(
    decoder: Decoder,
    run_monitor: Callable[[], PeerMonitor],
    monkeypatch: pytest.MonkeyPatch,
    lines: Lines,
):
    lose(decoder, "p")
    gate = Gate(decoder.nixl, "remove_remote_agent")
    running = run_monitor()
    assert gate.inside.wait(LONG)
    monkeypatch.setattr(monitor, "_JOIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(worker, "_SHUTDOWN_LOCK_TIMEOUT_S", 0.01)
    decoder.worker.shutdown()
    assert len(lines("NIXL peer monitor is still inside a NIXL call")) == 1
    assert len(lines("NIXL is busy in another thread")) == 1
    gate.go.set()
    until(lambda: not running.is_alive())
    decoder.worker.shutdown()
    assert decoder.nixl.peers == {}


def test_shutdown_twice(decoder: Decoder, run_monitor: Callable[[], PeerMonitor]):
    decoder.connect("p")
    running = run_monitor()
    decoder.worker.shutdown()
    decoder.worker.shutdown()
    assert not running.is_alive()
    assert decoder.nixl.called("remove_remote_agent") == ["p-agent"]


def test_a_round_after_shutdown_does_nothing(decoder: Decoder):
    decoder.connect("p")
    decoder.worker.shutdown()
    decoder.nixl.calls.clear()
    assert not decoder.idle_round(10 * INTERVAL)
    assert decoder.nixl.calls == []


def test_a_constructor_that_raises_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    def no_agent(*args: Any) -> None:
        raise RuntimeError("no NIXL here")

    monkeypatch.setattr(base_worker, "NixlWrapper", no_agent)
    monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    with pytest.raises(RuntimeError, match="no NIXL here"):
        make_connector("d")
    gc.collect()
    assert monitor_threads() == []


def test_shutdown_of_a_worker_that_was_never_built():
    object.__new__(NixlConnectorWorker).shutdown()


# -- When the monitor runs -----------------------------------------------------------

start_monitor = worker.PeerWorkerMixin._start_monitor


@pytest.fixture
def monitored(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """A decoder that starts a monitor, which other tests go without."""
    monkeypatch.setattr(worker.PeerWorkerMixin, "_start_monitor", start_monitor)
    yield decoder
    if decoder.worker is not None:
        decoder.worker.shutdown()


def test_the_monitor_starts_with_the_first_peer_and_ends_with_the_worker(
    monitored: Decoder,
):
    monitored.step()
    assert monitor_threads() == []
    monitored.connect("p")
    (thread,) = monitor_threads()
    monitored.connect("q")
    assert monitor_threads() == [thread]
    monitored.worker.shutdown()
    assert monitor_threads() == []


def test_a_prefill_drains_notifications_from_its_first_request_on(
    monitored: Decoder,
):
    monitored.metadata.reqs_in_batch = {"r"}
    monitored.metadata.reqs_to_send = {"r": monitored.clock.now + 30}
    monitored.step()
    assert len(monitor_threads()) == 1


def test_a_monitor_that_could_not_start_is_tried_again(
    monitored: Decoder, monkeypatch: pytest.MonkeyPatch, lines: Lines
):
    with monkeypatch.context() as patch:

        def no_threads(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", no_threads)
        monitored.connect("p")
    assert len(lines("NIXL peer monitor could not be started")) == 1
    monitored.read("r", "p")
    assert monitored.finished == ["r"]
    monitored.connect("q")
    assert len(monitor_threads()) == 1


def test_a_handshake_that_outlives_shutdown_starts_no_monitor(monitored: Decoder):
    """Stock's shutdown does not wait for the handshake threads."""
    monitored.prefills["p"] = ["p-agent"]
    monitored.worker._ensure_handshake("p", HOST, 7000, 1)
    monitored.worker.shutdown()
    monitored.run_handshakes()
    assert monitor_threads() == []


def test_an_idle_decoder_drains_on_its_own_once_an_interval_has_passed(
    monitored: Decoder,
):
    """The whole of it: the real thread, its period, and the fake's clock."""
    monitored.connect("p")
    monitored.step()
    monitored.kill("p")
    monitored.clock.now += FIRST_HEARTBEAT
    until(lambda: monitored.connected == set())
    assert monitored.is_clean("p")


def test_a_worker_dropped_within_a_round_shuts_down_quietly(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    lines: Lines,
):
    """The monitor then holds the last reference, and runs the worker's __del__."""
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(LONG)

    monkeypatch.setattr(NixlConnectorWorker, "_run_idle_round", wait)
    decoder.connect("p")
    decoder.worker._monitor = running = start(decoder.worker)
    assert inside.wait(LONG)
    decoder.worker = decoder.connector.connector_worker = None
    gc.collect()
    go.set()
    until(lambda: not running.is_alive())
    assert decoder.nixl.peers == {}
    assert lines("NIXL peer monitor is still inside a NIXL call") == []
