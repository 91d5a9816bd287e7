# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Longest step: how long a step may take when there is much to do, stock and ours.

A step waits for single NIXL calls, never for all that there is to do: not while a
peer with many descriptors is loaded, not when many peers die at once, not when the
heartbeats of many are due.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import loading
from benchmarks.common import ROOT, Limit, summary
from benchmarks.fakes import QuietNixl, connected_decoder
from benchmarks.peers_pool import running_fork_server
from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder
from tests.support.prefill_group import PrefillGroup, connect
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

_INTERVAL_S = 2.0
_STEP_PAUSE_S = 0.001
_PEERS, _QUICK_PEERS = 200, 20
_PEERS_PER_PROCESS, _QUICK_PEERS_PER_PROCESS = 25, 5
# Deaths are found by heartbeats, and then there are releases to do.
_WATCH_S, _QUICK_WATCH_S = 4 * _INTERVAL_S, 2 * _INTERVAL_S
_DEATHS, _QUICK_DEATHS = 5, 1
_READ_TIMEOUT_S = 60.0
_DUE, _QUICK_DUE = 1000, 100
_BURSTS, _QUICK_BURSTS = 20, 3
# Long enough for every peer to be due, however long it was idle.
_ALL_DUE_AFTER_S = 60.0
_TARGET_RATIO = 1.2
_TARGET_MORE_MS = 2.0
# For CI, in any company: a step that waits for a peer to be loaded shows more.
_GUARD_MORE_MS = 100.0

_LOADING = """
from benchmarks.common import use_checkout
use_checkout()
from benchmarks import loading
loading.main()
"""
_NAMES = ("stock", "ours")
Turns = dict[str, list[float]]


def measure(quick: bool) -> dict[str, Any]:
    """Measure all three, stock and ours turn by turn."""
    with running_fork_server() as fork_server:
        if quick:
            found = [loading.measure_all(fork_server, quick)]
        else:
            found = list(map(_loading_with, _releases()))
        deaths = _deaths(fork_server, quick)
    rows = [
        {"vllm": one["vllm"], "case": row["case"], **_compared(row["longest_turn_ms"])}
        | {f"{name}_load_s": summary(row["load_s"][name])["median"] for name in _NAMES}
        for one in found
        for row in one["rows"]
    ]
    return {"loading": rows, "deaths": deaths, "due": _heartbeats_due(quick)}


# -- A peer with many descriptors ------------------------------------------------------


def _releases() -> list[Path | None]:
    """Return where the vLLM releases are: installed, and the newest beside it."""
    newest = max((ROOT / ".venv").glob("vllm-*"), default=None)
    return [None] if newest is None else [None, newest]


def _loading_with(path: Path | None) -> dict[str, Any]:
    """Return what `benchmarks.loading` prints, in a process with that vLLM."""
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-c", _LOADING]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode} with {path or 'vLLM'}")
    return json.loads(done.stdout)


def _compared(longest_ms: Turns) -> dict[str, Any]:
    stock, ours = (summary(longest_ms[name]) for name in _NAMES)
    return {
        "stock_ms": stock,
        "ours_ms": ours,
        "ratio": ours["median"] / stock["median"],
        "more_ms": ours["median"] - stock["median"],
    }


# -- Many peers that die at once -------------------------------------------------------


def _deaths(fork_server: ForkServer, quick: bool) -> dict[str, Any]:
    """Kill half of the peers of two decoders; return their longest steps after it."""
    peers = _QUICK_PEERS if quick else _PEERS
    size = _QUICK_PEERS_PER_PROCESS if quick else _PEERS_PER_PROCESS
    longest: Turns = {"stock": [], "ours": []}
    before: Turns = {"stock": [], "ours": []}
    with contextlib.ExitStack() as stack:
        # NIXL's calls spin while its own thread waits for a core with their lock.
        decoders = {
            name: stack.enter_context(
                contextlib.closing(
                    Decoder(name, nice=0, peer_heartbeat_interval=interval)
                )
            )
            for name, interval in (("stock", 0.0), ("ours", _INTERVAL_S))
        }
        groups: list[Any] = []
        for number in range(_QUICK_DEATHS if quick else _DEATHS):
            while sum(len(group.prefills) for group in groups) < peers:
                name = f"group{number}-{len(groups)}"
                group = PrefillGroup(fork_server, decoders["ours"], name, size)
                stack.callback(group.child.close)
                groups.append(group)
                for decoder in decoders.values():
                    connect(decoder, group.prefills)
                    _read_from_each(decoder, group.prefills)
            quiet = _watch(decoders, _INTERVAL_S)
            half = len(groups) // 2
            targets, groups = groups[:half], groups[half:]
            for group in targets:
                group.child.kill()
            after = _watch(decoders, _QUICK_WATCH_S if quick else _WATCH_S)
            for name in longest:
                before[name].append(quiet[name])
                longest[name].append(after[name])
            dead = {engine_id for group in targets for engine_id in group.engine_ids}
            assert not dead & decoders["ours"].connected, decoders["ours"].evidence()
            for engine_id in dead & decoders["stock"].connected:
                decoders["stock"].worker._cleanup_remote_engine(engine_id)
    return {
        "peers": peers,
        "dead": peers // 2,
        **_compared(longest),
        "before": _compared(before),
    }


