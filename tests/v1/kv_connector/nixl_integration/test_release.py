# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A killed prefill is released: real workers, real NIXL agents over TCP."""

import os
import statistics
import time
from collections.abc import Callable

import pytest
from nixl._bindings import nixlNotFoundError

from tests.support.peers import Decoder, Prefill
from tests.support.prefill_group import PrefillGroup, connect
from tests.support.prefill_process import rss_bytes
from tests.support.waiting import SLACK_S, wait_until
from tests.v1.kv_connector.unit.nixl_peers.worker_factory import per_engine_state

INTERVAL = 0.5
RELEASED_WITHIN = 2 * INTERVAL + SLACK_S
BIG = 4096
"""Blocks of 32 KiB in each of two layers: 256 MiB."""

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]
StartGroup = Callable[..., PrefillGroup]


def assert_nothing_is_left(decoder: Decoder, engine_id: str, agent: str) -> None:
    worker = decoder.worker
    assert all(engine_id not in mapping for mapping in per_engine_state(worker))
    assert not worker.nixl_wrapper.check_remote_metadata(agent)
    with pytest.raises(nixlNotFoundError):
        worker.nixl_wrapper.send_notif(agent, notif_msg=b"HB:")


def test_a_killed_prefill_is_released(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    target, survivor = start_prefill("target"), start_prefill("survivor")
    decoder.read(target)
    decoder.read(survivor)
    agent = decoder.agent_of("target")
    assert decoder.worker.nixl_wrapper.check_remote_metadata(agent)

    target.kill()
    took = decoder.wait_until(lambda: decoder.connected == {"survivor"}, 30)

    assert took < RELEASED_WITHIN, decoder.evidence()
    assert_nothing_is_left(decoder, "target", agent)
    assert len(decoder.lines("NIXL peer unreachable: target")) == 1
    assert len(decoder.lines("NIXL peer released: target")) == 1
    decoder.read(survivor)
    assert decoder.agent.violations == []


def test_the_stock_worker_keeps_a_killed_prefill(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=0)
    target, survivor = start_prefill("target"), start_prefill("survivor")
    decoder.read(target)
    target.kill()
    end = time.monotonic() + 2 * RELEASED_WITHIN
    decoder.wait_until(lambda: time.monotonic() > end, 30)
    decoder.read(survivor)
    assert decoder.connected == {"target", "survivor"}


@pytest.mark.parametrize("num_threads", [0, 4])
def test_a_prefill_killed_during_a_large_read(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, num_threads: int
):
    common = {"num_blocks": BIG, "num_threads": num_threads}
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL, **common)
    target, survivor = start_prefill("target", **common), start_prefill("survivor")
    decoder.read(target)
    agent = decoder.agent_of("target")

    req_id = decoder.start(target, range(BIG))
    decoder.step()
    cache = next(iter(decoder.kv_caches.values()))
    decoder.wait_until(lambda: cache[:64].any(), 10, stepping=False)
    target.kill()

    def released() -> bool:
        assert "target" in decoder.connected or not decoder.in_flight
        return "target" not in decoder.connected

    took = decoder.wait_until(released, 30)

    assert took < RELEASED_WITHIN, decoder.evidence()
    assert decoder.failed == [req_id]
    assert decoder.invalid_blocks == set(range(BIG))
    # It was the middle: some bytes had come, not all.
    assert not all(c.flatten(1).any(1).all() for c in decoder.kv_caches.values())
    assert_nothing_is_left(decoder, "target", agent)
    for _ in range(10):
        decoder.read(survivor)
    replacement = start_prefill("replacement", port=target.port, **common)
    decoder.read(replacement, range(BIG))
    assert decoder.connected == {"survivor", "replacement"}
    assert decoder.failed == [req_id]
    assert decoder.finished.count(req_id) == 0
    assert decoder.agent.violations == []


@pytest.mark.parametrize("new_id", ["target", "replacement"])
def test_a_replacement_at_the_same_address_serves(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, new_id: str
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    target = start_prefill("target")
    decoder.read(target)
    target.kill()
    decoder.wait_until(lambda: not decoder.connected, 30)
    replacement = start_prefill(new_id, port=target.port)
    decoder.read(replacement, [5, 3, 1])
    assert decoder.connected == {new_id}
    reconnected = decoder.lines("NIXL peer reconnected: target")
    assert len(reconnected) == (new_id == "target")


def test_a_replacement_that_is_seen_before_the_death(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    """The stock pass releases the old engine; ours has to agree."""
    decoder = make_decoder(peer_heartbeat_interval=30)
    target = start_prefill("target")
    decoder.read(target)
    agent = decoder.agent_of("target")
    target.kill()
    replacement = start_prefill("replacement", port=target.port)
    decoder.read(replacement)
    decoder.wait_until(lambda: decoder.connected == {"replacement"}, 10)
    assert_nothing_is_left(decoder, "target", agent)
    decoder.read(replacement)


@pytest.mark.timeout(600)
def test_a_hundred_kills_and_replacements(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    """With vLLM's default of four NIXL threads, as reads then use other endpoints."""
    interval = 0.1
    decoder = make_decoder(peer_heartbeat_interval=interval, num_threads=4)
    survivor = start_prefill("survivor")
    decoder.read(survivor)
    port = None
    took, memory = [], []
    for cycle in range(100):
        target = start_prefill(f"target-{cycle}", port=port)
        port = target.port
        decoder.read(target, [cycle % 8])
        agent = decoder.agent_of(target.engine_id)
        target.close()
        blocks = [cycle % 8, (cycle + 3) % 8]
        req_id = decoder.start(survivor, blocks)
        took.append(decoder.wait_until(lambda: decoder.connected == {"survivor"}, 30))
        assert decoder.wait_for(req_id), decoder.evidence()
        decoder.check(survivor, blocks, blocks)
        assert_nothing_is_left(decoder, target.engine_id, agent)
        if cycle % 20 == 19:
            memory.append(rss_bytes())
            fds = len(os.listdir("/proc/self/fd"))
            print(f"cycle {cycle + 1}: {memory[-1] / 2**20:.1f} MiB, {fds} descriptors")
    print(f"released after {sorted(took)[:: len(took) // 4]} s")
    # Not the slowest: another process may take the cores for a second.
    assert statistics.median(took) < 2 * interval + SLACK_S
    assert max(memory) - memory[0] < 20e6
    assert decoder.connected == {"survivor"}
    assert decoder.failed == []
    assert len(decoder.lines("NIXL peer released")) == 100
    assert decoder.agent.violations == []


def test_many_peers_that_die_at_once_are_released_a_few_a_step(
    make_decoder: MakeDecoder, start_group: StartGroup
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    group = start_group(decoder, "member", 40)
    connect(decoder, group.prefills)
    assert decoder.connected == set(group.engine_ids)

    group.child.kill()
    left, steps = [], []

    def step() -> None:
        start = time.perf_counter()
        decoder.step()
        steps.append(time.perf_counter() - start)
        left.append(len(decoder.connected))

    took = wait_until(
        lambda: not decoder.connected, 30, decoder.evidence, every=step, poll_s=0.001
    )
    print(f"40 peers released in {took:.2f} s, longest step {max(steps) * 1e3:.1f} ms")
    before = [40, *left]
    at_once = max(a - b for a, b in zip(before, left, strict=False))
    assert at_once <= 4, left
    assert took < 5 * INTERVAL + SLACK_S
    for engine_id in group.engine_ids:
        assert all(engine_id not in m for m in per_engine_state(decoder.worker))
    assert len(decoder.lines("NIXL peer released: member")) == 40
    assert decoder.agent.violations == []
