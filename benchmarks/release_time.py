# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Release time: from a prefill's SIGKILL until its state is released, on real NIXL.

Each killed prefill is connected to two decoders, ours and a stock one. Kills come at
random moments of its heartbeats' beat, several within an interval.
"""

import contextlib
import itertools
import random
import time
from typing import Any

from benchmarks.common import Limit, summary
from benchmarks.peers_pool import running_fork_server
from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder
from tests.support.prefill_group import PrefillGroup, connect

INTERVALS_S = (0.5, 2.0, 5.0)
KILLS = 50
_KILLS_PER_ROUND = 10
_QUICK_INTERVALS_S = (0.5,)
_QUICK_KILLS = 4
_POLL_S = 0.002
_READ_EVERY_S = 0.05
_GIVE_UP_INTERVALS = 10
_TARGET_OVER_INTERVAL_S = 0.3


def measure(quick: bool) -> dict[str, Any]:
    """Kill prefills at several intervals, with decoders that step and that idle."""
    kills = _QUICK_KILLS if quick else KILLS
    rows = []
    with running_fork_server() as fork_server:
        for interval in _QUICK_INTERVALS_S if quick else INTERVALS_S:
            for busy in (True, False):
                with contextlib.closing(_Watch(fork_server, interval, busy)) as watch:
                    rows.append(watch.run(kills))
    return {"rows": rows}


class _Watch:
    """Two decoders, and what becomes of the prefills they are connected to."""

    def __init__(self, fork_server: ForkServer, interval: float, busy: bool):
        self._fork_server = fork_server
        self._interval = interval
        self._busy = busy
        self._random = random.Random(f"{interval} {busy}")
        self._names = itertools.count()
        self._ours = Decoder("ours", peer_heartbeat_interval=interval)
        self._stock = Decoder("stock", peer_heartbeat_interval=0)
        self._survivor = self._start("survivor")
        for decoder in (self._ours, self._stock):
            connect(decoder, self._survivor.prefills)
        self._next_read = 0.0
        self._killed: dict[str, float] = {}
        self._released: dict[str, dict[str, float]] = {"ours": {}, "stock": {}}

    def _start(self, kind: str) -> PrefillGroup:
        name = f"{kind}-{next(self._names)}"
        return PrefillGroup(self._fork_server, self._ours, name, 1)

    def run(self, kills: int) -> dict[str, Any]:
        """Kill that many prefills; return what was seen."""
        for first in range(0, kills, _KILLS_PER_ROUND):
            self._round(min(_KILLS_PER_ROUND, kills - first))
        watched = time.monotonic() - min(self._killed.values())
        # Prefills without heartbeats may go unnoticed until much later: look again.
        self._look()
        took = self._released["ours"].values()
        return {
            "interval_s": self._interval,
            "busy": self._busy,
            "kills": len(self._killed),
            "ours_s": sorted(took),
            "ours": summary(took) if took else None,
            "ours_missed": len(self._killed) - len(took),
            "stock_released": len(self._released["stock"]),
            "stock_watched_s": watched,
        }

    def _round(self, kills: int) -> None:
        targets = [self._start("target") for _ in range(kills)]
        try:
            for target in targets:
                for decoder in (self._ours, self._stock):
                    connect(decoder, target.prefills)
                self._pass_time(self._random.uniform(0, self._interval / kills))
            # An idle decoder's monitor takes over an interval after the last step.
            self._pass_time(2 * self._interval)
            for target in targets:
                self._pass_time(self._random.uniform(0, 2 * self._interval / kills))
                self._killed[target.engine_ids[0]] = time.monotonic()
                target.child.kill()
            deadline = time.monotonic() + _GIVE_UP_INTERVALS * self._interval
            while time.monotonic() < deadline and (
                len(self._released["ours"]) < len(self._killed)
            ):
                self._pass_time(_POLL_S)
        finally:
            for target in targets:
                target.child.close()

    def _pass_time(self, seconds: float) -> None:
        """Let time pass, with steps and reads or without; look for releases."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if self._busy:
                if now >= self._next_read:
                    self._next_read = now + _READ_EVERY_S
                    for decoder in (self._ours, self._stock):
                        decoder.start(self._survivor.prefills[0], [0])
                for decoder in (self._ours, self._stock):
                    decoder.step()
            self._look()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        now = time.monotonic()
        for decoder in (self._ours, self._stock):
            seen = self._released[decoder.engine_id]
            for engine_id in self._killed.keys() - decoder.connected - seen.keys():
                seen[engine_id] = now - self._killed[engine_id]

    def close(self) -> None:
        """End everything."""
        self._survivor.child.close()
        for decoder in (self._ours, self._stock):
            decoder.close()


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: the 95th percentile, and that no kill goes unnoticed."""
    limits = []
    for row in data["rows"]:
        what = f"interval {row['interval_s']:g} s, {'busy' if row['busy'] else 'idle'}"
        limits += [
            Limit(f"{what}: kills not noticed", row["ours_missed"], 0),
            Limit(
                f"{what}: kill to release, 95th percentile",
                row["ours"]["p95"],
                row["interval_s"] + _TARGET_OVER_INTERVAL_S,
                "s",
            ),
        ]
    return limits


guard = targets
