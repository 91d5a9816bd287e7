# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What scenarios, drill and soak share: traffic, faults, what is watched meanwhile."""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import aiohttp

from nixl_lab.client import (
    Answer,
    Tokens,
    complete,
    connected_engines,
    make_prompts,
    new_session,
    prefill_only,
    reference_tokens,
)
from nixl_lab.instances import Instance
from nixl_lab.progress import Steps
from nixl_lab.proxy import Backend, Proxy, serve
from nixl_lab.record import WRONG_TOKENS, Fault, Record, Request
from nixl_lab.servers import HOST, free_port

STOCK_WATCH_S = 20.0
_PROMPTS = 6
_PAUSE_S = 0.2
_POLL_S = 0.1
_ANSWERS_TIMEOUT_S = 90.0
_RATE_S = 5.0
_NO_LIST = (
    "{name} has no list of its peers, and there is no --logs to read instead: start"
    " decoders with VLLM_PLUGINS=nixl_heartbeat,nixl_peer_admin and --worker-extension"
    "-cls vllm_nixl_heartbeat.nixl_peers.admin.NixlPeerWorkerExtension"
)
# The stock connector has no list of peers. Its lines, and ours where the list is off.
_RELEASED = re.compile(
    r"NIXL peer released: ([\w-]+)|Released NIXL state for .* remote engine ([\w-]+)"
    r"|Evicted stale remote engine ([\w-]+)"
)
_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?(.*)")
# What a read from a dead prefill leaves, in the worker, the scheduler, the API server.
_EXPECTED_ERROR = re.compile(
    r"^(\s|$|Traceback |NIXL transfer failure: |Failing \d+ request|Request \S+ failed"
    r"|The above exception|During handling|\w*(\._bindings)?\.?nixl\w+Error|Runtime"
    r"Error: NIXL|Remote NIXL|OSError|zmq\.)"
)
_VARYING = re.compile(r"\b(?:cmpl-)?[0-9a-f]*\d[0-9a-f]*(?:-[0-9a-f]+)*\b")

I = TypeVar("I", bound=Instance)  # noqa: E741


class ExperimentError(RuntimeError):
    """Something differs from what the experiment needs or promises."""


