# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A running deployment with its proxy, and the steps that the scenarios share."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from nixl_lab.client import (
    Answer,
    Tokens,
    complete,
    make_prompts,
    prefill_only,
    reference_tokens,
)
from nixl_lab.drill_rules import release_limit
from nixl_lab.progress import Steps
from nixl_lab.proxy import Backend, Proxy, serve
from nixl_lab.servers import (
    HOST,
    Deployment,
    ServerOptions,
    VllmServer,
    free_port,
)

STOCK_WATCH_S = 20.0
_PROMPTS = 6
_TRAFFIC_PAUSE_S = 0.2
_RELEVANT_LINES = "NIXL|WARNING|ERROR|Error"
_SHOWN_LINES = 30
# Ours, and the two of vLLM's own clean-up and eviction.
RELEASE_LINES = (
    "NIXL peer released: {engine}",
    "Released NIXL state for .* remote engine {engine}",
    "Evicted stale remote engine {engine}",
)


class LabError(RuntimeError):
    """Something differs from what the scenario promises."""


@dataclass
class Lab:
    """Everything a scenario works with.

    Attributes:
        deployment: The servers.
        proxy_url: Where the proxy listens.
        session: For requests.
        steps: What the person at the screen sees.
        interval: Seconds between heartbeats to one peer.
        expected: The right tokens of each prompt.
    """

    deployment: Deployment
    proxy_url: str
    session: aiohttp.ClientSession
    steps: Steps
    interval: float
    expected: dict[str, Tokens] = field(default_factory=dict)

    @property
    def stock(self) -> bool:
        return self.deployment.options.stock

    @property
    def decoder(self) -> VllmServer:
        return self.deployment.decoders[0]

    @property
    def release_limit(self) -> float:
        """Seconds that a decoder may take to release a dead prefill."""
        return release_limit(self.interval)

    async def learn_expected_tokens(self) -> None:
        """Has one prefill instance alone complete all prompts."""
        prefill = self.deployment.prefills[0]
        with self.steps.step(f"{prefill.name} alone answers {_PROMPTS} prompts"):
            self.expected = await reference_tokens(
                self.session, prefill.url, make_prompts(_PROMPTS)
            )

    async def check_requests(self, prefill: VllmServer, title: str) -> None:
        """Sends every prompt through one prefill instance and the decoder."""
        with self.steps.step(title):
            for prompt in self.expected:
                self.check(await self.ask(prompt, prefill))

    async def ask(self, prompt: str, prefill: VllmServer | None = None) -> Answer:
        """Sends one prompt through the proxy."""
        name = prefill.name if prefill else None
        return await complete(self.session, self.proxy_url, prompt, prefill=name)

    def check(self, answer: Answer) -> None:
        """Refuses an answer that failed or has other tokens than expected."""
        way = f"{answer.prefill or '?'} -> {answer.decode or '?'}"
        if not answer.ok:
            raise LabError(f"a request through {way} failed: {answer.error}")
        expected = self.expected[answer.prompt]
        if answer.tokens != expected:
            raise LabError(
                f"wrong tokens through {way} for {answer.prompt[:20]!r}:\n"
                f"  expected {expected}\n  got      {answer.tokens}"
            )

    async def prefill_params(self, prefill: VllmServer, prompt: str) -> dict[str, Any]:
        """Prefills a prompt without decoding it; returns the transfer's parameters."""
        return await prefill_only(self.session, prefill.url, prompt)

    async def engine_id(self, prefill: VllmServer) -> str:
        """The engine id that the decoder knows a prefill instance by."""
        params = await self.prefill_params(prefill, next(iter(self.expected)))
        return params["remote_engine_id"]

    async def kill_and_watch(self, prefill: VllmServer) -> float | None:
        """Kills a prefill instance and waits until the decoder has released it.

        Returns:
            Seconds from the kill to the release; None if it was never released,
            which is right for the stock connector and an error for ours.
        """
        engine = await self.engine_id(prefill)
        offset = self.decoder.log_size()
        with self.steps.step(f"kill {prefill.name} with SIGKILL"):
            killed = time.monotonic()
            prefill.kill()
        timeout = STOCK_WATCH_S if self.stock else self.release_limit + 10
        with self.steps.step(f"watch {self.decoder.name} for the release"):
            pattern = "|".join(RELEASE_LINES).format(engine=engine)
            line = await self.decoder.wait_for_log(pattern, offset, timeout)
        seconds = time.monotonic() - killed
        if line is None:
            if self.stock:
                self.steps.note(f"not released for {STOCK_WATCH_S:.0f} s")
                return None
            raise LabError(f"{engine} was not released within {timeout:.0f} s")
        self.steps.note(line.split("] ", 1)[-1])
        if self.stock:
            raise LabError(f"the stock connector released {engine}")
        if seconds > self.release_limit:
            raise LabError(
                f"released after {seconds:.1f} s, allowed: {self.release_limit:.1f} s"
            )
        return seconds

    async def replace(self, prefill: VllmServer) -> None:
        """Starts a killed instance again, on the same ports, and has it serve."""
        with self.steps.step(f"start a replacement of {prefill.name}, same port"):
            prefill.start()
            await prefill.wait_ready()
        await self.check_requests(prefill, f"requests through the new {prefill.name}")

    @contextlib.asynccontextmanager
    async def traffic(self, prefill: VllmServer) -> AsyncIterator[list[Answer]]:
        """Keeps sending requests through one prefill instance; yields the answers."""
        answers: list[Answer] = []
        stop = asyncio.Event()

        async def send() -> None:
            for prompt in itertools.cycle(self.expected):
                if stop.is_set():
                    break
                answers.append(await self.ask(prompt, prefill))
                await asyncio.sleep(_TRAFFIC_PAUSE_S)

        task = asyncio.create_task(send())
        try:
            yield answers
        except BaseException:
            task.cancel()
            raise
        stop.set()
        await task


@contextlib.asynccontextmanager
async def running_lab(
    options: ServerOptions, prefills: int, interval: float, steps: Steps
) -> AsyncIterator[Lab]:
    """Starts servers and proxy, and leaves nothing of them behind."""
    async with Deployment(options) as deployment:
        for number in range(1, prefills + 1):
            deployment.add(f"prefill-{number}", "prefill")
        deployment.add("decode-1", "decode")
        try:
            with steps.step(f"start {', '.join(deployment.servers)}"):
                await deployment.start_all()
            proxy = Proxy(
                [Backend(s.name, s.url) for s in deployment.prefills],
                [Backend(s.name, s.url) for s in deployment.decoders],
            )
            async with (
                serve(proxy, HOST, free_port()) as url,
                aiohttp.ClientSession() as session,
            ):
                yield Lab(deployment, url, session, steps, interval)
        except Exception:
            for server in deployment.servers.values():
                steps.note(relevant_log(server))
            raise


def relevant_log(server: VllmServer) -> str:
    """What a person wants to see of a server's log when a scenario failed."""
    if server.starts == 0:
        return f"--- {server.name} was never started"
    lines = server.log_lines(_RELEVANT_LINES)[-_SHOWN_LINES:]
    return "\n".join([f"--- {server.log_path}", *lines])
