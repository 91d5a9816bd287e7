# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A simulated fleet: the real policy code of many decoders, on simulated time.

Every decoder rank talks to the prefills' ranks of the same number, so one rank of
each instance is simulated; and only a sample of the decoders, as they know nothing
of each other. Results are scaled to the whole fleet.

The model of the worker is coarse: a step every 20 ms; a read, a heartbeat or a
handshake sees a dead prefill at once; handshakes queue as in the worker.
"""

import collections
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Limit, summary
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    PeerTable,
    Verdict,
)

_STEP_S = 0.02
_MAX_SENDS_PER_STEP = 32
_HANDSHAKE_S = 0.03
_HANDSHAKE_TIMEOUT_S = 5.0
_RETRY_THREADS = 4
_REQUESTS_PER_DECODER_AND_S = 8.0
# The router goes on naming a dead prefill for so long.
_ROUTER_NOTICES_S = 2.0
_RESTART_S = 60.0
# Idle peers' heartbeats are up to 30 s apart: until then the start shows.
_WARM_UP_S = 90.0
_CRASHES = 10
_GUARD_RELEASE_S = 35.0


@dataclass(frozen=True)
class Fleet:
    """A deployment's size, and how many of its decoders are simulated."""

    name: str
    decoders: int
    prefills: int
    ranks: int
    sample: int
    interval: float = DEFAULT_HEARTBEAT_INTERVAL_S

    @property
    def scale(self) -> float:
        """Decoders of the fleet for each simulated one."""
        return self.decoders / self.sample


FLEETS = (
    Fleet("1,000 decoders, 200 prefills", 1000, 200, 8, sample=20),
    Fleet("10,000 decoders, 2,000 prefills", 10_000, 2000, 8, sample=3),
)
_QUICK_FLEETS = (Fleet("quick", 1000, 20, 8, sample=5),)


class Prefill:
    """One rank of a prefill, and what arrives at it."""

    def __init__(self, number: int):
        self.number = number
        self.generation = 0
        self.died_at = math.inf
        self.named_until = math.inf
        """Until when routers name it although it is dead."""
        self.heartbeats: collections.Counter[int] = collections.Counter()
        """By second."""
        self.handshakes: collections.Counter[int] = collections.Counter()
        """Attempts, by second."""

    @property
    def engine_id(self) -> str:
        return f"prefill-{self.number}-{self.generation}"

    @property
    def alive(self) -> bool:
        return self.died_at == math.inf


