# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the demo can show. Each scenario returns the line that sums it up."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nixl_lab.client import Answer
from nixl_lab.experiment import STOCK_WATCH_S, Experiment, ExperimentError
from nixl_lab.faults import reset_worker_connections, why_no_resets
from nixl_lab.record import Fault, p95
from nixl_lab.servers import VllmServer, free_port

Lab = Experiment[VllmServer]

_STEADY_S = 5.0
_RETRY_PAUSE_S = 1.0
_STOCK_FLAP_REQUESTS = 6
_DEAD_ROUTE_S = 20.0
_DEAD_ROUTE_PER_S = 10
# Fewer make no 95th percentile; a slow machine then takes longer than the above.
_HEALTHY_REQUESTS = 100
_DEAD_ROUTE_LIMIT_S = 1.0
_P95_RATIO_LIMIT = 1.5
_BUSY_S = 75
_READ_AT_S = (5.0, 65.0)
_AT_ONCE_S = 5.0
_DARK_S = 75.0
_DARK_PAUSE_S = 1.0


@dataclass(frozen=True)
class Scenario:
    """A scenario and the deployment that it needs.

    Attributes:
        play: Runs it.
        prefills: Number of prefill instances.
        decoders: Number of decode instances.
        env: Environment variables for the servers.
        tensor_parallel: Ranks of a prefill and of a decoder.
        push: Prefills write the blocks, instead of decoders that read them.
        releases: An instance dies, and is to be released in time.
        skip_reason: Says why this machine cannot run it; None if it can.
    """

    play: Callable[[Lab], Awaitable[str]]
    prefills: int = 1
    decoders: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel: tuple[int, int] = (1, 1)
    push: bool = False
    releases: bool = False
    skip_reason: Callable[[], str | None] = lambda: None


async def drill(lab: Experiment, cycles: int, restart_after: int = 0) -> None:
    """The last prefill is killed and replaced under traffic, once or more often.

    Args:
        lab: The instances.
        cycles: How often.
        restart_after: The cycle after which the last decoder is restarted; 0 for never.
    """
    target, decoder = lab.prefills[-1], lab.decoders[-1]
    every = list(itertools.product(lab.prefills, lab.decoders))
    pairs = [(p.name, d.name) for p, d in every]
    async with lab.traffic(clients=3):
        if not await lab.await_answers(pairs):
            failed = dict(lab.record.causes()) or "none"
            raise ExperimentError(f"not every pair answered; failed so far: {failed}")
        for cycle in range(1, cycles + 1):
            with lab.steps.step(f"cycle {cycle} of {cycles}: traffic, nothing else"):
                await asyncio.sleep(_STEADY_S)
            fault = await lab.kill(target)
            await lab.watch_release(fault)
            await lab.replace(target, fault)
            await lab.await_answers([pair for pair in pairs if pair[0] == target.name])
            if cycle == restart_after:
                fault = await lab.kill(decoder)
                await lab.replace(decoder, fault)
                await lab.await_answers([p for p in pairs if p[1] == decoder.name])
        with lab.steps.step("a last stretch of traffic"):
            await asyncio.sleep(_STEADY_S)


async def replace(lab: Lab) -> str:
    """A prefill is killed while another serves, released, and replaced."""
    await drill(lab, cycles=1)
    return release_line(lab.record.kills[0])


async def idle(lab: Lab) -> str:
    """The only prefill is killed while the decoder has nothing to do."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)
    with lab.steps.step("no requests for a while"):
        await asyncio.sleep(2 * lab.record.interval)
    return await kill_and_replace(lab, prefill)


async def flap(lab: Lab) -> str:
    """The connections between two living workers are reset."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)
    fault = Fault("reset", [prefill.name, lab.decoder.name], lab.now())
    lab.record.faults.append(fault)
    with lab.steps.step("reset the TCP connections between the workers"):
        count = reset_worker_connections(prefill, lab.decoder)
    lab.steps.note(f"{count} connections reset")
    if count == 0:
        raise ExperimentError("the workers had no TCP connection to reset")
    if lab.stock:
        return await check_all_fail(lab, prefill)
    with lab.steps.step("the next request, and its retry if it fails"):
        for tries in (1, 2):
            answer = await lab.ask(next(iter(lab.expected)), prefill)
            if answer.ok:
                break
            lab.steps.note(f"failed: {answer.error}")
            await asyncio.sleep(_RETRY_PAUSE_S)
        lab.check(answer)
    fault.over = fault.ready = lab.now()
    await lab.check_requests(prefill, f"requests through {prefill.name} again")
    seconds = fault.ready - fault.at
    return f"answered again in {seconds:.1f} s (request {tries} of 2)"


async def check_all_fail(lab: Lab, prefill: VllmServer) -> str:
    """Shows that the stock connector does not recover."""
    with lab.steps.step(f"{_STOCK_FLAP_REQUESTS} requests"):
        for _ in range(_STOCK_FLAP_REQUESTS):
            if (await lab.ask(next(iter(lab.expected)), prefill)).ok:
                raise ExperimentError("the stock connector answered again")
            await asyncio.sleep(_RETRY_PAUSE_S)
    count = _STOCK_FLAP_REQUESTS
    return f"never answered again: {count} of {count} requests failed"


