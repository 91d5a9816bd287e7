# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The drill itself: traffic, kills, replacements, and everything written down."""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from nixl_lab.client import (
    Answer,
    Tokens,
    complete,
    make_prompts,
    prefill_only,
    reference_tokens,
)
from nixl_lab.drill_instances import Instance
from nixl_lab.drill_rules import (
    WRONG_TOKENS,
    ErrorReader,
    Exit,
    LogError,
    Outage,
    Record,
    Release,
    Request,
)
from nixl_lab.lab import RELEASE_LINES
from nixl_lab.progress import Steps
from nixl_lab.proxy import Backend, Proxy, serve
from nixl_lab.servers import HOST, free_port

_CLIENTS = 3
_PROMPTS = 6
_PAUSE_S = 0.2
_STEADY_S = 5.0
_ANSWERS_TIMEOUT_S = 90.0
_DECODER_RESTART_AFTER = 3
_ALIVE_POLL_S = 1.0
_POLL_S = 0.05
_RATE_S = 5.0
_RELEASED = re.compile("|".join(RELEASE_LINES).format(engine=r"([\w-]+)"))


class DrillError(RuntimeError):
    """The drill cannot go on; the message says why.

    Attributes:
        evidence: What an instance left behind that is gone; may be empty.
    """

    def __init__(self, message: str, evidence: str = "") -> None:
        super().__init__(message)
        self.evidence = evidence