def _read_from_each(decoder: Decoder, prefills: list[Any]) -> None:
    """Read a block from each, so that there are connections to lose."""
    requests = {decoder.start(prefill, [0]) for prefill in prefills}
    decoder.wait_until(lambda: requests <= {*decoder.finished}, _READ_TIMEOUT_S)


def _watch(decoders: dict[str, Decoder], seconds: float) -> dict[str, float]:
    """Let decoders step in turn; return each one's longest step in milliseconds."""
    longest = dict.fromkeys(decoders, 0.0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, decoder in decoders.items():
            longest[name] = max(longest[name], _time_step(decoder.worker))
        time.sleep(_STEP_PAUSE_S)
    return longest


def _time_step(worker: Any) -> float:
    """Run a step; return the milliseconds that it took."""
    metadata = NixlConnectorMetadata()
    start = time.perf_counter()
    worker.start_load_kv(metadata)
    worker.get_transfer_results()
    return (time.perf_counter() - start) * 1e3


# -- Many peers with heartbeats due ----------------------------------------------------


def _heartbeats_due(quick: bool) -> dict[str, Any]:
    """Have every heartbeat due at once, on an agent for which a send is nothing."""
    peers = _QUICK_DUE if quick else _DUE
    engine_ids = [f"peer-{number}" for number in range(peers)]
    longest: Turns = {"stock": [], "ours": []}
    steps, most_sends = [], 0
    with (
        connected_decoder(_INTERVAL_S, engine_ids) as ours,
        connected_decoder(0, engine_ids) as stock,
    ):
        agent = ours.nixl
        assert isinstance(agent, QuietNixl)
        for _ in range(_QUICK_BURSTS if quick else _BURSTS):
            for decoder in (ours, stock):
                decoder.clock.now += _ALL_DUE_AFTER_S
            times: Turns = {"stock": [], "ours": []}
            first = sent = agent.sends
            while agent.sends - first < peers:
                assert len(times["ours"]) < peers, "not all heartbeats were sent"
                times["stock"].append(_time_step(stock.worker))
                times["ours"].append(_time_step(ours.worker))
                most_sends = max(most_sends, agent.sends - sent)
                sent = agent.sends
            steps.append(len(times["ours"]))
            for name in longest:
                longest[name].append(max(times[name]))
    return {
        "peers": peers,
        "most_sends": most_sends,
        "steps": summary(steps)["median"],
        **_compared(longest),
    }


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: no longer than stock's longest, or hardly so."""
    limits = [
        Limit(f"{what}, ours over stock", row["ratio"], _TARGET_RATIO)
        for what, row in _rows_of_loading(data)
    ]
    return limits + [
        Limit(f"{what}, more than stock", row["more_ms"], _TARGET_MORE_MS, "ms")
        for what, row in _rows_of_many(data)
    ]


def guard(data: dict[str, Any]) -> list[Limit]:
    """Return the limits for CI, with a wide margin."""
    return [
        Limit(f"{what}, more than stock", row["more_ms"], _GUARD_MORE_MS, "ms")
        for what, row in [*_rows_of_loading(data), *_rows_of_many(data)]
    ]


def _rows_of_loading(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"longest turn while {r['case']} are loaded, vLLM {r['vllm']}", r)
        for r in data["loading"]
    ]


def _rows_of_many(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    deaths, due = data["deaths"], data["due"]
    return [
        (f"longest step, {deaths['dead']} of {deaths['peers']} peers dead", deaths),
        (f"longest step, {due['peers']} heartbeats due", due),
    ]