class Experiment(Generic[I]):
    """Instances under traffic, and everything that is seen of them.

    Args:
        prefills: At least one. The first is never hit: it gives the reference.
        decoders: At least one.
        record: Takes what is seen.
        steps: What the person at the screen sees.
        stock: They run vLLM's own connector.
        router: URL of a router in front of them; the lab's own proxy if empty.
        push: Prefills write, so they hold the decoders' state.
    """

    def __init__(
        self,
        prefills: Sequence[I],
        decoders: Sequence[I],
        record: Record,
        steps: Steps,
        stock: bool = False,
        router: str = "",
        push: bool = False,
    ) -> None:
        self.prefills = list(prefills)
        self.decoders = list(decoders)
        self.record = record
        self.steps = steps
        self.stock = stock
        self.expected: dict[str, Tokens] = {}
        self.has_lists = False
        self._holders = self.prefills if push else self.decoders
        self._held = self.decoders if push else self.prefills
        self._router = router
        self._backends: dict[str, Backend] = {}
        self._engines: dict[str, str] = {}
        self._released: dict[tuple[str, str], float] = {}
        self._began = time.monotonic()

    @property
    def decoder(self) -> I:
        return self.decoders[0]

    @property
    def instances(self) -> list[I]:
        return self.prefills + self.decoders

    def now(self) -> float:
        """Seconds since the experiment began."""
        return time.monotonic() - self._began

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Learns the right answers, then watches all instances until the end.

        Raises:
            ExperimentError: an instance exited, whatever was under way then.
        """
        try:
            async with asyncio.TaskGroup() as group, new_session() as self.session:
                self._group = group
                self._background = [
                    group.create_task(self._read_log(holder))
                    for holder in self._holders
                ]
                await self._learn()
                async with self._routed() as self.url:
                    self._watch(self._watch_exits())
                    self.steps.status = self._status
                    yield
                for task in self._background:
                    task.cancel()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self.steps.status = str
            self.record.ended = self.now()

    # -- Requests ---------------------------------------------------------------------

    async def ask(self, prompt: str, prefill: I | None = None) -> Answer:
        """Sends one prompt through the router."""
        name = prefill.name if prefill else None
        return await self._noted(complete(self.session, self.url, prompt, prefill=name))

    async def decode(
        self, prompt: str, params: Mapping[str, Any], prefill: str = ""
    ) -> Answer:
        """Sends the first decoder a prompt whose blocks a prefill holds."""
        return await self._noted(
            complete(self.session, self.decoder.url, prompt, kv_params=params),
            (prefill, self.decoder.name),
        )

    async def prefill(self, prefill: I, prompt: str) -> dict[str, Any]:
        """Prefills a prompt without decoding it; returns where its blocks are."""
        return await prefill_only(self.session, prefill.url, prompt)

    def check(self, answer: Answer) -> None:
        """Refuses an answer that failed or has other tokens than expected."""
        way = f"{answer.prefill or '?'} -> {answer.decode or '?'}"
        if not answer.ok:
            raise ExperimentError(f"a request through {way} failed: {answer.error}")
        expected = self.expected[answer.prompt]
        if answer.tokens != expected:
            raise ExperimentError(
                f"wrong tokens through {way} for {answer.prompt[:20]!r}:\n"
                f"  expected {expected}\n  got      {answer.tokens}"
            )

    async def check_requests(self, prefill: I | None, title: str = "") -> None:
        """Sends every prompt, through one prefill or the router's choice."""
        title = title or f"requests through {prefill.name if prefill else 'any'}"
        with self.steps.step(title):
            for prompt in self.expected:
                self.check(await self.ask(prompt, prefill))

    @contextlib.asynccontextmanager
    async def traffic(self, prefill: I | None = None, clients: int = 1):
        """Keeps sending requests from several clients, each of which ends."""
        stop = asyncio.Event()

        async def client(number: int) -> None:
            prompts = itertools.cycle(self.expected)
            for prompt in itertools.islice(prompts, number, None):
                if stop.is_set():
                    break
                await self.ask(prompt, prefill)
                await asyncio.sleep(_PAUSE_S)

        tasks = [self._watch(client(n)) for n in range(clients)]
        yield
        stop.set()
        await asyncio.gather(*tasks)

    async def await_answers(self, pairs: Sequence[tuple[str, str]]) -> bool:
        """Waits until the traffic has gone through pairs of prefill and decoder."""
        if self._router:
            # Another router does not say where it sent a request.
            await asyncio.sleep(_RATE_S)
            return True
        since = self.now()
        title = "answers through " + ", ".join(f"{p} -> {d}" for p, d in pairs)
        with self.steps.step(title):
            return await self._wait(
                lambda: set(pairs)
                <= {
                    (r.prefill, r.decode)
                    for r in self.record.requests
                    if not r.error and r.end >= since
                },
                _ANSWERS_TIMEOUT_S,
            )

    # -- Faults -----------------------------------------------------------------------

    async def hit(
        self, kind: str, instance: I, strike: Callable[[], Awaitable[None]]
    ) -> Fault:
        """Ends an instance in some way, and has its release by all others watched."""
        engine = self._engines.get(instance.name, "")
        holders = self._holders if engine else []
        if self.has_lists:
            holders = [h for h in holders if engine in await self.connected(h)]
        with self.steps.step(f"{kind} {instance.name}"):
            fault = Fault(kind, [instance.name], self.now(), engine)
            fault.releases = dict.fromkeys(h.name for h in holders)
            self.record.faults.append(fault)
            await strike()
            fault.over = self.now()
        for holder in holders:
            self._watch(self._await_release(fault, holder))
        return fault

    async def kill(self, instance: I) -> Fault:
        """Kills an instance without warning."""
        return await self.hit("kill", instance, instance.kill)

    async def watch_release(self, fault: Fault) -> None:
        """Waits until all have released a dead instance, or should have."""
        limit = STOCK_WATCH_S if self.stock else self.record.release_limit
        who = "prefills" if self._holders is self.prefills else "decoders"
        with self.steps.step(f"watch the {who} for the release"):
            await self._wait(
                lambda: None not in fault.releases.values(),
                fault.at + limit - self.now(),
            )
        for name, seconds in fault.releases.items():
            said = "not released in time"
            if seconds is not None:
                said = f"released in {seconds:.2f} s"
            self.steps.note(f"{name}: {said}")

    async def replace(self, instance: I, fault: Fault) -> None:
        """Starts an instance again."""
        with self.steps.step(f"start a replacement of {instance.name}"):
            await instance.start()
            if instance.name in self._engines:
                self._engines[instance.name] = await self.engine_id(instance)
            self._backends[instance.name].url = instance.url
            fault.ready = self.now()

    def forget_engine(self, instance: I) -> None:
        """Has the next fault of a prefill not taken for a death that shows."""
        del self._engines[instance.name]

    async def connected(self, instance: I) -> set[str]:
        """The engines that an instance is connected to, by its own list."""
        return await connected_engines(self.session, instance.url)

    async def engine_id(self, instance: I) -> str:
        """The engine id that others know an instance by."""
        params = await self.prefill(instance, next(iter(self.expected)))
        try:
            return params["remote_engine_id"]
        except (LookupError, TypeError) as error:
            raise ExperimentError(
                f"{instance.name} names no remote_engine_id in its kv_transfer_params:"
                " is it a prefill with a NIXL connector?"
            ) from error

    # -- What is watched --------------------------------------------------------------

    async def _learn(self) -> None:
        first = self.prefills[0]
        with self.steps.step(f"{first.name} alone answers {_PROMPTS} prompts"):
            self.expected = await reference_tokens(
                self.session, first.url, make_prompts(_PROMPTS)
            )
        for instance in self._held:
            self._engines[instance.name] = await self.engine_id(instance)
        try:
            for holder in self._holders:
                await self.connected(holder)
            self.has_lists = True
        except aiohttp.ClientResponseError as error:
            if error.status != 404:
                raise
            if not holder.has_log:
                raise ExperimentError(_NO_LIST.format(name=holder.name)) from error

    @contextlib.asynccontextmanager
    async def _routed(self) -> AsyncIterator[str]:
        self._backends = {i.name: Backend(i.name, i.url) for i in self.instances}
        if self._router:
            yield self._router
            return
        proxy = Proxy(
            [self._backends[i.name] for i in self.prefills],
            [self._backends[i.name] for i in self.decoders],
        )
        async with serve(proxy, HOST, free_port()) as url:
            yield url

    async def _noted(
        self, request: Awaitable[Answer], way: tuple[str, str] = ("", "")
    ) -> Answer:
        start = self.now()
        answer = await request
        error = answer.error
        if not error and answer.tokens != self.expected[answer.prompt]:
            error = WRONG_TOKENS
        prefill, decode = (answer.prefill or way[0], answer.decode or way[1])
        self.record.requests.append(
            Request(start, answer.seconds, prefill, decode, error)
        )
        return answer

    async def _await_release(self, fault: Fault, holder: I) -> None:
        while True:
            if self._is_out(holder.name):
                # It took all its state along.
                fault.releases.pop(holder.name, None)
                return
            at = self._released.get((holder.name, fault.engine))
            if self.has_lists:
                # A busy engine answers late, and then says how it is by then.
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    gone = fault.engine not in await self.connected(holder)
                    at = self.now() if gone else None
            if at is not None:
                fault.releases[holder.name] = at - fault.at
                return
            await asyncio.sleep(_POLL_S)

    async def _read_log(self, holder: I) -> None:
        """Finds errors and, for connectors without a list of peers, releases."""
        async for line in holder.lines():
            if match := _RELEASED.search(line):
                engine = next(filter(None, match.groups()))
                self._released[holder.name, engine] = self.now()
            match = _ERROR.match(line)
            if match and not _EXPECTED_ERROR.match(match[1]):
                kind = _VARYING.sub("#", match[1].split(" | ")[0])[:120]
                self.record.log_errors.append(f"{holder.name}: {kind}")

    async def _watch_exits(self) -> None:
        """Notices an instance that is gone though nobody killed it."""
        while True:
            await asyncio.sleep(1.0)
            for instance in self.instances:
                if self._is_out(instance.name) or await instance.alive():
                    continue
                # It may have been killed in the meantime.
                if not self._is_out(instance.name):
                    self.record.exits.append(instance.name)
                    raise ExperimentError(
                        f"{instance.name} is gone; nobody killed it\n"
                        + instance.crash_summary()
                    )

    def _is_out(self, name: str) -> bool:
        return any(
            name in fault.instances and fault.ready is None
            for fault in self.record.faults
        )

    async def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits for a condition; False if it is not met in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S / 2)
        return True

    def _watch(self, work) -> asyncio.Task:
        """Runs something beside the rest, until the experiment ends at the latest."""
        task = self._group.create_task(work)
        self._background.append(task)
        return task

    def _status(self) -> str:
        requests = self.record.requests
        since = self.now() - _RATE_S
        rate = sum(r.end > since for r in requests[-1000:]) / _RATE_S
        return f"{rate:.1f} requests/s, {len(self.record.failures)} failed"