async def own_id(lab: Lab) -> str:
    """Requests name the decoder's own engine; good ones are served as before."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)
    prompt = next(iter(lab.expected))
    good = await lab.prefill(prefill, prompt)
    # What a router does that picks one instance for both phases.
    own = await lab.prefill(lab.decoder, prompt)
    engine = own["remote_engine_id"]
    bad = {
        "own engine, own address": own,
        "own engine, dead address": {**own, "remote_port": free_port()},
        "own engine, the prefill's address": {**good, "remote_engine_id": engine},
    }
    fault = Fault("own id", [lab.decoder.name], lab.now())
    lab.record.faults.append(fault)
    for title, params in bad.items():
        with lab.steps.step(title):
            answer = await lab.decode(prompt, params)
        lab.steps.note(answer.error or "served")
        if answer.ok:
            lab.check(answer)
    fault.over = fault.ready = lab.now()
    await lab.check_requests(prefill, "the next six")
    if lab.has_lists and engine in await lab.connected(lab.decoder):
        raise ExperimentError("the decoder lists itself as a peer")
    return f"served {len(lab.expected)} of {len(lab.expected)} afterwards"


async def busy_prefill(lab: Lab) -> str:
    """A prefill's interpreter is busy; what it prefilled before is read at once."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)
    prompts = list(lab.expected)[: len(_READ_AT_S)]
    ready = [(prompt, await lab.prefill(prefill, prompt)) for prompt in prompts]
    fault = Fault("busy", [prefill.name], lab.now())
    lab.record.faults.append(fault)
    call = {"method": "hold_interpreter", "args": [_BUSY_S]}
    busy = asyncio.create_task(
        lab.session.post(f"{prefill.url}/collective_rpc", json=call)
    )
    slowest = 0.0
    for at, (prompt, params) in zip(_READ_AT_S, ready):
        with lab.steps.step(f"a read {at:.0f} s into the {_BUSY_S} s"):
            await asyncio.sleep(fault.at + at - lab.now())
            answer = await lab.decode(prompt, params, prefill.name)
        if busy.done():
            raise ExperimentError(f"the prefill is not busy: {await busy}")
        lab.steps.note(answer.error or f"read in {answer.seconds:.2f} s")
        lab.check(answer)
        slowest = max(slowest, answer.seconds)
    with lab.steps.step(f"until {prefill.name} is itself again"):
        await busy
    fault.over = fault.ready = lab.now()
    await lab.check_requests(prefill, f"requests through {prefill.name} again")
    if slowest > _AT_ONCE_S:
        raise ExperimentError(f"a read took {slowest:.1f} s")
    lines = lab.decoder.log_lines("NIXL peer (released|suspect|unreachable)")
    if lines:
        raise ExperimentError(f"a living prefill was taken for dead: {lines[0]}")
    return f"read at once while the prefill was busy (slowest {slowest:.2f} s)"


