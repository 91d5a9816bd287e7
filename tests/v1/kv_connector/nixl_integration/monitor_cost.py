# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measures what the monitor of an idle decoder costs."""

import contextlib
import time
from dataclasses import dataclass

import msgspec
from peers import Decoder, Nursery, free_port, wait_until

_AGENTS_PER_PROCESS = 25


@dataclass
class MonitorCost:
    """Processor time of a monitor thread."""

    peers: int
    own_share: float
    """Share of one core outside of NIXL."""
    total_share: float
    """Share of one core with what NIXL's calls take."""
    heartbeats: int

    def __str__(self) -> str:
        return (
            f"{self.peers} peers, {self.heartbeats} heartbeats: {self.own_share:.3%} "
            f"of a core, {self.total_share:.3%} with NIXL's own time"
        )


class _StubAgent:
    """An agent whose peers are all well and say nothing."""

    def __init__(self) -> None:
        self.sends = 0

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self.sends += 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def measure_monitor(nursery: Nursery, num_peers: int, seconds: float) -> MonitorCost:
    """Measure the monitor at the default interval while no step runs.

    Every peer is an agent and a side channel of its own; 25 share a process.

    Args:
        nursery: Where the peers' processes are started.
        num_peers: Connected peers.
        seconds: How long to watch, once with NIXL and once without.

    """
    with contextlib.ExitStack() as stack:
        decoder = stack.enter_context(contextlib.closing(Decoder(nice=0)))
        worker = decoder.worker
        payload = msgspec.msgpack.encode(worker.xfer_handshake_metadata)
        crowd = []
        ports = {f"peer-{i}": free_port() for i in range(num_peers)}
        for first in range(0, num_peers, _AGENTS_PER_PROCESS):
            engine_ids = list(ports)[first : first + _AGENTS_PER_PROCESS]
            child = nursery.spawn(
                "crowd",
                "agent_process:PrefillCrowdProcess",
                {
                    "engine_ids": engine_ids,
                    "payload": payload,
                    "ports": [ports[engine_id] for engine_id in engine_ids],
                },
                {},
            )
            crowd.append(stack.enter_context(contextlib.closing(child)))
        for engine_id, port in ports.items():
            worker._ensure_handshake(engine_id, "127.0.0.1", port, 1)
        wait_until(
            lambda: len(decoder.connected) == num_peers,
            120,
            decoder.evidence,
            every=decoder.step,
        )
        worker.nixl_wrapper = decoder.agent._agent
        clock = time.pthread_getcpuclockid(worker._monitor._thread.ident)

        def watch() -> tuple[float, float]:
            start, cpu = time.monotonic(), time.clock_gettime(clock)
            time.sleep(seconds)
            return time.monotonic() - start, time.clock_gettime(clock) - cpu

        watched, total = watch()
        # The same again with an agent that does nothing: what is left is our own.
        # A crowd that keeps the cores' caches busy would double it.
        for child in crowd:
            child.call("rest")
        stub = _StubAgent()
        real, worker.nixl_wrapper = worker.nixl_wrapper, stub
        try:
            watched_own, own = watch()
        finally:
            worker.nixl_wrapper = real
        return MonitorCost(num_peers, own / watched_own, total / watched, stub.sends)
