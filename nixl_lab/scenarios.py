# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the demo can show. Each scenario returns the line that sums it up."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nixl_lab.client import Answer, complete
from nixl_lab.faults import reset_worker_connections, why_no_resets
from nixl_lab.lab import STOCK_WATCH_S, Lab, LabError
from nixl_lab.servers import VllmServer

_RETRY_PAUSE_S = 1.0
_STOCK_FLAP_REQUESTS = 6
_DEAD_ROUTE_S = 20.0
_DEAD_ROUTE_PER_S = 10
# Fewer make no 95th percentile; a slow machine then takes longer than the above.
_HEALTHY_REQUESTS = 100
_DEAD_ROUTE_LIMIT_S = 1.0
_HEALTHY_PAUSE_S = 0.05
_P95_RATIO_LIMIT = 1.5


@dataclass(frozen=True)
class Scenario:
    """A scenario and the deployment that it needs.

    Attributes:
        play: Runs it.
        prefills: Number of prefill instances.
        env: Environment variables for the servers.
        obstacle: Says why this machine cannot run it; None if it can.
    """

    play: Callable[[Lab], Awaitable[str]]
    prefills: int
    env: Mapping[str, str] = field(default_factory=dict)
    obstacle: Callable[[], str | None] = lambda: None


async def replace(lab: Lab) -> str:
    """A prefill is killed while another serves, released, and replaced."""
    survivor, victim = lab.deployment.prefills
    await lab.learn_expected_tokens()
    for prefill in (survivor, victim):
        await lab.check_requests(prefill, f"requests through {prefill.name}")
    async with lab.traffic(survivor) as answers:
        released = await lab.kill_and_watch(victim)
        await check_unpinned_requests(lab)
        await lab.replace(victim)
    check_served_throughout(lab, survivor, answers)
    return release_line(released)


async def idle(lab: Lab) -> str:
    """The only prefill is killed while the decoder has nothing to do."""
    (prefill,) = lab.deployment.prefills
    await lab.learn_expected_tokens()
    await lab.check_requests(prefill, f"requests through {prefill.name}")
    with lab.steps.step("no requests for a while"):
        await asyncio.sleep(2 * lab.interval)
    released = await lab.kill_and_watch(prefill)
    await lab.replace(prefill)
    return release_line(released)


async def flap(lab: Lab) -> str:
    """The connections between two living workers are reset."""
    (prefill,) = lab.deployment.prefills
    await lab.learn_expected_tokens()
    await lab.check_requests(prefill, f"requests through {prefill.name}")
    with lab.steps.step("reset the TCP connections between the workers"):
        count = reset_worker_connections(prefill, lab.decoder)
    lab.steps.note(f"{count} connections reset")
    if count == 0:
        raise LabError("the workers had no TCP connection to reset")
    if lab.stock:
        return await check_all_fail(lab, prefill)
    line = await check_heals(lab, prefill)
    await lab.check_requests(prefill, f"requests through {prefill.name} again")
    return line


async def dead_route(lab: Lab) -> str:
    """Requests for a killed prefill keep coming while another one serves."""
    healthy, victim = lab.deployment.prefills
    await lab.learn_expected_tokens()
    for prefill in (healthy, victim):
        await lab.check_requests(prefill, f"requests through {prefill.name}")
    prefilled = [(p, await lab.prefill_params(victim, p)) for p in lab.expected]
    title = f"requests through {healthy.name}, nothing else"
    before = await measure(lab, healthy, title)
    with lab.steps.step(f"kill {victim.name} with SIGKILL"):
        victim.kill()
    stop = asyncio.Event()
    dead = asyncio.create_task(keep_routing_to_dead(lab, prefilled, stop))
    title = f"the same while {_DEAD_ROUTE_PER_S} a second name {victim.name}"
    after = await measure(lab, healthy, title)
    stop.set()
    return judge_dead_route(await dead, before, after)


