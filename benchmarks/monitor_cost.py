# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Monitor cost: processor time of an idle decoder's monitor thread."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.common import Limit
from benchmarks.peers_pool import Crowd, connect, running_nursery, start_crowd
from tests.support.peers import Decoder
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.monitor import SideChannel

PEERS = 100
_AGENTS_PER_PROCESS = 25
_SECONDS = 20
_QUICK_SECONDS = 5
_IDLE_S = 300
# Long enough for the answers of the side channels to come in.
_AWAKE_PAUSE_S = 0.01
_RESTS = 8
_TARGET = 0.001


class _StubAgent:
    """An agent whose peers are all well and say nothing."""

    def __init__(self) -> None:
        self.sends = 0

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self.sends += 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def measure(quick: bool) -> dict[str, Any]:
    """Measure the monitor with 100 connected peers at the default interval."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    with running_nursery() as nursery, contextlib.ExitStack() as stack:
        crowds: list[Crowd] = []
        # NIXL's calls spin while its own thread waits for a core with their lock.
        with contextlib.closing(Decoder("resting", nice=0)) as decoder:
            for first in range(0, PEERS, _AGENTS_PER_PROCESS):
                name = f"crowd{first}"
                crowd = start_crowd(nursery, decoder, name, _AGENTS_PER_PROCESS)
                stack.enter_context(contextlib.closing(crowd.child))
                crowds.append(crowd)
            prefills = [prefill for crowd in crowds for prefill in crowd.prefills]
            connect(decoder, prefills)
            resting = _resting(decoder, crowds, seconds)
        with contextlib.closing(Decoder("awake")) as decoder:
            connect(decoder, prefills)
            awake = _awake(decoder)
    at_once, after_rest = _machine()
    return {
        "peers": PEERS,
        "seconds": seconds,
        "awake": awake,
        **resting,
        "machine": {"at_once_us": at_once, "after_rest_us": after_rest},
    }


def _awake(decoder: Decoder) -> dict[str, float]:
    """Run five minutes' ticks 10 ms apart, a second apart by their clock.

    The rest of a second in between costs more than a tick on some machines, see
    `_machine`.
    """
    worker = decoder.worker
    monitor = worker._monitor
    period = monitor._period
    monitor.stop()
    stub = worker.nixl_wrapper = _StubAgent()
    used = []
    side_channel = SideChannel()
    try:
        with _clock() as advance:
            # As if the last step were long ago.
            worker._last_step = 0.0
            for _ in range(round(_IDLE_S / period)):
                advance(period)
                start = time.thread_time()
                worker._monitor_tick(side_channel, Event())
                used.append(time.thread_time() - start)
                _spin(_AWAKE_PAUSE_S)
    finally:
        side_channel.close()
        worker.nixl_wrapper = decoder.agent
    assert len(worker._peers) == PEERS, decoder.evidence()
    first = used[: round(_SECONDS / period)]
    return {
        "idle_s": _IDLE_S,
        "own_share": sum(used) / (len(used) * period),
        "own_share_at_first": sum(first) / (len(first) * period),
        "heartbeats_per_s": stub.sends / (len(used) * period),
    }


def _spin(seconds: float) -> None:
    """Wait without rest."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextlib.contextmanager
def _clock() -> Iterator[Callable[[float], None]]:
    """Give the connector a clock that stands still unless it is advanced."""
    now = time.perf_counter()

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now)
    with mock.patch.object(nixl_connector, "time", clock):
        yield advance


def _resting(decoder: Decoder, crowds: list[Crowd], seconds: int) -> dict[str, Any]:
    """Watch the monitor's thread, once with NIXL and once without."""
    worker = decoder.worker
    worker.nixl_wrapper = decoder.agent._agent
    clock = time.pthread_getcpuclockid(worker._monitor._thread.ident)

    def share() -> float:
        start, used = time.monotonic(), time.clock_gettime(clock)
        time.sleep(seconds)
        return (time.clock_gettime(clock) - used) / (time.monotonic() - start)

    total = share()
    # What is left with an agent that does nothing is our own. A crowd that keeps
    # the cores' caches busy would double it.
    for crowd in crowds:
        crowd.child.call("rest")
    worker.nixl_wrapper = _StubAgent()
    try:
        return {"resting": {"own_share": share(), "with_nixl_share": total}}
    finally:
        worker.nixl_wrapper = decoder.agent


def _machine() -> tuple[float, float]:
    """Return what a look at 100 objects takes, at once and after a second's rest.

    In microseconds of CPU time, medians. A virtual machine whose host takes idle
    memory away pays for every page that it touches after a rest.
    """
    objects = {f"object-{number}": [float(number)] for number in range(PEERS)}

    def look() -> float:
        start = time.thread_time()
        sum(1 for value in list(objects.values()) if value[0] < 50.0)
        return (time.thread_time() - start) * 1e6

    at_once, after_rest = [], []
    for _ in range(_RESTS):
        time.sleep(1.0)
        after_rest.append(look())
        at_once.append(look())
    return statistics.median(at_once), statistics.median(after_rest)


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the target: the monitor's own share of a core."""
    return [
        Limit(
            f"monitor of an idle decoder with {data['peers']} peers, its own share of"
            f" a core in {data['awake']['idle_s']} s",
            data["awake"]["own_share"] * 100,
            _TARGET * 100,
            "%",
        )
    ]


guard = targets
