# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Monitor cost: processor time of an idle decoder's monitor thread."""

import contextlib
import statistics
import threading
import time
from typing import Any

from benchmarks.common import Limit
from benchmarks.peers_pool import running_fork_server
from tests.support.peers import Decoder
from tests.support.prefill_group import PrefillGroup, connect

PEERS = 100
_THREAD = "vllm-nixl-peer-monitor"
_AGENTS_PER_PROCESS = 25
_SECONDS, _QUICK_SECONDS = 30, 5
_RESTS = 8
_TARGET = 0.005


def measure(quick: bool) -> dict[str, Any]:
    """Watch the monitor of a decoder with 100 peers that takes no step."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    with running_fork_server() as fork_server, contextlib.ExitStack() as stack:
        # NIXL's calls spin while its own thread waits for a core with their lock.
        decoder = Decoder("idle", nice=0)
        stack.callback(decoder.close)
        for first in range(0, PEERS, _AGENTS_PER_PROCESS):
            group = PrefillGroup(
                fork_server, decoder, f"group{first}", _AGENTS_PER_PROCESS
            )
            stack.callback(group.child.close)
            connect(decoder, group.prefills)
        share, with_nixl = _shares(decoder, seconds)
    return {
        "peers": PEERS,
        "seconds": seconds,
        "own_share": share,
        "with_nixl_share": with_nixl,
        "look_after_rest_us": _look_after_rest_us(),
    }


def _shares(decoder: Decoder, seconds: float) -> tuple[float, float]:
    """Return the monitor's share of a core, without NIXL's part and with it."""
    (thread,) = (t for t in threading.enumerate() if t.name == _THREAD)
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)

    def used() -> tuple[float, float]:
        return time.clock_gettime(clock), decoder.agent.cpu_seconds[_THREAD]

    start, (total, nixl) = time.monotonic(), used()
    time.sleep(seconds)
    took, (total_after, nixl_after) = time.monotonic() - start, used()
    total, nixl = total_after - total, nixl_after - nixl
    return (total - nixl) / took, total / took


def _look_after_rest_us() -> float:
    """Return what a look at 100 objects takes after a second's rest (CPU time).

    A virtual machine whose host takes idle memory away pays for every page that it
    touches after a rest, and so does the monitor.
    """
    objects = {f"object-{number}": [float(number)] for number in range(PEERS)}
    took = []
    for _ in range(_RESTS):
        time.sleep(1.0)
        start = time.thread_time()
        sum(1 for value in list(objects.values()) if value[0] < 50.0)
        took.append((time.thread_time() - start) * 1e6)
    return statistics.median(took)


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the target: the monitor's share of a core."""
    return [
        Limit(
            f"monitor of an idle decoder with {data['peers']} peers, its own share of"
            " a core",
            data["own_share"] * 100,
            _TARGET * 100,
            "%",
        )
    ]


guard = targets
