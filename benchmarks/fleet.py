# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A simulated fleet: the product's own peer managers on simulated time.

Every decoder rank talks to the prefills' ranks of the same number, so one rank of each
instance is simulated; and only a sample of the decoders, as they know nothing of each
other. Results are scaled to the whole fleet. What is simulated is time, the requests
and the deaths; the rounds are the product's.
"""

import collections
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import Limit, summary
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import manager
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.agent import (
    NixlAgentProxy,
    OpenTransfers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.policy import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
)

_STEP_S = 0.02
_REQUESTS_PER_DECODER_AND_S = 8.0
# The router goes on naming a dead prefill for so long.
_ROUTER_NOTICES_S = 2.0
_RESTART_S = 60.0
# Idle peers' heartbeats are up to 30 s apart: until then the start shows.
_WARM_UP_S = 90.0
_CRASHES = 10
_MOST_RELEASE_S = 35.0


@dataclass(frozen=True)
class Fleet:
    """A deployment's size, and how many of its decoders are simulated."""

    name: str
    decoders: int
    prefills: int
    sample: int


FLEETS = (
    Fleet("1,000 decoders, 200 prefills", 1000, 200, sample=20),
    Fleet("10,000 decoders, 2,000 prefills", 10_000, 2000, sample=3),
)
_QUICK_FLEETS = (Fleet("1,000 decoders, 20 prefills", 1000, 20, sample=4),)


class nixlRemoteDisconnectError(Exception):  # noqa: N801, N818 (NIXL's name)
    """What NIXL raises for a peer that is gone."""


class Prefill:
    """One rank of a prefill; a new instance at its place has another engine id."""

    def __init__(self, number: int):
        """Start the first instance."""
        self._number = number
        self._instance = 0
        self.died_at = math.inf
        self.heartbeats: collections.Counter[int] = collections.Counter()
        """By second."""

    @property
    def engine_id(self) -> str:
        """Id of its present instance, and name of its agent."""
        return f"prefill-{self._number}-{self._instance}"

    def restart(self) -> None:
        """Start another instance."""
        self._instance += 1
        self.died_at = math.inf


class Simulation:
    """A fleet on simulated time."""

    def __init__(self, fleet: Fleet):
        """Connect every decoder to every prefill."""
        self.fleet = fleet
        self.random = np.random.default_rng(1)
        self.now = 0.0
        self.prefills = [Prefill(number) for number in range(fleet.prefills)]
        self.by_engine: dict[str, Prefill] = {}
        self.lost_at: dict[str, float] = {}
        self.release_s: list[float] = []
        """From a death to its release, by decoder and engine."""
        self.plan: list[tuple[float, Callable[[], None]]] = []
        """What happens to the prefills, and when."""
        self.decoders = [Decoder(self) for _ in range(fleet.sample)]

    def run(self, until: float) -> None:
        """Let time pass, in steps of every decoder."""
        while self.now < until:
            self.now += _STEP_S
            for when, action in [item for item in self.plan if item[0] <= self.now]:
                self.plan.remove((when, action))
                action()
            for decoder in self.decoders:
                decoder.step()

    def kill_and_restart(self, prefill: Prefill, when: float) -> None:
        """Plan a prefill's death, and another instance in its place."""

        def kill() -> None:
            prefill.died_at = self.lost_at[prefill.engine_id] = self.now

        self.plan.append((when, kill))
        self.plan.append((when + _RESTART_S, prefill.restart))