async def one_rank_killed(lab: Lab) -> str:
    """One worker process of a prefill is killed; the rest of it follows by itself."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)

    async def strike() -> None:
        prefill.workers()[-1].kill()

    fault = await lab.hit("kill a rank of", prefill, strike)
    await lab.watch_release(fault)
    await prefill.kill()
    await lab.replace(prefill, fault)
    await lab.check_requests(prefill, f"requests through the new {prefill.name}")
    return release_line(fault)


async def dark_replace(lab: Lab) -> str:
    """A prefill of two ranks goes dark; one of a single rank takes its ports."""
    (prefill,) = lab.prefills
    await lab.check_requests(prefill)

    async def strike() -> None:
        prefill.go_dark()

    # Nothing can tell that it is gone, so nothing is to be released.
    lab.forget_engine(prefill)
    fault = await lab.hit("stop the workers, kill the engine of", prefill, strike)
    prefill.tensor_parallel = 1
    await lab.replace(prefill, fault)
    began, served = lab.now(), 0
    with lab.steps.step(f"requests for {_DARK_S:.0f} s"):
        for prompt in itertools.cycle(lab.expected):
            if lab.now() - began > _DARK_S:
                break
            lab.check(await lab.ask(prompt, prefill))
            served += 1
            await asyncio.sleep(_DARK_PAUSE_S)
    return f"served {served} of {served} in the replacement's first {_DARK_S:.0f} s"


async def dead_route(lab: Lab) -> str:
    """Requests for a killed prefill keep coming while another one serves."""
    healthy, target = lab.prefills
    for prefill in (healthy, target):
        await lab.check_requests(prefill)
    prefilled = [(p, await lab.prefill(target, p)) for p in lab.expected]
    before = await measure(lab, healthy, f"requests through {healthy.name} only")
    fault = await lab.kill(target)
    # Its requests are meant to fail.
    fault.over = None
    stop = asyncio.Event()
    dead = asyncio.create_task(keep_routing_to_dead(lab, target, prefilled, stop))
    title = f"the same while {_DEAD_ROUTE_PER_S} a second name {target.name}"
    after = await measure(lab, healthy, title)
    stop.set()
    return judge_dead_route(await dead, before, after)


async def measure(lab: Lab, prefill: VllmServer, title: str) -> list[Answer]:
    """Sends requests one after the other for a while; all must succeed."""
    answers: list[Answer] = []
    with lab.steps.step(title):
        end = time.monotonic() + _DEAD_ROUTE_S
        while time.monotonic() < end or len(answers) < _HEALTHY_REQUESTS:
            for prompt in lab.expected:
                answers.append(await lab.ask(prompt, prefill))
                lab.check(answers[-1])
                await asyncio.sleep(0.05)
    return answers


async def keep_routing_to_dead(
    lab: Lab,
    target: VllmServer,
    prefilled: list[tuple[str, dict[str, Any]]],
    stop: asyncio.Event,
) -> list[Answer]:
    """Sends the decoder requests whose blocks a dead prefill holds, at a fixed rate."""
    start = time.monotonic()
    requests: list[asyncio.Task[Answer]] = []
    for prompt, params in itertools.cycle(prefilled):
        due = start + len(requests) / _DEAD_ROUTE_PER_S
        await asyncio.sleep(due - time.monotonic())
        if stop.is_set():
            break
        request = lab.decode(prompt, params, target.name)
        requests.append(asyncio.create_task(request))
    return await asyncio.gather(*requests)


def judge_dead_route(
    dead: list[Answer], before: list[Answer], after: list[Answer]
) -> str:
    """Refuses slow failures and a slow healthy prefill."""
    if any(answer.ok for answer in dead):
        raise ExperimentError("a request to the dead prefill was answered")
    slow = [a.seconds for a in dead if a.seconds >= _DEAD_ROUTE_LIMIT_S]
    slowest = max(answer.seconds for answer in dead[1:])
    p95_before, p95_after = (p95([a.seconds for a in x]) for x in (before, after))
    ratio = p95_after / p95_before
    line = (
        f"{len(dead)} requests to the dead prefill: {len(slow)} took"
        f" {_DEAD_ROUTE_LIMIT_S:.0f} s or longer, slowest {slowest:.2f} s;"
        f" healthy p95 {p95_before:.3f} s before ({len(before)} requests),"
        f" {p95_after:.3f} s during ({len(after)}): {ratio:.2f}x"
    )
    # One may wait: the first handshake after the release finds out.
    if len(slow) > 1 or ratio > _P95_RATIO_LIMIT:
        raise ExperimentError(line)
    return line


async def push(lab: Lab) -> str:
    """The prefill writes: a decoder is killed, released and replaced under traffic."""
    (prefill,), (survivor, target) = lab.prefills, lab.decoders
    pairs = [(prefill.name, d.name) for d in lab.decoders]
    async with lab.traffic(clients=2):
        if not await lab.await_answers(pairs):
            failed = dict(lab.record.causes()) or "none"
            raise ExperimentError(f"not every pair answered; failed so far: {failed}")
        fault = await lab.kill(target)
        await lab.watch_release(fault)
        if not await lab.await_answers(pairs[:1]):
            raise ExperimentError(f"{survivor.name} does not serve any more")
        await lab.replace(target, fault)
        if not await lab.await_answers(pairs):
            raise ExperimentError(f"the new {target.name} does not serve")
    return release_line(fault)


async def kill_and_replace(lab: Lab, prefill: VllmServer) -> str:
    """Kills a prefill, watches its release and has its replacement serve."""
    fault = await lab.kill(prefill)
    await lab.watch_release(fault)
    await lab.replace(prefill, fault)
    await lab.check_requests(prefill, f"requests through the new {prefill.name}")
    return release_line(fault)


def release_line(fault: Fault) -> str:
    """The last line of the scenarios that wait for a release."""
    times = [s for s in fault.releases.values() if s is not None]
    if not times or len(times) < len(fault.releases):
        return f"never released within {STOCK_WATCH_S:.0f} s"
    return f"released in {max(times):.1f} s"


SCENARIOS = {
    "replace": Scenario(replace, prefills=2, releases=True),
    "idle": Scenario(idle, releases=True),
    # Over shared memory and CMA there would be nothing for a reset to break.
    "flap": Scenario(flap, env={"UCX_TLS": "tcp,self"}, skip_reason=why_no_resets),
    "dead-route": Scenario(dead_route, prefills=2, releases=True),
    "own-id": Scenario(own_id),
    "busy-prefill": Scenario(busy_prefill, env={"VLLM_SERVER_DEV_MODE": "1"}),
    "tp-2-2": Scenario(one_rank_killed, tensor_parallel=(2, 2), releases=True),
    "tp-2-1": Scenario(one_rank_killed, tensor_parallel=(2, 1), releases=True),
    "tp-1-2": Scenario(one_rank_killed, tensor_parallel=(1, 2), releases=True),
    "push": Scenario(push, decoders=2, push=True, releases=True),
    "dark-replace": Scenario(dark_replace, tensor_parallel=(2, 1)),
}
