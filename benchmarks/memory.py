# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory: what is kept of a peer, and of 200 that were killed and replaced."""

import contextlib
import gc
import os
import time
import tracemalloc
from typing import Any

from benchmarks.common import Limit
from benchmarks.peers_pool import connect, running_nursery, start_crowd
from tests.support.nursery import Nursery
from tests.support.peers import Decoder
from tests.support.prefill_process import rss_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    PeerTable,
)

_PEERS = 1000
_CYCLES = 200
# What Python and NIXL set aside once is there by then.
_WARM_UP = 40
_SAMPLE_EVERY = 10
_INTERVAL_S = 0.1
_RELEASE_TIMEOUT_S = 30.0
_TARGET_BYTES = 1024
_TARGET_KB_PER_CYCLE_OVER_STOCK = 20.0


def measure(quick: bool) -> dict[str, Any]:
    """Measure the table of peers and, unless quick, kills and replacements."""
    data: dict[str, Any] = {"peer_bytes": bytes_per_peer()}
    if quick:
        return data
    with running_nursery() as nursery:
        for name, interval in (("stock", 0.0), ("ours", _INTERVAL_S)):
            data[name] = _kill_and_replace(nursery, name, interval)
    return data


def bytes_per_peer(peers: int = _PEERS) -> float:
    """Return the bytes that the table keeps for a peer, its schedule included."""
    table = PeerTable(DEFAULT_HEARTBEAT_INTERVAL_S)
    # Ids and addresses are the worker's own.
    ids = [f"engine-{number}" for number in range(peers)]
    address = ("10.0.0.1", 5600)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, engine_id in enumerate(ids):
            table.connect(engine_id, number / peers, address)
        now = 0.0
        for _ in range(20):
            now += table.interval
            while table.take_due(now, {}) is not None:
                pass
        return (tracemalloc.get_traced_memory()[0] - before) / peers
    finally:
        tracemalloc.stop()


def _kill_and_replace(nursery: Nursery, name: str, interval: float) -> dict[str, Any]:
    """Kill a prefill and start another one at its address, over and over.

    Stock lets go of a dead one when its replacement shakes hands, ours before.
    """
    samples = []
    port = None
    with contextlib.closing(Decoder(name, peer_heartbeat_interval=interval)) as decoder:
        for cycle in range(_CYCLES + 1):
            crowd = start_crowd(nursery, decoder, f"{name}-{cycle}", 1, port)
            port = crowd.prefills[0].port
            connect(decoder, crowd.prefills)
            decoder.wait_until(lambda: len(decoder.connected) == 1, _RELEASE_TIMEOUT_S)
            if cycle % _SAMPLE_EVERY == 0:
                gc.collect()
                samples.append(_sample(cycle))
            crowd.child.close()
            if interval:
                decoder.wait_until(lambda: not decoder.connected, _RELEASE_TIMEOUT_S)
    warm = [sample for sample in samples if sample["cycle"] >= _WARM_UP]
    cycles = warm[-1]["cycle"] - warm[0]["cycle"]
    return {
        "samples": samples,
        "kb_per_cycle": (warm[-1]["rss"] - warm[0]["rss"]) / cycles / 1e3,
        "fds_per_cycle": (warm[-1]["fds"] - warm[0]["fds"]) / cycles,
    }


def _sample(cycle: int) -> dict[str, int]:
    # NIXL's own thread may still be closing what the last peer left.
    time.sleep(0.1)
    return {
        "cycle": cycle,
        "rss": rss_bytes(),
        "fds": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: a peer's bytes, and no growth beyond stock's."""
    return [
        *guard(data),
        Limit(
            "resident memory per kill and replacement, more than stock",
            data["ours"]["kb_per_cycle"] - data["stock"]["kb_per_cycle"],
            _TARGET_KB_PER_CYCLE_OVER_STOCK,
            "kB",
        ),
        Limit(
            "file descriptors per kill and replacement, more than stock",
            data["ours"]["fds_per_cycle"] - data["stock"]["fds_per_cycle"],
            0.1,
        ),
    ]


def guard(data: dict[str, Any]) -> list[Limit]:
    """Return the limit for CI: the table's bytes do not depend on the machine."""
    return [Limit("state per peer", data["peer_bytes"], _TARGET_BYTES, "bytes")]