class Drill:
    """A drill on instances that are up.

    Args:
        instances: At least two prefills and two decoders. The last of each role is
            the one that is killed.
        record: Takes what is seen.
        steps: What the person at the screen sees.
    """

    def __init__(
        self, instances: Sequence[Instance], record: Record, steps: Steps
    ) -> None:
        self._instances = {i.name: i for i in instances}
        self._record = record
        self._steps = steps
        self._began = time.monotonic()
        self._expected: dict[str, Tokens] = {}
        self._phase = ""
        steps.status = self._status

    async def run(self) -> None:
        """Carries the whole drill out.

        Raises:
            DrillError: an instance exited, or there was no traffic to disturb.
        """
        record = self._record
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._begin(stack)
                for cycle in range(1, record.cycles + 1):
                    self._phase = f"cycle {cycle} of {record.cycles}, "
                    await self._replace_prefill(cycle)
                    if cycle == min(_DECODER_RESTART_AFTER, record.cycles):
                        await self._restart_decoder()
                self._phase = ""
                with self._steps.step("a last stretch of traffic"):
                    await self._unless_exited(asyncio.sleep(_STEADY_S))
        finally:
            self._steps.status = str
            record.ended = self._now()

    async def _begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Starts watching, learns the reference and has every pair serve."""
        record = self._record
        session = await stack.enter_async_context(aiohttp.ClientSession())
        self._session = session
        for name in record.decoders:
            await stack.enter_async_context(
                _in_background(self._read_log(self._instances[name]))
            )
        reference = self._instances[record.prefills[0]]
        prompts = make_prompts(_PROMPTS)
        with self._steps.step(f"{reference.name} alone answers {_PROMPTS} prompts"):
            self._expected = await reference_tokens(session, reference.url, prompts)
        proxy = Proxy(
            [self._backend(name) for name in record.prefills],
            [self._backend(name) for name in record.decoders],
        )
        url = await stack.enter_async_context(serve(proxy, HOST, free_port()))
        self._exited = asyncio.get_running_loop().create_future()
        await stack.enter_async_context(_in_background(self._watch_exits()))
        await stack.enter_async_context(self._traffic(url))
        pairs = list(itertools.product(record.prefills, record.decoders))
        with self._steps.step("traffic through every pair"):
            if not await self._wait(lambda: self._served(pairs), _ANSWERS_TIMEOUT_S):
                raise DrillError(
                    f"not every pair answered within {_ANSWERS_TIMEOUT_S:.0f} s;"
                    f" failed so far: {dict(record.causes()) or 'none'}"
                )

    async def _replace_prefill(self, cycle: int) -> None:
        record = self._record
        victim = self._instances[record.victim]
        with self._steps.step("traffic, nothing else"):
            await self._unless_exited(asyncio.sleep(_STEADY_S))
        engine = await self._engine_id(victim)
        outage = Outage(victim.name, cycle, engine, self._now())
        await self._kill(victim, outage)
        with self._steps.step("watch the decoders for the release"):
            await self._wait(
                lambda: all(record.release_seconds(outage, d) for d in record.decoders),
                outage.killed + record.release_limit - self._now(),
            )
        for decoder in record.decoders:
            seconds = record.release_seconds(outage, decoder)
            said = f"released in {seconds:.2f} s" if seconds else "not released in time"
            self._steps.note(f"{decoder}: {said}")
        await self._start(victim, outage)
        await self._await_answers([(victim.name, d) for d in record.decoders])

    async def _restart_decoder(self) -> None:
        decoder = self._instances[self._record.decoders[-1]]
        outage = Outage(decoder.name, 0, "", self._now())
        await self._kill(decoder, outage)
        await self._start(decoder, outage)
        await self._await_answers([(p, decoder.name) for p in self._record.prefills])

    async def _engine_id(self, prefill: Instance) -> str:
        """The engine id that decoders know a prefill by."""
        prompt = next(iter(self._expected))
        try:
            params = await prefill_only(self._session, prefill.url, prompt)
            return params["remote_engine_id"]
        except (LookupError, TypeError) as error:
            raise DrillError(
                f"{prefill.name} names no remote_engine_id in its kv_transfer_params:"
                " is it a prefill with a NIXL connector?"
            ) from error

    async def _kill(self, instance: Instance, outage: Outage) -> None:
        self._record.outages.append(outage)
        with self._steps.step(f"kill {instance.name}"):
            await instance.kill()
            outage.down = self._now()

    async def _start(self, instance: Instance, outage: Outage) -> None:
        with self._steps.step(f"start a replacement of {instance.name}"):
            await self._unless_exited(instance.start())
            outage.ready = self._now()

    async def _await_answers(self, pairs: list[tuple[str, str]]) -> None:
        """Waits until pairs have served, or the rules find that they did not."""
        since = self._now()
        title = "answers through " + " and ".join(f"{p} -> {d}" for p, d in pairs)
        with self._steps.step(title):
            await self._wait(lambda: self._served(pairs, since), _ANSWERS_TIMEOUT_S)

    def _served(self, pairs: list[tuple[str, str]], since: float = 0.0) -> bool:
        seen = {
            (r.prefill, r.decode)
            for r in self._record.requests
            if not r.error and r.end >= since
        }
        return seen.issuperset(pairs)

    async def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits for a condition; False if it is not met in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                return False
            await self._unless_exited(asyncio.sleep(_POLL_S))
        return True

    async def _unless_exited(self, work) -> None:
        """Does some work, given up when an instance exits."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (task, self._exited), return_when=asyncio.FIRST_COMPLETED
            )
            if self._exited.done():
                name = self._exited.result()
                raise DrillError(
                    f"{name} is gone; nobody killed it",
                    self._instances[name].last_words(),
                )
            task.result()
        finally:
            await _cancel(task)

    @contextlib.asynccontextmanager
    async def _traffic(self, url: str) -> AsyncIterator[None]:
        """Sends requests through the proxy, without end, from several clients."""
        stop = asyncio.Event()

        async def client(number: int) -> None:
            prompts = itertools.cycle(self._expected)
            for prompt in itertools.islice(prompts, number, None):
                if stop.is_set():
                    break
                start = self._now()
                self._note(start, await complete(self._session, url, prompt))
                await asyncio.sleep(_PAUSE_S)

        clients = [asyncio.create_task(client(n)) for n in range(_CLIENTS)]
        try:
            yield
            stop.set()
            await asyncio.gather(*clients)
        finally:
            for task in clients:
                await _cancel(task)

    def _note(self, start: float, answer: Answer) -> None:
        error = answer.error
        if not error and answer.tokens != self._expected[answer.prompt]:
            error = WRONG_TOKENS
        self._record.requests.append(
            Request(start, answer.seconds, answer.prefill, answer.decode, error)
        )

    async def _read_log(self, decoder: Instance) -> None:
        """Writes down the releases and the errors in a decoder's log."""
        reader = ErrorReader()
        async for line in decoder.lines():
            if match := _RELEASED.search(line):
                engine = next(filter(None, match.groups()))
                release = Release(decoder.name, engine, self._now())
                self._record.releases.append(release)
            if kind := reader.feed(line):
                self._record.errors.append(LogError(decoder.name, kind, self._now()))

    async def _watch_exits(self) -> None:
        """Notices an instance that is gone though the drill did not kill it."""
        while True:
            await asyncio.sleep(_ALIVE_POLL_S)
            for instance in self._instances.values():
                if self._is_out(instance.name) or await instance.alive():
                    continue
                # The drill may have killed it in the meantime.
                if not self._is_out(instance.name):
                    self._record.exits.append(Exit(instance.name, self._now()))
                    self._exited.set_result(instance.name)
                    return

    def _is_out(self, name: str) -> bool:
        return any(o.instance == name and o.ready is None for o in self._record.outages)

    def _backend(self, name: str) -> Backend:
        return Backend(name, self._instances[name].url)

    def _status(self) -> str:
        requests = self._record.requests
        since = self._now() - _RATE_S
        rate = sum(r.end > since for r in requests[-1000:]) / _RATE_S
        failed = len(self._record.failures())
        return f"{self._phase}{rate:.1f} requests/s, {failed} failed"

    def _now(self) -> float:
        return time.monotonic() - self._began


@contextlib.asynccontextmanager
async def _in_background(work) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await _cancel(task)


async def _cancel(task: asyncio.Future) -> None:
    """Cancels a task and waits for its end; its own failure is raised."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