class Simulation:
    """A fleet on simulated time."""

    def __init__(self, fleet: Fleet, seed: int):
        """Connect every decoder to every prefill."""
        self.fleet = fleet
        self.random = random.Random(seed)
        self.now = 0.0
        self.prefills = [Prefill(number) for number in range(fleet.prefills)]
        self.engines = {prefill.engine_id: prefill for prefill in self.prefills}
        self.epochs: dict[str, int] = {}
        """How often an engine's connections were reset."""
        self.release_times: list[float] = []
        """Seconds from a death or reset to its release, by decoder and engine."""
        self.failed_requests = 0
        self.requests = 0
        self.lost_at: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.decoders = [Decoder(self) for _ in range(fleet.sample)]

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan an action."""
        heapq.heappush(self._events, (time, next(self._count), action))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def route(self) -> Prefill | None:
        """Return a prefill that the routers take for alive."""
        for _ in range(8):
            prefill = self.random.choice(self.prefills)
            if self.now < prefill.named_until:
                return prefill
        return None

    def kill(self, prefill: Prefill, router_notices: bool = True) -> None:
        """Kill a prefill."""
        prefill.died_at = self.lost_at[prefill.engine_id] = self.now
        if router_notices:
            prefill.named_until = self.now + _ROUTER_NOTICES_S

    def replace(self, prefill: Prefill, same_id: bool = False) -> None:
        """Start a killed prefill again; a new instance has an engine id of its own."""
        if same_id:
            # For the decoders the connection is another one all the same.
            self.epochs[prefill.engine_id] = self.epochs.get(prefill.engine_id, 0) + 1
        else:
            prefill.generation += 1
            self.engines[prefill.engine_id] = prefill
        prefill.died_at = prefill.named_until = math.inf

    def reset(self, prefill: Prefill) -> None:
        """Break every connection to a living prefill."""
        self.lost_at[prefill.engine_id] = self.now
        self.epochs[prefill.engine_id] = self.epochs.get(prefill.engine_id, 0) + 1

    def works(self, engine_id: str, epoch: int) -> bool:
        """Return whether a connection of that epoch to an engine works."""
        prefill = self.engines[engine_id]
        return (
            prefill.alive
            and prefill.engine_id == engine_id
            and self.epochs.get(engine_id, 0) == epoch
        )


class Decoder:
    """One rank of a decoder: the real policy, and a model of the worker around it."""

    def __init__(self, simulation: Simulation):
        """Connect to every prefill, each with a last request in the past."""
        self.simulation = simulation
        fleet = simulation.fleet
        self.table = PeerTable(fleet.interval)
        self.epochs: dict[str, int] = {}
        """Epoch of each loaded connection, by engine id."""
        self.last_active: dict[str, float] = {}
        self.handshakes: dict[str, bool] = {}
        """Engines whose handshake runs; whether it is a retry."""
        self._first_thread_free = 0.0
        self._retry_threads_free = [0.0] * _RETRY_THREADS
        gap = fleet.prefills / _REQUESTS_PER_DECODER_AND_S
        for prefill in simulation.prefills:
            last = -simulation.random.expovariate(1 / gap)
            self._connect(prefill.engine_id, last)
        self.simulation.at(simulation.random.uniform(0, _STEP_S), self.look)
        self._plan_request()

    def _connect(self, engine_id: str, now: float) -> None:
        self.epochs[engine_id] = self.simulation.epochs.get(engine_id, 0)
        self.last_active[engine_id] = now
        self.table.connect(engine_id, now)

    # -- The step ------------------------------------------------------------------

    def look(self) -> None:
        """Take the step in which something is due."""
        now, table = self.simulation.now, self.table
        table.sync(self.epochs, now, self.handshakes)
        for _ in range(_MAX_SENDS_PER_STEP):
            engine_id = table.take_due(now, self.last_active)
            if engine_id is None:
                break
            self.simulation.engines[engine_id].heartbeats[int(now)] += 1
            self._use(engine_id)
        self.release()
        self.simulation.at(max(table.next_look, now + _STEP_S), self.look)

    def release(self) -> None:
        """Release what is lost."""
        now = self.simulation.now
        for engine_id in list(self.table.lost):
            del self.epochs[engine_id], self.last_active[engine_id]
            self.table.forget(engine_id)
            self.table.released(engine_id, now)
            lost_at = self.simulation.lost_at[engine_id]
            self.simulation.release_times.append(now - lost_at)

    def _use(self, engine_id: str) -> bool:
        """Return whether a connection works; lose it if not."""
        if self.simulation.works(engine_id, self.epochs[engine_id]):
            return True
        self.table.lose(engine_id, Verdict.UNREACHABLE, "", self.simulation.now)
        return False

    # -- Requests ------------------------------------------------------------------

    def _plan_request(self) -> None:
        wait = self.simulation.random.expovariate(_REQUESTS_PER_DECODER_AND_S)
        self.simulation.at(self.simulation.now + wait, self.request)

    def request(self) -> None:
        """Read from a prefill that the router has picked."""
        self._plan_request()
        prefill = self.simulation.route()
        if prefill is None:
            return
        self.simulation.requests += 1
        now, engine_id = self.simulation.now, prefill.engine_id
        if engine_id in self.epochs:
            if self._use(engine_id):
                self._read(engine_id)
            else:
                self.simulation.failed_requests += 1
                self.release()
            return
        running = engine_id in self.handshakes
        if self.table.refuse_handshake(engine_id, now, running) is not None:
            self.simulation.failed_requests += 1
        elif not running:
            self._shake_hands(prefill)

    def _read(self, engine_id: str) -> None:
        self.last_active[engine_id] = self.simulation.now
        self.table.heard(engine_id, self.simulation.now)
        self.table.recovered(engine_id)

    def _shake_hands(self, prefill: Prefill) -> None:
        now, engine_id = self.simulation.now, prefill.engine_id
        retry = self.table.has_history(engine_id)
        self.handshakes[engine_id] = retry
        # A retry probes the listener first, and a dead one refuses at once.
        fails_after = 0.001 if retry else _HANDSHAKE_TIMEOUT_S
        seconds = _HANDSHAKE_S if prefill.alive else fails_after
        if retry:
            start = max(now, heapq.heappop(self._retry_threads_free))
            heapq.heappush(self._retry_threads_free, start + seconds)
        else:
            start = max(now, self._first_thread_free)
            self._first_thread_free = start + seconds
        prefill.handshakes[int(start)] += 1
        self.simulation.at(
            start + seconds, functools.partial(self._shaken, prefill, engine_id)
        )

    def _shaken(self, prefill: Prefill, engine_id: str) -> None:
        now = self.simulation.now
        del self.handshakes[engine_id]
        if prefill.alive and prefill.engine_id == engine_id:
            self._connect(engine_id, now)
            self._read(engine_id)
        else:
            self.simulation.failed_requests += 1
            self.table.handshake_failed(engine_id, now)


# -- What happens to the fleet -------------------------------------------------------


def _nothing(simulation: Simulation) -> float:
    return 60.0


def _crashes(simulation: Simulation) -> float:
    for prefill in simulation.random.sample(
        simulation.prefills, min(_CRASHES, len(simulation.prefills))
    ):
        start = simulation.now + simulation.random.uniform(0, 60)
        simulation.at(start, functools.partial(simulation.kill, prefill))
        simulation.at(
            start + _RESTART_S, functools.partial(simulation.replace, prefill)
        )
    return 60 + _RESTART_S + 60


def _rolling_restart(simulation: Simulation) -> float:
    every = 180 / len(simulation.prefills)
    for number, prefill in enumerate(simulation.prefills):
        start = simulation.now + number * every
        simulation.at(start, functools.partial(simulation.kill, prefill))
        simulation.at(
            start + _RESTART_S, functools.partial(simulation.replace, prefill)
        )
    return 180 + _RESTART_S + 60


def _mass_restart(simulation: Simulation) -> float:
    for prefill in simulation.prefills:
        simulation.kill(prefill)
        back = simulation.now + _RESTART_S
        simulation.at(back, functools.partial(simulation.replace, prefill))
    return _RESTART_S + 120


def _mass_restart_unnoticed(simulation: Simulation) -> float:
    """Restart all under their old engine ids; routers name them all the time."""
    for prefill in simulation.prefills:
        simulation.kill(prefill, router_notices=False)
        back = simulation.now + _RESTART_S
        simulation.at(
            back, functools.partial(simulation.replace, prefill, same_id=True)
        )
    return _RESTART_S + 120


def _all_connections_reset(simulation: Simulation) -> float:
    for prefill in simulation.prefills:
        simulation.reset(prefill)
    return 120


SCENARIOS: dict[str, Callable[[Simulation], float]] = {
    "nothing happens": _nothing,
    f"{_CRASHES} prefills crash": _crashes,
    "rolling restart in 3 minutes": _rolling_restart,
    "all prefills restart at once": _mass_restart,
    "the same, old engine ids, routers do not notice": _mass_restart_unnoticed,
    "all connections reset at once": _all_connections_reset,
}


def measure(quick: bool) -> dict[str, Any]:
    """Simulate every scenario for every fleet."""
    return {
        "requests_per_decoder_and_s": _REQUESTS_PER_DECODER_AND_S,
        "restart_s": _RESTART_S,
        "rows": [
            simulate(fleet, name)
            for fleet in (_QUICK_FLEETS if quick else FLEETS)
            for name in SCENARIOS
        ],
    }


def simulate(fleet: Fleet, scenario: str) -> dict[str, Any]:
    """Simulate one scenario; return what the prefills and decoders saw."""
    simulation = Simulation(fleet, seed=1)
    simulation.run(_WARM_UP_S)
    simulation.failed_requests = simulation.requests = 0
    lasts = SCENARIOS[scenario](simulation)
    simulation.run(_WARM_UP_S + lasts)
    seconds = range(int(_WARM_UP_S), int(_WARM_UP_S + lasts))
    return {
        "fleet": vars(fleet),
        "scenario": scenario,
        "seconds": lasts,
        "heartbeats_per_prefill_rank_and_s": _rates(
            [prefill.heartbeats for prefill in simulation.prefills], seconds, fleet
        ),
        "most_heartbeats_per_prefill_rank_and_s": fleet.decoders / fleet.interval,
        "handshakes_per_prefill_rank": _rates(
            [prefill.handshakes for prefill in simulation.prefills], seconds, fleet
        ),
        "handshakes_per_decoder_rank_and_s_peak": max(
            sum(prefill.handshakes[second] for prefill in simulation.prefills)
            for second in seconds
        )
        / fleet.sample,
        "release_s": (
            summary(simulation.release_times) if simulation.release_times else None
        ),
        "connections_lost_unreleased": sum(
            not simulation.works(engine_id, epoch)
            for decoder in simulation.decoders
            for engine_id, epoch in decoder.epochs.items()
        ),
        "failed_requests_share": simulation.failed_requests
        / max(1, simulation.requests),
        "connected_at_end": sum(
            simulation.works(engine_id, epoch)
            for decoder in simulation.decoders
            for engine_id, epoch in decoder.epochs.items()
        )
        / (fleet.sample * fleet.prefills),
    }


def _rates(
    counters: list[collections.Counter[int]], seconds: range, fleet: Fleet
) -> dict[str, float]:
    """Return an average prefill's rates: its mean, worst second and worst minute."""
    totals = [
        sum(counter[second] for counter in counters) * fleet.scale / len(counters)
        for second in seconds
    ]
    minute = min(60, len(totals))
    return {
        "mean_per_s": sum(totals) / len(totals),
        "worst_second": max(totals),
        "worst_minute": max(
            sum(totals[start : start + minute])
            for start in range(len(totals) - minute + 1)
        ),
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return what must hold in every scenario."""
    limits = []
    for row in data["rows"]:
        what = f"{row['fleet']['name']}, {row['scenario']}"
        limits.append(
            Limit(
                f"{what}: heartbeats at a prefill rank, worst second",
                row["heartbeats_per_prefill_rank_and_s"]["worst_second"],
                row["most_heartbeats_per_prefill_rank_and_s"],
                "/s",
            )
        )
        limits.append(
            Limit(
                f"{what}: handshakes a second of a decoder rank, worst second",
                row["handshakes_per_decoder_rank_and_s_peak"],
                1.5 * data["requests_per_decoder_and_s"],
            )
        )
        if row["release_s"] is not None:
            limits.append(
                Limit(
                    f"{what}: last decoder's release",
                    row["release_s"]["max"],
                    _GUARD_RELEASE_S,
                    "s",
                )
            )
    return limits


guard = targets
