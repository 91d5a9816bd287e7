# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an experiment needs of an instance, and those of a deployment, by command."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from nixl_lab.servers import Role, is_healthy

_POLL_S = 0.05
_HEALTH_POLL_S = 1.0
_DOWN_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 1800.0
_LOGS_PAUSE_S = 1.0
_LINE_LIMIT = 1 << 20


class InstanceError(RuntimeError):
    """An instance did not do what was asked of it."""


class Instance(Protocol):
    """What an experiment needs of an instance."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Role: ...

    @property
    def url(self) -> str: ...

    @property
    def has_log(self) -> bool: ...

    async def kill(self) -> None:
        """Kills it without warning; returns when it is gone."""

    async def start(self) -> None:
        """Starts a replacement; returns when it is healthy."""

    async def alive(self) -> bool:
        """Whether its process still runs."""

    def crash_summary(self) -> str:
        """What is known about its end; empty if nothing is."""

    def lines(self) -> AsyncIterator[str]:
        """Its log, line by line as it is written, through all restarts."""


@dataclass(frozen=True)
class Commands:
    """The shell commands of a user's deployment; they find in their environment:

    INSTANCE, ROLE (prefill or decode) and URL.

    Attributes:
        kill: Kills the instance.
        start: Starts its replacement and returns. Where that has another address, it
            is the last line that the command prints.
        logs: Keeps writing the lines that are added to its log; may be empty.
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
        self.has_log = bool(commands.logs)
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
        last = await self._run("start", self._commands.start)
        if last.startswith(("http://", "https://")):
            self.url = last.rstrip("/")
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

    def crash_summary(self) -> str:
        """Nothing: the deployment has its own logs."""
        return ""

    async def lines(self) -> AsyncIterator[str]:
        """What the logs command prints; begun again whenever it ends."""
        while self._commands.logs:
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

    async def _run(self, what: str, command: str) -> str:
        """Runs a command; returns the last line that it printed."""
        with self._commands.output.open("ab+") as output:
            output.write(f"$ {command}  # {self.name}\n".encode())
            output.flush()
            begin = output.tell()
            async with _process(
                command, self._environment(), stdout=output, stderr=output
            ) as process:
                status = await process.wait()
            output.seek(begin)
            lines = output.read().decode(errors="replace").split("\n")
        if status:
            raise InstanceError(
                f"the {what} command for {self.name} ended with {status}: {command}\n"
                f"its output is in {self._commands.output}"
            )
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

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
