# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The instances of a drill: servers of this machine, or a deployment's, by command."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from nixl_lab.servers import Role, VllmServer, is_healthy

_POLL_S = 0.05
_HEALTH_POLL_S = 1.0
_DOWN_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 1800.0
_LOGS_PAUSE_S = 1.0
_LINE_LIMIT = 1 << 20


class InstanceError(RuntimeError):
    """An instance did not do what the drill asked of it."""


class Instance(Protocol):
    """What a drill needs of an instance."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Role: ...

    @property
    def url(self) -> str: ...

    async def kill(self) -> None:
        """Kills it without warning; returns when it is gone."""

    async def start(self) -> None:
        """Starts a replacement; returns when it is healthy."""

    async def alive(self) -> bool:
        """Whether its process still runs."""

    def last_words(self) -> str:
        """What is known about its end; empty if nothing is."""

    def lines(self) -> AsyncIterator[str]:
        """Its log, line by line as it is written, through all restarts."""


class LocalInstance:
    """A server that the drill runs itself."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.name = server.name
        self.role: Role = server.role
        self.url = server.url

    async def kill(self) -> None:
        """Kills the whole process group with SIGKILL."""
        self.server.kill()

    async def start(self) -> None:
        """Starts the server again, on the same ports."""
        self.server.start()
        await self.server.wait_ready()

    async def alive(self) -> bool:
        """Whether the server's first process runs."""
        return self.server.running

    def last_words(self) -> str:
        """The server's exit status and the errors in its log."""
        return self.server.last_words()

    async def lines(self) -> AsyncIterator[str]:
        """Each start's log file, one after the other."""
        for start in itertools.count(1):
            while self.server.starts < start:
                await asyncio.sleep(_POLL_S)
            with self.server.log_of(start).open(errors="replace") as log:
                rest = ""
                while True:
                    # Asked before reading: nothing follows once there is a new log.
                    over = self.server.starts > start
                    *lines, rest = (rest + log.read()).split("\n")
                    for line in lines:
                        yield line
                    if over:
                        break
                    await asyncio.sleep(_POLL_S)


@dataclass(frozen=True)
class Commands:
    """The shell commands of a user's deployment; they find in their environment:

    INSTANCE, ROLE (prefill or decode) and URL.

    Attributes:
        kill: Kills the instance.
        start: Starts its replacement and returns.
        logs: Keeps writing the lines that are added to its log.
        output: File that takes what `kill` and `start` print.
    """

    kill: str
    start: str
    logs: str
    output: Path


class CommandInstance:
    """An instance of a user's own deployment."""

    def __init__(self, name: str, role: Role, url: str, commands: Commands) -> None:
        self.name = name
        self.role: Role = role
        self.url = url
        self._commands = commands

    async def kill(self) -> None:
        """Runs the command and waits until nobody listens at the address."""
        await self._run("kill", self._commands.kill)
        deadline = time.monotonic() + _DOWN_TIMEOUT_S
        while await self.alive():
            if time.monotonic() > deadline:
                raise InstanceError(
                    f"{self.name} still listens at {self.url}, {_DOWN_TIMEOUT_S:.0f} s"
                    " after the kill command"
                )
            await asyncio.sleep(_POLL_S)

    async def start(self) -> None:
        """Runs the command and waits until the instance is healthy."""
        await self._run("start", self._commands.start)
        deadline = time.monotonic() + _START_TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while not await is_healthy(session, self.url):
                if time.monotonic() > deadline:
                    raise InstanceError(
                        f"{self.name} is not healthy at {self.url},"
                        f" {_START_TIMEOUT_S:.0f} s after the start command"
                    )
                await asyncio.sleep(_HEALTH_POLL_S)

    async def alive(self) -> bool:
        """Whether somebody listens at the address; a busy server counts."""
        timeout = aiohttp.ClientTimeout(sock_connect=3, sock_read=3)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.url}/health"),
            ):
                return True
        except aiohttp.SocketTimeoutError:
            return True
        except aiohttp.ClientError:
            return False

    def last_words(self) -> str:
        """Nothing: the deployment has its own logs."""
        return ""

    async def lines(self) -> AsyncIterator[str]:
        """What the logs command prints; begun again whenever it ends."""
        while True:
            async with _process(
                self._commands.logs,
                self._environment(),
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
            ) as process:
                assert process.stdout is not None
                async for line in process.stdout:
                    yield line.decode(errors="replace").rstrip("\n")
                await process.wait()
            await asyncio.sleep(_LOGS_PAUSE_S)

    async def _run(self, what: str, command: str) -> None:
        with self._commands.output.open("ab") as output:
            output.write(f"$ {command}  # {self.name}\n".encode())
            output.flush()
            async with _process(
                command, self._environment(), stdout=output, stderr=output
            ) as process:
                status = await process.wait()
        if status:
            raise InstanceError(
                f"the {what} command for {self.name} ended with {status}: {command}\n"
                f"its output is in {self._commands.output}"
            )

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "INSTANCE": self.name,
            "ROLE": self.role,
            "URL": self.url,
        }


@contextlib.asynccontextmanager
async def _process(
    command: str, env: dict[str, str], **arguments
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a shell command; what is left of it at the end is killed.

    Unless it ended by itself: what it started in the background then has to stay.
    """
    process = await asyncio.create_subprocess_shell(
        command,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        process_group=0,
        **arguments,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