class Decoder:
    """One rank of a decoder: the real manager and proxy, on an agent that is not."""

    def __init__(self, simulation: Simulation):
        """Connect to every prefill."""
        self._simulation = simulation
        transfers = OpenTransfers()
        self._manager = manager.PeerManager(
            DEFAULT_HEARTBEAT_INTERVAL_S,
            "decoder",
            transfers,
            self,
            lambda: simulation.now,
        )
        self._agent = NixlAgentProxy(
            self, self._manager, transfers, self._manager.clock
        )
        # As if each had its last request some time ago, not all at this moment.
        gap = simulation.fleet.prefills / _REQUESTS_PER_DECODER_AND_S
        for prefill in simulation.prefills:
            simulation.now = -simulation.random.exponential(gap)
            self._connect(prefill)
        simulation.now = 0.0

    def step(self) -> None:
        """Post the requests of a step, then run its round."""
        simulation, peers = self._simulation, self._manager
        now = simulation.now
        for _ in range(
            simulation.random.poisson(_REQUESTS_PER_DECODER_AND_S * _STEP_S)
        ):
            prefill = simulation.prefills[
                simulation.random.integers(len(simulation.prefills))
            ]
            if now < prefill.died_at + _ROUTER_NOTICES_S:
                self._request(prefill)
        if now >= peers.next_round_at:
            peers.update_suspects(now)
            peers.send_due_heartbeats(self._agent, now)
            if (engine_id := peers.find_releasable((), ())) is not None:
                with peers.releasing(engine_id, 1):
                    lost_at = simulation.lost_at[engine_id]
                    simulation.release_s.append(now - lost_at)
            peers.plan_next_round()

    def _connect(self, prefill: Prefill) -> None:
        engine_id = prefill.engine_id
        self._simulation.by_engine[engine_id] = prefill
        self._manager.connected(engine_id, [engine_id], "")

    def _request(self, prefill: Prefill) -> None:
        """Read from a prefill; it has been read when the next one is posted."""
        if prefill.engine_id not in self._manager:
            if prefill.died_at == math.inf:
                self._connect(prefill)
            return
        try:
            self._agent.send_notif(prefill.engine_id, notif_msg=b"")
        except nixlRemoteDisconnectError:
            return
        self._manager.finished(prefill.engine_id)

    # -- The agent below the proxy -------------------------------------------------

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Send a heartbeat, or the notification that stands for a read."""
        prefill = self._simulation.by_engine[agent]
        if prefill.engine_id != agent or prefill.died_at < math.inf:
            raise nixlRemoteDisconnectError(agent)
        if notif_msg:
            prefill.heartbeats[int(self._simulation.now)] += 1

    # -- The manager's statistics ----------------------------------------------------

    def count(self, name: str, n: int = 1) -> None:
        """Count nothing."""

    def observe_release(self, seconds: float) -> None:
        """Observe nothing."""

    def set_gauges(self, *gauges: Any) -> None:
        """Show nothing."""


def _nothing(simulation: Simulation) -> float:
    return 60.0


def _crashes(simulation: Simulation) -> float:
    count = min(_CRASHES, len(simulation.prefills))
    for prefill in simulation.random.choice(simulation.prefills, count, replace=False):
        when = simulation.now + simulation.random.uniform(0, 60)
        simulation.kill_and_restart(prefill, when)
    return 60 + _RESTART_S + 60


def _mass_restart(simulation: Simulation) -> float:
    for prefill in simulation.prefills:
        simulation.kill_and_restart(prefill, simulation.now)
    return _RESTART_S + 120


SCENARIOS: dict[str, Callable[[Simulation], float]] = {
    "nothing happens": _nothing,
    f"{_CRASHES} prefills crash": _crashes,
    "all prefills restart at once": _mass_restart,
}


def measure(quick: bool) -> dict[str, Any]:
    """Simulate every scenario for every fleet."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return {
        "requests_per_decoder_and_s": _REQUESTS_PER_DECODER_AND_S,
        "restart_s": _RESTART_S,
        "router_notices_s": _ROUTER_NOTICES_S,
        "rows": [
            simulate(fleet, name)
            for fleet in (_QUICK_FLEETS if quick else FLEETS)
            for name in SCENARIOS
        ],
    }


def simulate(fleet: Fleet, scenario: str) -> dict[str, Any]:
    """Simulate one scenario; return what the prefills and decoders saw."""
    simulation = Simulation(fleet)
    simulation.run(_WARM_UP_S)
    lasts = SCENARIOS[scenario](simulation)
    simulation.run(_WARM_UP_S + lasts)
    # An average prefill's, of all decoders.
    scale = fleet.decoders / fleet.sample / fleet.prefills
    heartbeats = [
        sum(prefill.heartbeats[second] for prefill in simulation.prefills) * scale
        for second in range(int(_WARM_UP_S), int(_WARM_UP_S + lasts))
    ]
    lost = len(simulation.lost_at) * fleet.sample
    return {
        "fleet": fleet.name,
        "sample": fleet.sample,
        "scenario": scenario,
        "heartbeats_per_s": float(np.mean(heartbeats)),
        "heartbeats_worst_s": max(heartbeats),
        "heartbeats_bound": fleet.decoders / DEFAULT_HEARTBEAT_INTERVAL_S,
        "unreleased": lost - len(simulation.release_s),
        "release_s": summary(simulation.release_s) if simulation.release_s else None,
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return what must hold in every scenario."""
    limits = []
    for row in data["rows"]:
        what = f"{row['fleet']}, {row['scenario']}"
        limits += [
            Limit(
                f"{what}: heartbeats at a prefill rank, worst second",
                row["heartbeats_worst_s"],
                row["heartbeats_bound"],
                "/s",
            ),
            Limit(f"{what}: deaths not released", row["unreleased"], 0),
        ]
        if row["release_s"] is not None:
            last = row["release_s"]["max"]
            limits.append(Limit(f"{what}: last release", last, _MOST_RELEASE_S, "s"))
    return limits


guard = targets
