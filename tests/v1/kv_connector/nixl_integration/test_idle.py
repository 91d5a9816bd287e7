# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that take no step: the monitor on real NIXL agents, on both sides."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder, Prefill
from tests.support.waiting import SLACK_S, wait_until

INTERVAL = 0.5
RELEASED_WITHIN = 2 * INTERVAL + SLACK_S
MONITOR = "vllm-nixl-peer-monitor"
# A day of a hundred decoders' heartbeats at the cap of 30 s, rounded up.
DAY_OF_HEARTBEATS = 300_000
MB = 1e6

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == MONITOR]


# -- The decoder's side ------------------------------------------------------------


def test_an_idle_decoder_releases_a_killed_prefill(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    target, survivor = start_prefill("target"), start_prefill("survivor")
    decoder.read(survivor)
    decoder.read(target)
    agent = decoder.agent_of("target")

    target.kill()
    # The monitor logs the release when it is through with it.
    released = "NIXL peer released: target"
    took = decoder.wait_until(lambda: decoder.lines(released), 30, stepping=False)

    assert took < RELEASED_WITHIN, decoder.evidence()
    assert decoder.connected == {"survivor"}
    assert not decoder.worker.nixl_wrapper.check_remote_metadata(agent)
    assert len(decoder.lines(released)) == 1
    decoder.read(survivor)
    replacement = start_prefill("replacement", port=target.port)
    decoder.read(replacement)
    assert decoder.agent.violations == []


def test_the_monitor_never_releases_under_a_read_in_flight(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL, num_blocks=4096)
    target = start_prefill("target", num_blocks=4096)
    decoder.read(target)
    req_id = decoder.start(target, range(4096))
    decoder.step()
    target.kill()

    decoder.wait_until(
        lambda: decoder.lines("NIXL peer release deferred by in-flight reads: target"),
        RELEASED_WITHIN + 10,
        stepping=False,
    )
    deferred_until = time.monotonic() + 2 * INTERVAL
    decoder.wait_until(lambda: time.monotonic() > deferred_until, 30, stepping=False)
    assert decoder.connected == {"target"}

    decoder.wait_until(lambda: not decoder.connected, 10)
    assert decoder.failed == [req_id]
    assert decoder.agent.violations == []


def test_shutdown_stops_the_monitor(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    before = monitors()
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    assert monitors() == before, "a worker without peers needs no monitor"
    prefill = start_prefill("prefill")
    decoder.read(prefill)
    assert len(monitors()) == len(before) + 1

    start = time.monotonic()
    decoder.worker.shutdown()

    assert time.monotonic() - start < SLACK_S
    assert monitors() == before
    assert not decoder.connected
    assert decoder.agent.violations == []


def test_shutdown_during_a_release(
    make_decoder: MakeDecoder,
    start_prefill: StartPrefill,
    monkeypatch: pytest.MonkeyPatch,
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    target, survivor = start_prefill("target"), start_prefill("survivor")
    decoder.read(survivor)
    decoder.read(target)
    releasing = threading.Event()
    remove = decoder.agent.remove_remote_agent

    def remove_slowly(agent: str) -> None:
        releasing.set()
        time.sleep(0.5)
        remove(agent)

    monkeypatch.setattr(
        decoder.agent, "remove_remote_agent", remove_slowly, raising=False
    )
    target.kill()
    assert releasing.wait(RELEASED_WITHIN + 10), decoder.evidence()
    monkeypatch.undo()
    start = time.monotonic()
    decoder.worker.shutdown()

    assert time.monotonic() - start < SLACK_S
    assert monitors() == []
    assert not decoder.connected
    assert decoder.agent.violations == []


@pytest.mark.parametrize("shut_down", [True, False])
def test_nothing_is_printed_at_exit(
    fork_server: ForkServer, start_prefill: StartPrefill, shut_down: bool
):
    prefill = start_prefill("prefill")

    def printed_at_exit(interval: float) -> list[str]:
        arguments = {
            "engine_id": "decoder",
            "extra": {"peer_heartbeat_interval": interval},
        }
        child = fork_server.spawn(
            "decoder", "tests.support.decoder_process:DecoderProcess", arguments, {}
        )
        with contextlib.closing(child):
            has_monitor = child.call(
                "read", prefill.engine_id, prefill.host, prefill.port, 8
            )
            assert has_monitor == (interval > 0)
            child.tell("leave", shut_down)
            wait_until(lambda: not child.alive, 20, child.evidence)
            lines = child.log.read_text().splitlines()
        return lines[lines.index("leaving") + 1 :]

    # What the stock worker's process prints at its end is not ours to judge.
    assert len(printed_at_exit(INTERVAL)) == len(printed_at_exit(0))


# -- The prefill's side --------------------------------------------------------------


def send_heartbeats(decoder: Decoder, prefill: Prefill, count: int) -> None:
    agent = decoder.agent_of(prefill.engine_id)
    for _ in range(count):
        decoder.worker.nixl_wrapper.send_notif(agent, notif_msg=b"HB:")


def test_heartbeats_do_not_pile_up_in_an_idle_prefill(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    # Stock decoders: no monitor of theirs gets in the way of the burst.
    decoders = [make_decoder(f"d{i}", peer_heartbeat_interval=0) for i in range(4)]
    prefill = start_prefill("prefill", stepping=False, peer_heartbeat_interval=INTERVAL)
    for decoder in decoders:
        decoder.read(prefill)
    prefill.call("step")
    before = prefill.state()

    def drained() -> int:
        return prefill.state()["notifs"].get(MONITOR, 0)

    # A day passes in seconds, so 10,000 at a time arrive between two of its drains.
    portion = 10_000
    for sent in range(portion, DAY_OF_HEARTBEATS + 1, portion):
        for decoder in decoders:
            send_heartbeats(decoder, prefill, portion // len(decoders))
        wait_until(lambda sent=sent: drained() >= sent, 60, prefill.evidence)

    grown = prefill.state()["rss"] - before["rss"]
    first_step = prefill.call("step")
    print(f"idle prefill: grown by {grown / MB:.1f} MB, first step {first_step:.4f} s")
    assert grown < 10 * MB
    assert first_step < 0.05
    assert prefill.state()["violations"] == []


def test_completions_reach_the_first_step_of_an_idle_prefill_once(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoders = [make_decoder(f"d{i}", peer_heartbeat_interval=INTERVAL) for i in (0, 1)]
    prefill = start_prefill("prefill", stepping=False, peer_heartbeat_interval=INTERVAL)
    req_ids = [decoder.start(prefill, [i]) for decoder in decoders for i in range(4)]
    taken = prefill.state()["notifs"].get(MONITOR, 0)
    for decoder in decoders:
        decoder.wait_until(lambda d=decoder: len(d.finished) == 4, 20)
        send_heartbeats(decoder, prefill, 1)
    # More heartbeats arrive meanwhile: the decoders' own.
    wait_until(
        lambda: prefill.state()["notifs"].get(MONITOR, 0) >= taken + 10,
        20,
        prefill.evidence,
    )
    assert prefill.state()["finished_sending"] == []

    prefill.call("step")
    expected = sorted(f"remote-{req_id}" for req_id in req_ids)
    assert sorted(prefill.state()["finished_sending"]) == expected
    for _ in range(5):
        prefill.call("step")
    assert sorted(prefill.state()["finished_sending"]) == expected
    # What the stock worker says of a completion that comes twice.
    assert "unrecognized request" not in prefill.child.log.read_text()
    assert prefill.state()["violations"] == []


def test_a_stock_prefill_is_buried_in_heartbeats(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    """What the tests above compare to."""
    decoder = make_decoder(peer_heartbeat_interval=0)
    prefill = start_prefill("prefill", stepping=False, peer_heartbeat_interval=0)
    decoder.read(prefill)
    prefill.call("step")
    before = prefill.state()["rss"]
    send_heartbeats(decoder, prefill, DAY_OF_HEARTBEATS)
    wait_until(
        lambda: prefill.state()["rss"] - before > 15 * MB,
        60,
        prefill.evidence,
        poll_s=0.2,
    )
    grown = prefill.state()["rss"] - before
    first_step = prefill.call("step")
    print(f"stock prefill: grown by {grown / MB:.1f} MB, first step {first_step:.4f} s")
    assert first_step > 0.05
