# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Throughput: a real prefill/decode deployment on CPU, ours against stock.

Both deployments stay up and serve in turn: the one whose turn it is not is stopped
with SIGSTOP, so that it takes nothing of the few cores.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common import Limit, interval_of_median, summary
from nixl_lab.client import completion_body, make_prompts, new_session
from nixl_lab.model import ensure_model
from nixl_lab.proxy import Backend, Proxy, serve
from nixl_lab.servers import HOST, Deployment, ServerOptions, free_port

_ROUNDS = 10
_CLIENTS = 4
_REQUESTS = 80
_WARM_UP_REQUESTS = 8
_WARM_UP_TRIES = 10
_QUICK_ROUNDS, _QUICK_REQUESTS = 1, 8
_TOKENS = 32


@dataclass
class _Pair:
    """A prefill and a decode server behind a proxy, and a client of theirs."""

    deployment: Deployment
    session: aiohttp.ClientSession
    proxy_url: str


@dataclass
class _Run:
    """What one run has shown."""

    tokens_per_s: float
    ttft_s: float


def measure(quick: bool) -> dict[str, Any]:
    """Let both deployments serve the same requests, turn by turn."""
    return asyncio.run(_measure(quick))


async def _measure(quick: bool) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = {}
        for name in ("stock", "ours"):
            options = ServerOptions(
                model=ensure_model(),
                log_dir=folder / name,
                stock=name == "stock",
            )
            pairs[name] = await stack.enter_async_context(_running(options))
            await stack.enter_async_context(_stopped(pairs[name]))
        runs: dict[str, list[_Run]] = {name: [] for name in pairs}
        for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
            for name in sorted(pairs, reverse=bool(number % 2)):
                with _going_on(pairs[name]):
                    await _warm_up(pairs[name])
                    requests = _QUICK_REQUESTS if quick else _REQUESTS
                    runs[name].append(await _serve(pairs[name], requests))
    result: dict[str, Any] = {"requests": _REQUESTS, "clients": _CLIENTS}
    for field in ("tokens_per_s", "ttft_s"):
        values = {name: [getattr(run, field) for run in runs[name]] for name in runs}
        ratios = [o / s for o, s in zip(values["ours"], values["stock"], strict=True)]
        result[field] = {
            **{name: summary(values[name]) for name in values},
            "runs": values,
            "ratio": statistics.median(ratios),
            "ratio_95": interval_of_median(ratios),
        }
    return result


@contextlib.asynccontextmanager
async def _running(options: ServerOptions) -> AsyncIterator[_Pair]:
    async with Deployment(options) as deployment, new_session() as session:
        prefill = deployment.add("prefill", "prefill")
        decoder = deployment.add("decode", "decode")
        await deployment.start_all()
        proxy = Proxy(
            [Backend("prefill", prefill.url)], [Backend("decode", decoder.url)]
        )
        async with serve(proxy, HOST, free_port()) as url:
            yield _Pair(deployment, session, url)


def _signal(pair: _Pair, number: signal.Signals) -> None:
    for server in pair.deployment.servers.values():
        os.killpg(os.getpgid(server.workers()[0].pid), number)


@contextlib.asynccontextmanager
async def _stopped(pair: _Pair) -> AsyncIterator[None]:
    _signal(pair, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pair, signal.SIGCONT)


@contextlib.contextmanager
def _going_on(pair: _Pair) -> Iterator[None]:
    _signal(pair, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(pair, signal.SIGSTOP)


async def _warm_up(pair: _Pair) -> None:
    """Serve a few requests, once the proxy has its instances back.

    A server that goes on closes the connections that were idle meanwhile. If the
    proxy has just sent on one, it takes the server out until it is healthy again.
    """
    for _ in range(_WARM_UP_TRIES):
        try:
            await _serve(pair, _WARM_UP_REQUESTS)
        except aiohttp.ClientResponseError:
            await asyncio.sleep(1)
        else:
            return
    raise RuntimeError(f"{pair.proxy_url} does not answer after its servers went on")


async def _serve(pair: _Pair, count: int) -> _Run:
    """Have a few clients send requests, each its next when its last is answered."""
    prompts = iter(make_prompts(count))
    first_tokens: list[float] = []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for prompt in prompts:
            ttft, received = await stream(pair.session, pair.proxy_url, prompt)
            first_tokens.append(ttft)
            tokens += received

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    seconds = time.monotonic() - start
    return _Run(tokens / seconds, statistics.median(first_tokens))


async def stream(
    session: aiohttp.ClientSession, url: str, prompt: str
) -> tuple[float, int]:
    """Stream one completion; return the time to its first token and their number.

    Raises:
        RuntimeError: If it fails, or has not as many tokens as asked for.

    """
    body = completion_body(prompt, _TOKENS) | {"stream": True}
    ttft, tokens = 0.0, 0
    start = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if not data or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "choices" not in chunk:
                raise RuntimeError(f"the stream ended with {chunk}")
            if received := len(chunk["choices"][0].get("token_ids") or ()):
                ttft = ttft or time.monotonic() - start
                tokens += received
    if tokens != _TOKENS:
        raise RuntimeError(f"{tokens} tokens instead of {_TOKENS}")
    return ttft, tokens


def targets(data: dict[str, Any]) -> list[Limit]:
    """Return the targets: no slower than stock, within noise."""
    return [
        Limit(
            "tokens per second, stock over ours, lower end of the 95 % interval",
            1 / data["tokens_per_s"]["ratio_95"][1],
            1.0,
        ),
        Limit(
            "time to first token, ours over stock, lower end of the 95 % interval",
            data["ttft_s"]["ratio_95"][0],
            1.0,
        ),
    ]


guard = targets
