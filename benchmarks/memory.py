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
from benchmarks.fakes import connected_decoder
from benchmarks.peers_pool import running_fork_server
from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder
from tests.support.prefill_group import PrefillGroup, connect
from tests.support.prefill_process import rss_bytes

_PEERS = 300
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
    with running_fork_server() as fork_server:
        for name, interval in (("stock", 0.0), ("ours", _INTERVAL_S)):
            data[name] = _kill_and_replace(fork_server, name, interval)
    return data


def bytes_per_peer(peers: int = _PEERS) -> float:
    """Return the bytes that a connected peer takes on Python's heap beyond stock's."""
    ours, stock = (_heap_growth(peers, interval) for interval in (2.0, 0.0))
    return (ours - stock) / peers


def _heap_growth(peers: int, interval: float) -> int:
    with connected_decoder(interval, []) as decoder:
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(peers):
                decoder.connect(f"peer-{number}")
            # Long enough for every peer's place in the schedule to have moved.
            decoder.steps(duration=60.0, every=1.0)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()


def _kill_and_replace(
    fork_server: ForkServer, name: str, interval: float
) -> dict[str, Any]:
    """Kill a prefill and start another one at its address, over and over.

    Stock lets go of a dead one when its replacement shakes hands, ours before.
    """
    samples = []
    port = None
    with contextlib.closing(Decoder(name, peer_heartbeat_interval=interval)) as decoder:
        for cycle in range(_CYCLES + 1):
            group = PrefillGroup(fork_server, decoder, f"{name}-{cycle}", 1, port)
            port = group.prefills[0].port
            connect(decoder, group.prefills)
            decoder.wait_until(lambda: len(decoder.connected) == 1, _RELEASE_TIMEOUT_S)
            if cycle % _SAMPLE_EVERY == 0:
                gc.collect()
                samples.append(_sample(cycle))
            group.child.close()
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
