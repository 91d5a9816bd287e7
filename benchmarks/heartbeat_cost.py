# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Heartbeat cost: what a heartbeat takes on real NIXL agents, and the longest step."""

import contextlib
import itertools
import statistics
import time
from typing import Any

from benchmarks.common import Limit, summary
from benchmarks.peers_pool import connect, running_nursery, start_crowd
from tests.support.peers import Decoder
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    _MAX_SENDS_PER_STEP,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    PeerTable,
)

PEERS = (1, 10, 100)
_AGENTS_PER_PROCESS = 25
_DUE_TOGETHER = 1000
# Whatever the number of peers: the rarer a heartbeat, the more of its code and data has
# left the caches, and what is measured is how rare it is.
_HEARTBEATS_PER_S = 1000
_SECONDS = 10.0
_QUICK_SECONDS = 3.0
# Between two steps: none, and one in which the core falls idle and caches cool.
_PAUSES_S = (0.0, 0.001)
_BURSTS = 20
_TARGET_US = 10.0
# For CI: what we add to a send may not be several times what NIXL takes for it.
_GUARD_RATIO = 5.0


class TimedAgent:
    """A NIXL agent whose sends are timed."""

    def __init__(self, agent: Any):
        """Wrap an agent."""
        self._agent = agent
        self.sends = 0
        self.seconds = 0.0

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        """Send a notification."""
        start = time.perf_counter()
        self._agent.send_notif(agent_name, notif_msg=notif_msg)
        self.seconds += time.perf_counter() - start
        self.sends += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


def measure(quick: bool) -> dict[str, Any]:
    """Measure heartbeats to several numbers of peers, and steps with many due."""
    rows = []
    with (
        running_nursery() as nursery,
        # NIXL's calls spin while its own thread waits for a core with their lock.
        contextlib.closing(Decoder(nice=0)) as decoder,
        contextlib.ExitStack() as stack,
    ):
        prefills: list[Any] = []
        real = decoder.agent._agent
        for peers in PEERS:
            while len(prefills) < peers:
                count = min(_AGENTS_PER_PROCESS, peers - len(prefills))
                crowd = start_crowd(nursery, decoder, f"crowd{len(prefills)}", count)
                stack.enter_context(contextlib.closing(crowd.child))
                prefills += crowd.prefills
            decoder.worker.nixl_wrapper = real
            connect(decoder, prefills)
            # The monitor would send what the steps are to send.
            if decoder.worker._monitor is not None:
                decoder.worker._monitor.stop()
            decoder.worker._peers = PeerTable(peers / _HEARTBEATS_PER_S)
            for pause in _PAUSES_S:
                row = _steps_with_heartbeats(decoder, pause, quick)
                rows.append({"peers": peers, "pause_s": pause, **row})
        burst = _many_due_together(decoder, quick)
    return {"rows": rows, "burst": burst}


def _steps_with_heartbeats(
    decoder: Decoder, pause: float, quick: bool
) -> dict[str, Any]:
    """Measure, in steps where heartbeats are due, each heartbeat's part."""
    worker = decoder.worker
    timed = worker.nixl_wrapper = TimedAgent(decoder.agent._agent)
    send_due = worker._send_due_heartbeats
    own, nixl = [], []

    def send_due_timed(now: float) -> None:
        sends, inside = timed.sends, timed.seconds
        start = time.perf_counter()
        send_due(now)
        seconds = time.perf_counter() - start
        if count := timed.sends - sends:
            inside = timed.seconds - inside
            own.append((seconds - inside) / count * 1e6)
            nixl.append(inside / count * 1e6)

    worker._send_due_heartbeats = send_due_timed
    try:
        end = time.monotonic() + (_QUICK_SECONDS if quick else _SECONDS)
        while time.monotonic() < end:
            _keep_in_use(worker)
            decoder.step()
            if pause:
                time.sleep(pause)
    finally:
        del worker._send_due_heartbeats
    per_heartbeat = statistics.median(map(sum, zip(own, nixl, strict=True)))
    return {
        "heartbeats": timed.sends,
        "own_us": summary(own),
        "send_notif_us": summary(nixl),
        "per_peer_and_second_us": per_heartbeat / DEFAULT_HEARTBEAT_INTERVAL_S,
    }


def _keep_in_use(worker: Any) -> None:
    """Stand in for a read now and then: an idle peer is sent less and less."""
    now = time.perf_counter()
    active = worker._engine_last_active
    for engine_id in worker._remote_agents:
        if now - active.get(engine_id, 0.0) < 5 * worker._peers.interval:
            return
        active[engine_id] = now


def _many_due_together(decoder: Decoder, quick: bool) -> dict[str, Any]:
    """Time the steps in which 1,000 peers are due at once.

    The peers are made up; what is sent for them goes to the real agents in turn.
    """
    worker = decoder.worker
    agents = [
        agent for peer in worker._remote_agents.values() for agent in peer.items()
    ]
    made_up = {
        f"made-up-{number}": dict([agent])
        for number, agent in zip(range(_DUE_TOGETHER), itertools.cycle(agents))
    }
    worker._remote_agents.update(made_up)
    # Without an address stock would take them for replaced.
    worker._engine_by_address.update({("made-up", n): e for n, e in enumerate(made_up)})
    timed = worker.nixl_wrapper = TimedAgent(decoder.agent._agent)
    peers = worker._peers
    longest, steps, most_sends = [], [], 0
    try:
        for _ in range(3 if quick else _BURSTS):
            for engine_id in made_up:
                peers.forget(engine_id)
                # As if the handshake were an interval and more ago.
                peers.connect(engine_id, time.perf_counter() - 2 * peers.interval)
            times: list[float] = []
            first = timed.sends
            while timed.sends - first < _DUE_TOGETHER:
                assert len(times) < _DUE_TOGETHER, decoder.evidence()
                before = timed.sends
                start = time.perf_counter()
                decoder.step()
                times.append(time.perf_counter() - start)
                most_sends = max(most_sends, timed.sends - before)
            longest.append(max(times) * 1e6)
            steps.append(len(times))
    finally:
        for number, engine_id in enumerate(made_up):
            del worker._remote_agents[engine_id]
            del worker._engine_by_address["made-up", number]
            peers.forget(engine_id)
    return {
        "peers_due": _DUE_TOGETHER,
        "bound_sends": _MAX_SENDS_PER_STEP,
        "most_sends": most_sends,
        "steps_until_all_sent": statistics.median(steps),
        "longest_step_us": summary(longest),
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: what a heartbeat may cost, and how many a step may send."""
    limits = [
        Limit(
            f"heartbeat to one of {row['peers']} peers, beyond NIXL's own send"
            " (median)",
            row["own_us"]["median"],
            _TARGET_US,
            "us",
        )
        for row in data["rows"]
        if not row["pause_s"]
    ]
    burst = data["burst"]
    return [
        *limits,
        Limit(
            f"sends in one step with {burst['peers_due']} peers due",
            burst["most_sends"],
            burst["bound_sends"],
        ),
    ]


def guard(data: dict[str, Any]) -> list[Limit]:
    """Return the limits for CI: ratios, with a wide margin."""
    *_, sends = targets(data)
    return [
        Limit(
            f"heartbeat to one of {row['peers']} peers, our part over NIXL's",
            row["own_us"]["median"] / row["send_notif_us"]["median"],
            _GUARD_RATIO,
        )
        for row in data["rows"]
        if not row["pause_s"]
    ] + [sends]
