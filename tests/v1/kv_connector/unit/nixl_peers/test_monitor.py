# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Off the main thread: the side channel, the monitor, and what a tick does."""

import contextlib
import errno
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from fake_side_channel import FakeSideChannel
from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnectorWorker,
    base_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import (
    monitor as nixl_peer_monitor,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.monitor import (
    Answer,
    PeerMonitor,
    SideChannel,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import Verdict

from .decoder import Decoder
from .fake_nixl import FakeNixl, PeerState
from .worker_factory import make_connector

INTERVAL = 2.0
FIRST_BEAT = 1.1 * INTERVAL
# For what must happen; nothing waits this long unless it fails.
LONG = 60.0


@pytest.fixture
def logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM's loggers print, once, whether or not they propagate."""
    vllm_logger = logging.getLogger("vllm")
    monkeypatch.setattr(vllm_logger, "propagate", False)
    vllm_logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog
    vllm_logger.removeHandler(caplog.handler)


def until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + LONG
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        threading.Event().wait(0.001)
    return value


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# -- The side channel --------------------------------------------------------------


class Listener:
    """A prefill's side channel; what it answers is up to the test."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.reply: list[bytes] | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = ("127.0.0.1", port)
        self._stop = threading.Event()
        self._thread = in_thread(self._run)

    def answer_as(self, engine_id: str) -> None:
        """Answer every question as this engine."""
        metadata = NixlAgentMetadata(
            engine_id=engine_id,
            agent_metadata=b"?",
            kv_caches_base_addr=[0],
            device_id=0,
            num_blocks=1,
            block_lens=[1],
            block_strides=[1],
            kv_cache_layout="LBHNC",
            block_size=1,
            ssm_sizes=(0, 0),
            attn_backend_name="?",
            physical_blocks_per_logical_kv_block=1,
        )
        payload = NixlHandshakePayload("hash", msgspec.msgpack.encode(metadata))
        self.reply = [msgspec.msgpack.encode(payload), msgspec.msgpack.encode(1.0)]

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(10):
                identity, _, question = self._socket.recv_multipart()
                self.questions.append(msgspec.msgpack.decode(question))
                if self.reply is not None:
                    self._socket.send_multipart([identity, b"", *self.reply])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    channel = SideChannel()
    yield channel
    channel.close()


def test_an_answer_names_the_engine_that_gave_it(
    channel: SideChannel, listener: Listener
):
    listener.answer_as("p")
    assert channel.ask("p", listener.address, (1, 3), 100.0)
    assert until(lambda: list(channel.answers(101.0))) == [Answer("p", 100.0, "p")]
    # What a handshake asks, so that every peer understands it.
    assert listener.questions == [[GET_META_MSG.decode(), 1, 3]] or (
        listener.questions == [[GET_META_MSG, 1, 3]]
    )
    assert list(channel.answers(200.0)) == []


def test_another_engine_may_answer(channel: SideChannel, listener: Listener):
    listener.answer_as("q")
    channel.ask("p", listener.address, (0, 0), 100.0)
    assert until(lambda: list(channel.answers(101.0))) == [Answer("p", 100.0, "q")]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xc1",
        b"HTTP/1.1 400 Bad Request",
        msgspec.msgpack.encode({"compatibility_hash": "h"}),
        msgspec.msgpack.encode(
            {"compatibility_hash": "h", "agent_metadata_bytes": b"\xff\xfe"}
        ),
        # A string that is no UTF-8.
        b"\x82\xb2compatibility_hash\xa1\xff\xb4agent_metadata_bytes\xc4\x00",
    ],
)
def test_a_reply_that_makes_no_sense_is_no_answer(
    channel: SideChannel, listener: Listener, reply: bytes
):
    listener.reply = [reply]
    channel.ask("p", listener.address, (0, 0), 100.0)
    assert until(lambda: list(channel.answers(101.0))) == [Answer("p", 100.0, None)]


def test_an_open_question_times_out_after_5_s(channel: SideChannel, listener: Listener):
    channel.ask("p", listener.address, (0, 0), 100.0)
    until(lambda: listener.questions)
    assert list(channel.answers(104.9)) == []
    assert list(channel.answers(105.0)) == [Answer("p", 100.0, None)]
    assert list(channel.answers(106.0)) == []


def test_where_nothing_listens_a_question_times_out(
    channel: SideChannel, listener: Listener
):
    listener.close()
    assert channel.ask("p", listener.address, (0, 0), 100.0)
    assert list(channel.answers(104.9)) == []
    assert list(channel.answers(105.0)) == [Answer("p", 100.0, None)]


def test_one_question_per_engine_is_open(channel: SideChannel, listener: Listener):
    assert channel.ask("p", listener.address, (0, 0), 100.0)
    assert not channel.ask("p", listener.address, (0, 0), 101.0)
    assert channel.ask("q", listener.address, (0, 0), 102.0)
    until(lambda: len(listener.questions) == 2)
    assert list(channel.answers(105.0)) == [Answer("p", 100.0, None)]
    assert channel.ask("p", listener.address, (0, 0), 106.0)


def test_a_late_answer_is_not_taken_for_the_next_one(
    channel: SideChannel, listener: Listener
):
    channel.ask("p", listener.address, (0, 0), 100.0)
    until(lambda: listener.questions)
    assert list(channel.answers(105.0)) == [Answer("p", 100.0, None)]
    channel.ask("p", listener.address, (0, 0), 110.0)
    until(lambda: len(listener.questions) == 2)
    assert list(channel.answers(111.0)) == []


def test_the_number_of_open_questions_is_bounded(
    channel: SideChannel, listener: Listener, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nixl_peer_monitor, "_MAX_OPEN_QUESTIONS", 2)
    asked = [channel.ask(e, listener.address, (0, 0), 100.0) for e in "pqr"]
    assert asked == [True, True, False]
    assert len(list(channel.answers(105.0))) == 2
    assert channel.ask("r", listener.address, (0, 0), 105.0)


def test_as_many_questions_as_allowed_can_be_open(
    channel: SideChannel, listener: Listener
):
    count = nixl_peer_monitor._MAX_OPEN_QUESTIONS
    for i in range(count):
        assert channel.ask(f"p{i}", listener.address, (0, 0), 100.0)
    assert len(list(channel.answers(105.0))) == count


# -- The monitor's life ------------------------------------------------------------


class Ticked:
    """A worker that does what the test says in each tick."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        self.ticks = 0

    def _monitor_tick(
        self, side_channel: SideChannel, stopping: threading.Event
    ) -> None:
        self.ticks += 1
        self.tick()


def monitor_of(worker: Any) -> PeerMonitor:
    return PeerMonitor(worker, period=0.001)


def test_it_ticks_until_stopped():
    worker = Ticked()
    monitor = monitor_of(worker)
    monitor.start()
    until(lambda: worker.ticks >= 3)
    start = time.monotonic()
    assert monitor.stop()
    assert time.monotonic() - start < 1
    ticks = worker.ticks
    assert not monitor._thread.is_alive()
    assert worker.ticks == ticks
    assert monitor.stop()


def test_one_never_started_is_stopped():
    assert monitor_of(Ticked()).stop()


def test_a_tick_that_raises_is_logged_once_and_survived(
    logs: pytest.LogCaptureFixture,
):
    def fail() -> None:
        raise RuntimeError("same each time")

    worker = Ticked(fail)
    monitor = monitor_of(worker)
    monitor.start()
    until(lambda: worker.ticks >= 5)
    assert monitor.stop()
    assert len([r for r in logs.records if "tick failed" in r.getMessage()]) == 1
    assert "same each time" in logs.text


def test_stop_waits_a_second_at_most_for_a_tick(monkeypatch: pytest.MonkeyPatch):
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        go.wait(LONG)

    worker = Ticked(hang)
    monitor = monitor_of(worker)
    monitor.start()
    assert inside.wait(LONG)
    assert nixl_peer_monitor._JOIN_TIMEOUT_S == 1.0
    monkeypatch.setattr(nixl_peer_monitor, "_JOIN_TIMEOUT_S", 0.01)
    assert not monitor.stop()
    go.set()
    until(lambda: not monitor._thread.is_alive())
    assert worker.ticks == 1


def test_a_tick_may_stop_it():
    stopped = []
    worker = Ticked()
    monitor = monitor_of(worker)
    worker.tick = lambda: stopped.append(monitor.stop())
    monitor.start()
    until(lambda: stopped and not monitor._thread.is_alive())
    assert worker.ticks == 1


def test_it_ends_with_its_worker():
    ticked = threading.Event()
    worker = Ticked(ticked.set)
    monitor = monitor_of(worker)
    monitor.start()
    assert ticked.wait(LONG)
    del worker
    gc.collect()
    until(lambda: not monitor._thread.is_alive())
    monitor.stop()


# With vLLM's modules left out, which take long to import and print on their own.
EXIT_SCRIPT = """
import importlib.util, sys, threading, zmq
from unittest.mock import MagicMock

for name in ("distributed.kv_transfer.kv_connector.v1.nixl.metadata",
             "logger", "utils.network_utils"):
    sys.modules["vllm." + name] = MagicMock()
spec = importlib.util.spec_from_file_location("monitor", sys.argv[1])
sys.modules["monitor"] = monitor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(monitor)

class Worker:
    def __init__(self, inside):
        self.inside = inside
        self.socket = None
        self.ticked = threading.Event()
    def _monitor_tick(self, side_channel, stopping):
        if self.socket is None:
            self.socket = side_channel._context.socket(zmq.REQ)
            self.socket.connect("tcp://127.0.0.1:9")
            self.socket.send(b"question")
        self.ticked.set()
        if self.inside:
            stopping.wait()
            print("ended", flush=True)

workers = [Worker(inside=False), Worker(inside=True)]
for worker in workers:
    monitor.PeerMonitor(worker, 0.0001).start()
for worker in workers:
    worker.ticked.wait()
"""


def test_at_exit_a_tick_ends_and_nothing_else_is_printed():
    result = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, nixl_peer_monitor.__file__],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended\n", "")


# -- What a tick does --------------------------------------------------------------


@pytest.fixture
def side_channel() -> FakeSideChannel:
    return FakeSideChannel()


@pytest.fixture
def tick(decoder: Decoder, side_channel: FakeSideChannel) -> Callable[..., None]:
    """Let time pass, then tick."""

    def tick(seconds: float = 0.0) -> None:
        decoder.clock.now += seconds
        decoder.worker._monitor_tick(side_channel, threading.Event())

    return tick


def ticks(tick: Callable[..., None], duration: float, every: float = 0.5) -> None:
    for _ in range(round(duration / every)):
        tick(every)


def test_a_tick_leaves_nixl_alone_while_steps_run(
    decoder: Decoder, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].die()
    decoder.step(FIRST_BEAT - 0.2)
    decoder.nixl.calls.clear()
    tick(0.9 * INTERVAL)
    assert decoder.nixl.calls == []
    assert decoder.connected == {"p"}


def test_an_idle_worker_sends_heartbeats(decoder: Decoder, tick: Callable[..., None]):
    decoder.connect("p", "a0", "a1")
    decoder.step()
    # After ten intervals, idle time would let the interval grow.
    ticks(tick, FIRST_BEAT + 8 * INTERVAL + 0.5)
    assert decoder.nixl.heartbeats("a0") == decoder.nixl.heartbeats("a1") == 9


def test_steps_and_ticks_share_one_schedule(
    decoder: Decoder, tick: Callable[..., None]
):
    """A tick does nothing for an interval after a step, then has one to send in."""
    decoder.connect("p")
    sent_at = [decoder.clock.now]
    for i in range(40):
        if i % 7 == 0:
            decoder.step(0.5)
        else:
            tick(0.5)
        if decoder.nixl.heartbeats() == len(sent_at):
            sent_at.append(decoder.clock.now)
    assert decoder.nixl.heartbeats() == len(sent_at) - 1
    gaps = [b - a for a, b in zip(sent_at, sent_at[1:])]
    assert all(INTERVAL / 2 <= gap <= 2 * INTERVAL for gap in gaps)
    assert len(gaps) >= 7


def test_an_idle_worker_releases_a_dead_peer(
    decoder: Decoder, tick: Callable[..., None]
):
    decoder.connect("p", "a0", "a1")
    decoder.step()
    decoder.nixl.peers["a1"].die()
    ticks(tick, FIRST_BEAT + 0.5)
    assert decoder.is_clean("p")
    assert sorted(decoder.nixl.called("remove_remote_agent")) == ["a0", "a1"]


def test_one_tick_releases_every_dead_peer_that_is_free(
    decoder: Decoder, tick: Callable[..., None]
):
    for engine in ("p", "q", "r", "alive"):
        decoder.connect(engine)
    for agent in ("p-agent", "q-agent", "r-agent"):
        decoder.nixl.peers[agent].die()
    decoder.step()
    tick(FIRST_BEAT)
    assert decoder.connected == {"alive"}


def test_an_idle_worker_holds_a_peer_while_a_read_is_open(
    decoder: Decoder, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    ticks(tick, 100)
    assert decoder.connected == {"p"}
    assert decoder.worker._peers.lost.keys() == {"p"}
    decoder.nixl.finish_reads("p-agent")
    # Only a step sees that the read is done, and reports it first.
    ticks(tick, 100)
    assert decoder.connected == {"p"}
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.is_clean("p")


def test_between_the_halves_of_a_step_a_posted_read_holds_its_peer(
    decoder: Decoder, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.step()
    decoder.clock.now += 10 * INTERVAL
    decoder.request("r", "p")
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    metadata, decoder._metadata = decoder._metadata, NixlConnectorMetadata()
    decoder.worker.start_load_kv(metadata)
    decoder.clock.now += FIRST_BEAT
    tick()
    assert decoder.worker._peers.lost and decoder.connected == {"p"}
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r"] and decoder.failed == []
    assert decoder.is_clean("p")


def test_an_untyped_error_while_idle_does_not_release(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    side_channel.answered_by["p"] = "p"
    decoder.connect("p")
    decoder.step()
    decoder.nixl.raises["send_notif"] = [nixlBackendError("?")] * 100
    ticks(tick, 50 * INTERVAL)
    assert decoder.connected == {"p"}


def test_a_tick_does_nothing_when_stopping(
    decoder: Decoder, side_channel: FakeSideChannel
):
    decoder.connect("p")
    decoder.step()
    decoder.clock.now += FIRST_BEAT
    decoder.nixl.calls.clear()
    stopping = threading.Event()
    stopping.set()
    decoder.worker._monitor_tick(side_channel, stopping)
    assert decoder.nixl.calls == []


def test_a_question_that_cannot_be_asked_keeps_no_dead_peer(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    """Out of file descriptors, ZMQ makes no socket: then releases matter most."""

    def ask(*args: Any) -> bool:
        raise zmq.ZMQError(errno.EMFILE)

    decoder.connect("p")
    decoder.step()
    side_channel.ask = ask  # type: ignore[method-assign]
    for second in range(100):
        if second == 50:
            decoder.nixl.peers["p-agent"].die()
        with contextlib.suppress(zmq.ZMQError):
            tick(1.0)
    assert decoder.is_clean("p")


# -- Notifications -----------------------------------------------------------------


def serve(decoder: Decoder, *req_ids: str, lease: float = 30.0) -> None:
    """Let requests wait to be read from here."""
    worker = decoder.worker
    for req_id in req_ids:
        worker._reqs_to_process.add(req_id)
        worker._reqs_to_send[req_id] = decoder.clock.now + lease


def test_an_idle_tick_keeps_notifications_for_the_next_step(
    decoder: Decoder, tick: Callable[..., None]
):
    serve(decoder, "r0", "r1", "r2")
    decoder.step()
    decoder.nixl.notifs = {"d-agent": [b"r0:1"]}
    tick(INTERVAL)
    assert decoder.nixl.notifs == {}
    decoder.nixl.notifs = {"d-agent": [b"r1:1"], "e-agent": [b"r2:1"]}
    tick(INTERVAL)
    decoder.nixl.notifs = {}
    assert decoder.step().finished_sending == {"r0", "r1", "r2"}
    assert decoder.step().finished_sending == set()


def test_kept_notifications_are_in_order_and_before_new_ones(
    decoder: Decoder, tick: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    seen: list[dict[str, list[bytes]]] = []

    def get_new_notifs(worker: Any) -> set[str]:
        seen.append(worker.nixl_wrapper.get_new_notifs())
        return set()

    monkeypatch.setattr(NixlPullConnectorWorker, "_get_new_notifs", get_new_notifs)
    decoder.step()
    seen.clear()
    decoder.nixl.notifs = {"a": [b"1:1", b"HB:x", b"2:1"], "b": [b"3:1"]}
    tick(INTERVAL)
    decoder.nixl.notifs = {"a": [b"4:1", b"HB:"]}
    tick(INTERVAL)
    decoder.nixl.notifs = {"a": [b"5:1", b"HB:y"], "c": [b"6:1"]}
    decoder.step()
    decoder.step()
    assert seen == [
        {
            "a": [b"1:1", b"2:1", b"4:1", b"5:1", b"HB:y"],
            "b": [b"3:1"],
            "c": [b"6:1"],
        },
        {},
    ]
    assert decoder.worker.nixl_wrapper is decoder.nixl


def test_notifications_of_several_consumers_add_up_over_ticks_and_steps(
    decoder: Decoder, tick: Callable[..., None]
):
    serve(decoder, "r")
    decoder.step()
    for agent in ("d0", "d1"):
        decoder.nixl.notifs = {agent: [b"r:3"]}
        tick(INTERVAL)
    assert decoder.step().finished_sending == set()
    decoder.nixl.notifs = {"d2": [b"r:3"]}
    assert decoder.step().finished_sending == {"r"}


def test_lease_heartbeats_renew_while_idle(decoder: Decoder, tick: Callable[..., None]):
    serve(decoder, "r", "expires", lease=30.0)
    decoder.step()
    for _ in range(20):
        decoder.nixl.notifs = {"d-agent": [b"HB:r"]}
        tick(5.0)
    assert decoder.step().finished_sending == {"expires"}
    assert "r" in decoder.worker._reqs_to_send


def test_kept_notifications_are_reported_even_if_no_new_ones_can_be_had(
    decoder: Decoder, tick: Callable[..., None]
):
    serve(decoder, "r")
    decoder.step()
    decoder.nixl.notifs = {"d-agent": [b"r:1"]}
    tick(INTERVAL)
    decoder.nixl.raises["get_new_notifs"] = [nixlBackendError("?")]
    assert decoder.step().finished_sending == {"r"}
    assert decoder.step().finished_sending == set()


def test_a_nixl_error_while_draining_does_not_end_a_tick(
    decoder: Decoder, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.step()
    decoder.nixl.peers["p-agent"].die()
    decoder.nixl.raises["get_new_notifs"] = [nixlRemoteDisconnectError("?")] * 10
    ticks(tick, FIRST_BEAT + 0.5)
    assert decoder.is_clean("p")


# -- Silent and replaced peers -----------------------------------------------------


def test_a_quiet_peer_is_asked_at_its_address(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    side_channel.answered_by["p"] = "p"
    decoder.connect("p", "a0", "a1", port=7000)
    decoder.step()
    tick(14.9)
    assert side_channel.asked == []
    tick(1.5)  # a tenth of the question interval: the next look
    assert side_channel.asked == [("p", ("p", 7000), (0, 0))]
    ticks(tick, 1000)
    assert decoder.connected == {"p"}
    # Idle, it is asked every 30 s.
    assert 1000 / 30 - 1 < len(side_channel.asked) < 1000 / 30 + 10


def test_a_peer_that_answers_nothing_is_released(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    side_channel.answered_by["talks"] = "talks"
    decoder.connect("p")
    decoder.connect("talks")
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    ticks(tick, 39)
    assert decoder.connected == {"p", "talks"}
    ticks(tick, 20)
    assert decoder.connected == {"talks"}
    assert decoder.is_clean("p")
    ticks(tick, 200)
    assert decoder.connected == {"talks"}


def test_silence_is_noticed_while_steps_run_and_the_step_releases(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    for _ in range(60):
        decoder.step(0.5)
        tick(0.5)
    assert decoder.is_clean("p")
    monitor_calls = {"remove_remote_agent", "get_new_notifs"}
    assert monitor_calls <= {name for name, _, _ in decoder.nixl.calls}


def test_finished_reads_are_proof_of_life(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    decoder.connect("p")
    for i in range(200):
        decoder.request(f"r{i}", "p")
        decoder.step(0.5)
        decoder.nixl.finish_reads("p-agent")
        decoder.step()
        tick()
    assert side_channel.asked == []
    assert decoder.connected == {"p"}


@pytest.mark.parametrize("blocks", [(), (0, 1)])
def test_posted_reads_and_notifications_are_none(
    decoder: Decoder,
    side_channel: FakeSideChannel,
    tick: Callable[..., None],
    blocks: tuple[int, ...],
):
    """A hung peer takes notifications, and its reads stay open."""
    decoder.connect("p")
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    for i in range(60):
        if "p" in decoder.connected:
            decoder.request(f"r{i}", "p", blocks=blocks)
        decoder.step(1.0)
        tick()
    assert (decoder.connected == set()) is (not blocks)
    assert blocks == () or decoder.worker._peers.lost["p"].verdict is Verdict.SILENT


def test_a_stopped_peer_that_goes_on_is_kept(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    """SIGSTOP, SIGCONT: the read that held the release back finishes."""
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.nixl.peers["p-agent"].state = PeerState.HUNG
    ticks(tick, 100)
    assert decoder.worker._peers.lost["p"].verdict is Verdict.SILENT
    assert decoder.connected == {"p"}
    sent = decoder.nixl.heartbeats()
    ticks(tick, 100)
    assert decoder.nixl.heartbeats() == sent
    decoder.nixl.peers["p-agent"].state = PeerState.ALIVE
    decoder.nixl.finish_reads("p-agent")
    side_channel.answered_by["p"] = "p"
    decoder.step()
    assert decoder.finished == ["stuck"]
    assert decoder.worker._peers.lost == {}
    decoder.request("next", "p")
    decoder.step(1.0)
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["stuck", "next"] and decoder.failed == []
    ticks(tick, 100)
    assert decoder.connected == {"p"}
    assert decoder.nixl.heartbeats() > sent
    assert decoder.attempts == ["p"]


def test_a_replaced_peer_is_released(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    """The new engine at its address has not been asked for anything yet."""
    decoder.connect("old", port=7000)
    decoder.step()
    side_channel.answered_by["old"] = "new"
    ticks(tick, 18)
    assert decoder.is_clean("old")


def test_a_replaced_peer_is_held_while_a_read_is_open(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    decoder.connect("old", port=7000)
    decoder.request("r", "old")
    decoder.step()
    side_channel.answered_by["old"] = "new"
    ticks(tick, 100)
    assert decoder.worker._peers.lost["old"].verdict is Verdict.REPLACED
    assert decoder.connected == {"old"}
    decoder.nixl.finish_reads("old-agent")
    decoder.step()
    assert decoder.is_clean("old") and decoder.finished == ["r"]


def test_an_answer_about_a_peer_that_has_gone_changes_nothing(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    decoder.connect("p")
    decoder.step()
    tick(15)
    assert side_channel.asked
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.worker._send_heartbeat("p")
    decoder.worker._release_unreachable_remote_engines()
    side_channel.answered_by["p"] = "new"
    tick(1)
    assert decoder.connected == set()
    assert decoder.worker._peers.lost == {}


def test_an_answer_of_before_a_reconnect_is_no_evidence(
    decoder: Decoder, side_channel: FakeSideChannel, tick: Callable[..., None]
):
    """The engine has moved to another address; the old one is someone else's."""
    decoder.connect("p", port=7000)
    decoder.step()
    tick(15)
    assert side_channel.asked
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.worker._send_heartbeat("p")
    decoder.worker._release_unreachable_remote_engines()
    decoder.clock.now += 1
    decoder.connect("p", port=7001)
    side_channel.answered_by["p"] = "new"
    tick()
    assert decoder.connected == {"p"}
    assert decoder.worker._peers.lost == {}


def test_a_step_between_a_handshake_and_its_callback_forgets_nothing(
    decoder: Decoder,
):
    """The handshake thread has let go of the lock; its future is not done yet."""
    decoder.prefills["p"] = ["p-agent"]
    decoder.worker._ensure_handshake("p", "p", 7000, 1)
    ((future, handshake, args),) = decoder.handshakes.pending
    result = handshake(*args)
    decoder.step(INTERVAL)
    future.set_result(result)
    decoder.steps(2 * INTERVAL)
    peer = decoder.worker._peers.get("p")
    assert peer is not None
    # Without its address it could never be asked for a sign of life.
    assert peer.address == ("p", 7000)


# -- Two threads -------------------------------------------------------------------


class Gate:
    """Stops a call of the fake agent half-way, inside NIXL."""

    def __init__(self, nixl: FakeNixl, method: str):
        self.inside = threading.Event()
        self.go = threading.Event()
        original = getattr(nixl, method)

        def gated(*args: Any, **kwargs: Any) -> Any:
            with nixl._call(f"gate of {method}", threading.current_thread().name):
                self.inside.set()
                assert self.go.wait(LONG)
            return original(*args, **kwargs)

        setattr(nixl, method, gated)


@pytest.fixture
def start_monitor(
    decoder: Decoder, side_channel: FakeSideChannel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], PeerMonitor]]:
    """Have a real monitor tick the decoder's worker, all the time."""
    monkeypatch.setattr(nixl_peer_monitor, "SideChannel", lambda: side_channel)
    started: list[PeerMonitor] = []

    def start_monitor() -> PeerMonitor:
        monitor = PeerMonitor(decoder.worker, period=0.001)
        decoder.worker._monitor = monitor
        started.append(monitor)
        monitor.start()
        return monitor

    yield start_monitor
    for monitor in started:
        monitor.stop()


def kill(decoder: Decoder, *engines: str) -> None:
    """Connect to engines that die; nobody has noticed yet."""
    for engine in engines:
        decoder.connect(engine)
    decoder.step()
    for engine in engines:
        decoder.nixl.peers[f"{engine}-agent"].die()


@pytest.mark.parametrize(
    "method", ["get_new_notifs", "send_notif", "remove_remote_agent"]
)
def test_a_step_waits_for_one_peer_at_most(
    decoder: Decoder, start_monitor: Callable[[], PeerMonitor], method: str
):
    kill(decoder, "p", "q", "r")
    gate = Gate(decoder.nixl, method)
    decoder.clock.now += FIRST_BEAT
    monitor = start_monitor()
    assert gate.inside.wait(LONG)
    main = in_thread(decoder.step)
    until(lambda: decoder.worker._step_waits)
    decoder.nixl.calls.clear()
    gate.go.set()
    main.join(LONG)
    assert monitor.stop()
    # The step did the rest of the work itself, and nothing came in between.
    assert decoder.connected == set()
    threads = [thread for _, _, thread in decoder.nixl.calls]
    first = threads.index(main.ident)
    assert set(threads[:first]) <= {monitor._thread.ident}
    assert set(threads[first:]) == {main.ident}
    assert f"gate of {method}" not in [
        name for name, _, _ in decoder.nixl.calls[:first]
    ]


def test_steps_and_the_monitor_are_never_inside_nixl_together(
    decoder: Decoder,
    side_channel: FakeSideChannel,
    start_monitor: Callable[[], PeerMonitor],
):
    """The clock runs a beat per step, so both sides always have work."""
    for i in range(5):
        decoder.connect(f"p{i}")
        side_channel.answered_by[f"p{i}"] = f"p{i}"
    monitor = start_monitor()
    for i in range(300):
        decoder.clock.now += FIRST_BEAT
        decoder.request(f"r{i}", f"p{i % 5}", blocks=(i,))
        threading.Event().wait(0.0005)
        decoder.step()
        decoder.nixl.finish_reads(f"p{i % 5}-agent")
    decoder.step()
    assert monitor.stop()
    assert len(decoder.finished) == len(set(decoder.finished)) == 300
    senders = {t for name, _, t in decoder.nixl.calls if name == "send_notif"}
    assert monitor._thread.ident in senders
    # decoder's teardown looks for violations


def test_a_handshake_loads_metadata_alone(decoder: Decoder):
    decoder.connect("p")
    decoder.step()
    gate = Gate(decoder.nixl, "add_remote_agent")
    decoder.prefills["q"] = ["q-agent"]
    decoder.worker._ensure_handshake("q", "p", 7000, 1)
    loader = in_thread(decoder.run_handshakes)
    assert gate.inside.wait(LONG)
    decoder.clock.now += FIRST_BEAT
    main = in_thread(decoder.step)
    until(lambda: decoder.worker._step_waits)
    gate.go.set()
    for thread in (main, loader):
        thread.join(LONG)
    decoder.steps(FIRST_BEAT)
    assert decoder.connected == {"p", "q"}


# -- Shutdown ----------------------------------------------------------------------


def test_shutdown_waits_for_the_release_it_meets(
    decoder: Decoder, start_monitor: Callable[[], PeerMonitor]
):
    kill(decoder, "p", "q", "r")
    gate = Gate(decoder.nixl, "remove_remote_agent")
    decoder.clock.now += FIRST_BEAT
    monitor = start_monitor()
    assert gate.inside.wait(LONG)
    main = in_thread(decoder.worker.shutdown)
    until(monitor._stopping.is_set)
    start = time.monotonic()
    gate.go.set()
    main.join(LONG)
    assert time.monotonic() - start < 1
    assert not monitor._thread.is_alive()
    assert decoder.connected == set()
    assert decoder.nixl.peers == {}
    # The monitor did not go on to the next peer.
    monitor_gates = [
        arg for name, arg, _ in decoder.nixl.calls if name.startswith("gate of")
    ]
    assert monitor_gates.count("vllm-nixl-peer-monitor") == 1


def test_shutdown_does_not_hang_behind_nixl(
    decoder: Decoder,
    start_monitor: Callable[[], PeerMonitor],
    monkeypatch: pytest.MonkeyPatch,
    logs: pytest.LogCaptureFixture,
):
    kill(decoder, "p")
    gate = Gate(decoder.nixl, "remove_remote_agent")
    decoder.clock.now += FIRST_BEAT
    monitor = start_monitor()
    assert gate.inside.wait(LONG)
    monkeypatch.setattr(nixl_peer_monitor, "_JOIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(nixl_connector, "_SHUTDOWN_LOCK_TIMEOUT_S", 0.01)
    decoder.worker.shutdown()
    assert "NIXL is busy in another thread" in logs.text
    gate.go.set()
    until(lambda: not monitor._thread.is_alive())
    decoder.worker.shutdown()
    assert decoder.nixl.peers == {}


def test_shutdown_twice(decoder: Decoder, start_monitor: Callable[[], PeerMonitor]):
    decoder.connect("p")
    monitor = start_monitor()
    decoder.worker.shutdown()
    calls = len(decoder.nixl.called("remove_remote_agent"))
    decoder.worker.shutdown()
    assert not monitor._thread.is_alive()
    assert len(decoder.nixl.called("remove_remote_agent")) == calls == 1


def monitor_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "nixl" in t.name]


def test_a_constructor_that_raises_leaves_no_thread(monkeypatch: pytest.MonkeyPatch):
    def no_agent(*args: Any) -> None:
        raise RuntimeError("no NIXL here")

    monkeypatch.setattr(base_worker, "NixlWrapper", no_agent)
    monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    before = monitor_threads()
    with pytest.raises(RuntimeError, match="no NIXL here"):
        make_connector("d")
    gc.collect()
    assert monitor_threads() == before


def test_shutdown_of_a_worker_that_was_never_built():
    object.__new__(NixlConnectorWorker).shutdown()


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``_start_monitor`` itself, which the decoder's fixture takes out."""
    return NixlConnectorWorker._start_monitor


def test_the_monitor_starts_with_the_first_peer_and_ends_with_the_worker(
    real_start: Callable[[Any], None],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(NixlConnectorWorker, "_start_monitor", real_start)
    decoder.step()
    assert decoder.worker._monitor is None
    decoder.connect("p")
    monitor = decoder.worker._monitor
    assert monitor is not None and monitor._thread.is_alive()
    decoder.connect("q")
    assert decoder.worker._monitor is monitor
    decoder.worker.shutdown()
    assert not monitor._thread.is_alive()


def test_a_prefill_drains_notifications_from_its_first_request_on(
    real_start: Callable[[Any], None],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(NixlConnectorWorker, "_start_monitor", real_start)
    decoder._metadata.reqs_in_batch = {"r"}
    decoder._metadata.reqs_to_send = {"r": decoder.clock.now + 30}
    decoder.step()
    assert decoder.worker._monitor is not None
    decoder.worker.shutdown()


def test_a_handshake_that_outlives_shutdown_starts_no_monitor(
    real_start: Callable[[Any], None],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
):
    """Stock's shutdown does not wait for the handshake thread."""
    monkeypatch.setattr(NixlConnectorWorker, "_start_monitor", real_start)
    decoder.prefills["p"] = ["p-agent"]
    decoder.worker._ensure_handshake("p", "p", 7000, 1)
    before = monitor_threads()
    decoder.worker.shutdown()
    decoder.run_handshakes()
    try:
        assert monitor_threads() == before
    finally:
        if decoder.worker._monitor is not None:
            decoder.worker._monitor.stop()


def test_a_worker_dropped_within_a_tick_shuts_down_quietly(
    decoder: Decoder,
    start_monitor: Callable[[], PeerMonitor],
    monkeypatch: pytest.MonkeyPatch,
    logs: pytest.LogCaptureFixture,
):
    """The monitor then holds the last reference, and runs the worker's __del__."""
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(LONG)

    monkeypatch.setattr(NixlConnectorWorker, "_monitor_tick", wait)
    decoder.connect("p")
    monitor = start_monitor()
    assert inside.wait(LONG)
    decoder.worker = decoder.connector.connector_worker = None
    gc.collect()
    go.set()
    until(lambda: not monitor._thread.is_alive())
    assert decoder.nixl.peers == {}
    assert "still inside a NIXL call" not in logs.text


def test_a_step_holds_the_lock_and_gives_it_back(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
):
    stock_cls = nixl_connector.NixlPullConnectorWorker
    lock = decoder.worker._nixl_lock
    held = []
    for name in ("start_load_kv", "get_transfer_results"):
        stock = getattr(stock_cls, name)

        def call(self, *args, stock=stock):
            held.append(lock._is_owned())
            return stock(self, *args)

        monkeypatch.setattr(stock_cls, name, call)
    decoder.step()
    assert held == [True, True]
    assert not lock._is_owned()