SCENARIOS = {
    "replace": Scenario(replace, prefills=2),
    "idle": Scenario(idle, prefills=1),
    # Over shared memory and CMA there would be nothing for a reset to break.
    "flap": Scenario(
        flap, prefills=1, env={"UCX_TLS": "tcp,self"}, obstacle=why_no_resets
    ),
    "dead-route": Scenario(dead_route, prefills=2),
}


def release_line(seconds: float | None) -> str:
    """The last line of the scenarios that wait for a release."""
    if seconds is None:
        return f"never released within {STOCK_WATCH_S:.0f} s"
    return f"released in {seconds:.1f} s"


async def check_unpinned_requests(lab: Lab) -> None:
    """Leaves the choice of the prefill to the proxy, which knows one is gone."""
    with lab.steps.step("requests with one prefill gone, the proxy's choice"):
        for prompt in lab.expected:
            lab.check(await lab.ask(prompt))


def check_served_throughout(
    lab: Lab, survivor: VllmServer, answers: list[Answer]
) -> None:
    """Refuses traffic in which any request failed."""
    for answer in answers:
        lab.check(answer)
    if not answers:
        raise LabError(f"{survivor.name} answered no request")
    lab.steps.note(f"{survivor.name} answered {len(answers)} requests, 0 failed")


async def check_heals(lab: Lab, prefill: VllmServer) -> str:
    """Sends one request and, if it fails, its retry: one of them must succeed."""
    start = time.monotonic()
    with lab.steps.step("the next request, and its retry if it fails"):
        answer = await lab.ask(next(iter(lab.expected)), prefill)
        tries = 1
        if not answer.ok:
            lab.steps.note(f"the first failed: {answer.error}")
            await asyncio.sleep(_RETRY_PAUSE_S)
            answer = await lab.ask(next(iter(lab.expected)), prefill)
            tries = 2
        lab.check(answer)
    seconds = time.monotonic() - start
    return f"answered again in {seconds:.1f} s (request {tries} of 2)"


async def check_all_fail(lab: Lab, prefill: VllmServer) -> str:
    """Shows that the stock connector does not recover."""
    failed = 0
    with lab.steps.step(f"{_STOCK_FLAP_REQUESTS} requests"):
        for _ in range(_STOCK_FLAP_REQUESTS):
            answer = await lab.ask(next(iter(lab.expected)), prefill)
            failed += not answer.ok
            await asyncio.sleep(_RETRY_PAUSE_S)
    if failed < _STOCK_FLAP_REQUESTS:
        raise LabError(f"{failed} of {_STOCK_FLAP_REQUESTS} requests failed, not all")
    return f"never answered again: {failed} of {failed} requests failed"


async def measure(lab: Lab, prefill: VllmServer, title: str) -> list[Answer]:
    """Sends requests one after the other for a while; all must succeed."""
    answers: list[Answer] = []
    with lab.steps.step(title):
        end = time.monotonic() + _DEAD_ROUTE_S
        while time.monotonic() < end or len(answers) < _HEALTHY_REQUESTS:
            for prompt in lab.expected:
                answers.append(await lab.ask(prompt, prefill))
                lab.check(answers[-1])
                await asyncio.sleep(_HEALTHY_PAUSE_S)
    return answers


async def keep_routing_to_dead(
    lab: Lab, prefilled: list[tuple[str, dict[str, Any]]], stop: asyncio.Event
) -> list[Answer]:
    """Sends the decoder requests whose blocks a dead prefill holds, at a fixed rate."""
    start = time.monotonic()
    requests: list[asyncio.Task[Answer]] = []
    for prompt, params in itertools.cycle(prefilled):
        due = start + len(requests) / _DEAD_ROUTE_PER_S
        await asyncio.sleep(due - time.monotonic())
        if stop.is_set():
            break
        request = complete(lab.session, lab.decoder.url, prompt, kv_params=params)
        requests.append(asyncio.create_task(request))
    return await asyncio.gather(*requests)


def judge_dead_route(
    dead: list[Answer], before: list[Answer], after: list[Answer]
) -> str:
    """Refuses slow failures and a slow healthy prefill."""
    if any(answer.ok for answer in dead):
        raise LabError("a request to the dead prefill was answered")
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
        raise LabError(line)
    return line


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]
