# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Heartbeat cost: what a heartbeat takes on real NIXL agents, ours and NIXL's part."""

import contextlib
import statistics
import time
from typing import Any

from benchmarks.common import Limit, summary
from benchmarks.peers_pool import running_fork_server
from tests.support.peers import Decoder
from tests.support.prefill_group import PrefillGroup, connect
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
)

PEERS = (10, 100)
_AGENTS_PER_PROCESS = 25
# Whatever the number of peers: the rarer a heartbeat, the more of its code and data has
# left the caches, and what is measured is how rare it is.
_HEARTBEATS_PER_S = 1000
_SECONDS, _QUICK_SECONDS = 10.0, 3.0
# Between two steps: none, and one in which the core falls idle and caches cool.
_PAUSES_S = (0.0, 0.001)
_TARGET_US = 10.0
# For CI: what we add to a send may not be several times what NIXL takes for it.
_GUARD_RATIO = 5.0


class TimedSends:
    """Stands in for an agent's `send_notif`, and times it."""

    def __init__(self, agent: Any):
        """Time the sends of an agent."""
        self.count = 0
        self.seconds = 0.0
        self._send = agent.send_notif

    def __call__(self, agent_name: str, notif_msg: bytes) -> None:
        """Send a notification."""
        start = time.perf_counter()
        self._send(agent_name, notif_msg=notif_msg)
        self.seconds += time.perf_counter() - start
        self.count += 1


def measure(quick: bool) -> dict[str, Any]:
    """Measure heartbeats to several numbers of peers."""
    rows = []
    with running_fork_server() as fork_server, contextlib.ExitStack() as stack:
        prefills: list[Any] = []
        for peers in PEERS:
            interval = peers / _HEARTBEATS_PER_S
            # NIXL's calls spin while its own thread waits for a core with their lock.
            decoder = Decoder(nice=0, peer_heartbeat_interval=interval)
            stack.callback(decoder.close)
            while len(prefills) < peers:
                count = min(_AGENTS_PER_PROCESS, peers - len(prefills))
                group = PrefillGroup(
                    fork_server, decoder, f"group{len(prefills)}", count
                )
                stack.callback(group.child.close)
                prefills += group.prefills
            connect(decoder, prefills)
            for pause in _PAUSES_S:
                seconds = _QUICK_SECONDS if quick else _SECONDS
                row = _steps_with_heartbeats(decoder, interval, pause, seconds)
                rows.append({"peers": peers, "pause_s": pause, **row})
    return {"rows": rows}


def _steps_with_heartbeats(
    decoder: Decoder, interval: float, pause: float, seconds: float
) -> dict[str, Any]:
    """Measure what steps with heartbeats take beyond those without, per heartbeat."""
    sends = TimedSends(decoder.agent._agent)
    decoder.agent.send_notif = sends  # type: ignore[attr-defined]
    without: list[float] = []
    with_sends: list[tuple[float, float, int]] = []
    in_use_until = 0.0
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        if now > in_use_until:
            in_use_until = now + 5 * interval
            _use_all(decoder)
        sends.count, sends.seconds = 0, 0.0
        start = time.perf_counter()
        decoder.step()
        took = time.perf_counter() - start
        if sends.count:
            with_sends.append((took, sends.seconds, sends.count))
        else:
            without.append(took)
        if pause:
            time.sleep(pause)
    empty = statistics.median(without)
    own = [(took - empty - nixl) / n * 1e6 for took, nixl, n in with_sends]
    nixl = [inside / n * 1e6 for _, inside, n in with_sends]
    both = statistics.median(map(sum, zip(own, nixl, strict=True)))
    return {
        "heartbeats": sum(n for _, _, n in with_sends),
        "own_us": summary(own),
        "send_notif_us": summary(nixl),
        "per_peer_and_second_us": both / DEFAULT_HEARTBEAT_INTERVAL_S,
    }


def _use_all(decoder: Decoder) -> None:
    """Notify every peer, as a read would: an idle peer is sent less and less."""
    for agents in decoder.worker._remote_agents.values():
        for agent in agents.values():
            decoder.worker.nixl_wrapper.send_notif(agent, notif_msg=b"HB:")


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: what a heartbeat may cost beyond NIXL's send."""
    return [
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


def guard(data: dict[str, Any]) -> list[Limit]:
    """Return the limits for CI: ratios, with a wide margin."""
    return [
        Limit(
            f"heartbeat to one of {row['peers']} peers, our part over NIXL's",
            row["own_us"]["median"] / row["send_notif_us"]["median"],
            _GUARD_RATIO,
        )
        for row in data["rows"]
        if not row["pause_s"]
    ]
