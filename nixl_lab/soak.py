# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The soak: two prefills and two decoders under traffic, with random faults.

The faults follow from a seed, which is printed: the same seed plays the same faults in
the same order. Faults and restarts come one at a time, so that every failed request has
one cause.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from nixl_lab.experiment import Experiment, ExperimentError
from nixl_lab.faults import reset_worker_connections, why_no_resets
from nixl_lab.record import SOAK_RULES, Fault
from nixl_lab.servers import VllmServer, free_port
from nixl_lab.session import (
    add_server_arguments,
    local_experiment,
    new_record,
    numbered,
    run,
    seconds,
)

_CLIENTS = 3
_PAUSES_S = (2.0, 12.0)
# Shorter than the minute after which a read counts as stuck, and longer.
_STOPS_S = (5.0, 20.0, 75.0)
_SETTLE_S = 20.0
_DOWN_TIMEOUT_S = 60.0


class Soak:
    """Faults at random, each until everything serves again."""

    def __init__(self, lab: Experiment[VllmServer], chance: random.Random) -> None:
        self._lab = lab
        self._chance = chance
        self._starts: dict[str, int] = {}
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill_all,
            "kill the worker": lambda: self._kill_part("VLLM::Worker"),
            "kill the engine": lambda: self._kill_part("VLLM::EngineCore"),
            "restart a decoder": self._restart_decoder,
            "stop and continue": self._stop,
            "own id": self._own_id,
            "wrong address": self._wrong_address,
        }
        if reason := why_no_resets():
            lab.steps.note(f"no connection resets: {reason}")
            lab.record.about["connection resets"] = f"none: {reason}"
        else:
            self._faults["reset"] = self._reset

    async def run(self, minutes: float) -> str:
        """Plays faults for a time; returns the line that sums it up."""
        lab = self._lab
        end = lab.now() + 60 * minutes
        async with lab.traffic(clients=_CLIENTS):
            every = [(p.name, d.name) for p in lab.prefills for d in lab.decoders]
            if not await lab.await_answers(every):
                raise ExperimentError(f"not every pair answered: {lab.record.causes()}")
            while lab.now() < end:
                self._measure()
                await asyncio.sleep(self._chance.uniform(*_PAUSES_S))
                await self._faults[self._chance.choice(sorted(self._faults))]()
            with lab.steps.step("a last stretch of traffic"):
                await asyncio.sleep(_SETTLE_S)
            self._measure()
        faults, requests = len(lab.record.faults), len(lab.record.requests)
        return f"{faults} faults, {requests} requests in {lab.now() / 60:.0f} minutes"

    # -- Instances that die -----------------------------------------------------------

    async def _kill_all(self) -> None:
        target = self._chance.choice(self._lab.prefills)
        await self._hit(target, "kill", target.kill)

    async def _kill_part(self, title: str) -> None:
        """Kills a part of a prefill; the rest has to follow by itself."""
        target = self._chance.choice(self._lab.prefills)

        async def strike() -> None:
            for process in target.processes(title):
                process.kill()
            async with asyncio.timeout(_DOWN_TIMEOUT_S):
                while target.running:
                    await asyncio.sleep(0.1)
            await target.kill()

        await self._hit(target, f"kill the {title.removeprefix('VLLM::')} of", strike)

    async def _restart_decoder(self) -> None:
        target = self._chance.choice(self._lab.decoders)
        await self._hit(target, "restart", target.kill)

    async def _hit(
        self, target: VllmServer, kind: str, strike: Callable[[], Awaitable[None]]
    ) -> None:
        lab = self._lab
        fault = await lab.hit(kind, target, strike)
        await lab.watch_release(fault)
        await lab.replace(target, fault)
        await self._await_all(target)

    async def _await_all(self, target: VllmServer) -> None:
        lab = self._lab
        others = lab.decoders if target in lab.prefills else lab.prefills
        pairs = [
            (target.name, other.name)
            if target in lab.prefills
            else (other.name, target.name)
            for other in others
        ]
        if not await lab.await_answers(pairs):
            raise ExperimentError(f"{target.name} does not serve again")

    # -- Instances that live on -------------------------------------------------------

    async def _stop(self) -> None:
        """Stops a prefill's worker for a while."""
        target = self._chance.choice(self._lab.prefills)
        seconds = self._chance.choice(_STOPS_S)
        fault = self._begin(f"stop for {seconds:.0f} s", [target.name])
        with self._lab.steps.step(f"{fault.kind} {target.name}"):
            for process in target.workers():
                process.suspend()
            await asyncio.sleep(seconds)
            for process in target.workers():
                process.resume()
        await self._await_all(target)
        self._end(fault)

    async def _reset(self) -> None:
        """Resets the connections between two workers; both live."""
        prefill = self._chance.choice(self._lab.prefills)
        decoder = self._chance.choice(self._lab.decoders)
        fault = self._begin("reset", [prefill.name, decoder.name])
        with self._lab.steps.step(f"reset {prefill.name} and {decoder.name}"):
            reset_worker_connections(prefill, decoder)
        await self._await_all(prefill)
        self._end(fault)

    async def _own_id(self) -> None:
        """A request names the decoder's own engine."""
        prompt = next(iter(self._lab.expected))
        own = await self._lab.prefill(self._lab.decoder, prompt)
        await self._bad_request("own id", prompt, own)

    async def _wrong_address(self) -> None:
        """A request names a living engine and an address where nobody is."""
        prompt = next(iter(self._lab.expected))
        prefill = self._chance.choice(self._lab.prefills)
        params = await self._lab.prefill(prefill, prompt)
        params["remote_port"] = free_port()
        await self._bad_request("wrong address", prompt, params)

    async def _bad_request(self, kind: str, prompt: str, params: dict) -> None:
        fault = self._begin(kind, [f"{kind} request"])
        with self._lab.steps.step(f"{kind} request"):
            # It names itself, so its failure explains no other.
            await self._lab.decode(prompt, params, fault.instances[0])
        self._end(fault)

    def _begin(self, kind: str, instances: list[str]) -> Fault:
        fault = Fault(kind, instances, self._lab.now())
        self._lab.record.faults.append(fault)
        return fault

    def _end(self, fault: Fault) -> None:
        fault.over = fault.ready = self._lab.now()

    # -- Growth -----------------------------------------------------------------------

    def _measure(self) -> None:
        """Notes the size of each worker: once after its first faults, and the last."""
        usage = self._lab.record.usage
        for server in self._lab.instances:
            now = [0.0, 0.0]
            for worker in server.workers():
                now[0] += worker.memory_info().rss / 2**20
                now[1] += worker.num_fds()
            if self._starts.get(server.name) != server.starts:
                self._starts[server.name] = server.starts
                usage[server.name] = [now, now]
            usage[server.name][1] = now


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nixl_lab.soak", description=__doc__
    )
    parser.add_argument("--minutes", type=seconds, default=60.0, metavar="N")
    parser.add_argument("--seed", type=int, default=None, metavar="N")
    parser.add_argument(
        "--output", type=Path, default=Path("build", "soak"), metavar="DIR"
    )
    add_server_arguments(parser)
    args = parser.parse_args(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    return asyncio.run(play(args, seed))


async def play(args: argparse.Namespace, seed: int) -> int:
    """Starts the servers and plays the faults; returns the exit status."""
    record = new_record(args, numbered("prefill", 2), numbered("decode", 2))
    record.about |= {"seed": str(seed), "minutes": str(args.minutes)}
    print(f"seed {seed}", flush=True)
    output = args.output.resolve()

    async def played() -> str:
        async with local_experiment(args, record, output) as lab:
            return await Soak(lab, random.Random(seed)).run(args.minutes)

    return await run(played, record, SOAK_RULES, output)


if __name__ == "__main__":
    sys.exit(main())
