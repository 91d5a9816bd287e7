# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small prefill/decode proxy: round robin over the instances that answer.

vLLM's example proxy keeps sending to an instance that is gone. This one takes an
instance out when a connection to it fails and back in when it is healthy again.
Decode instances take turns for each prefill instance, so that every pair is used.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from nixl_lab.client import (
    DECODE_HEADER,
    PREFILL_HEADER,
    REQUEST_ID_HEADER,
    kv_params_of,
    prefill_body,
)
from nixl_lab.servers import is_healthy

# No limit on a whole answer, which may be long, but on a silence in it.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=120)
# Shorter than a vLLM server's 5 s: it must not close a connection that is about to
# be used again.
_KEEPALIVE_S = 2.0
# For what is still under way, perhaps to an instance that never answers.
_SHUTDOWN_S = 1.0
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BACKENDS = web.AppKey("backends", list)
_SESSION = web.AppKey("session", aiohttp.ClientSession)


@dataclass
class Backend:
    """One instance behind the proxy; `up` is what the proxy believes of it."""

    name: str
    url: str
    up: bool = True


class NoBackendError(Exception):
    """No instance is left that could take the request."""


@dataclass
class Pool:
    """Instances of one role, taken in turn."""

    role: str
    backends: list[Backend]
    _next: int = field(default=0, init=False)

    def candidates(self, pinned: str | None = None) -> Iterator[Backend]:
        """The instances to try for one request, best first.

        Args:
            pinned: Name of the one instance to use, up or not.
        """
        if pinned is not None:
            yield from (b for b in self.backends if b.name == pinned)
            return
        start = self._next
        self._next = (start + 1) % len(self.backends)
        for backend in self.backends[start:] + self.backends[:start]:
            if backend.up:
                yield backend


class Proxy:
    """The aiohttp application.

    A request may name the instances to use in the headers that a response names
    them in: `PREFILL_HEADER` and `DECODE_HEADER`.
    """

    def __init__(
        self,
        prefills: Iterable[Backend],
        decoders: Iterable[Backend],
        health_interval: float = 0.5,
    ) -> None:
        self.prefills = Pool("prefill", list(prefills))
        backends = list(decoders)
        self.decoders = {
            b.name: Pool("decode", backends) for b in self.prefills.backends
        }
        self._backends = self.prefills.backends + backends
        self._health_interval = health_interval

    def application(self) -> web.Application:
        """The application, to be served by aiohttp's runner or test server."""
        app = web.Application()
        app[_BACKENDS] = self._backends
        app.cleanup_ctx.append(self._background)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=_TIMEOUT
        ) as session:
            app[_SESSION] = session
            watch = asyncio.create_task(self._watch(session, app[_BACKENDS]))
            yield
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(
        self, session: aiohttp.ClientSession, backends: list[Backend]
    ) -> None:
        while True:
            await asyncio.sleep(self._health_interval)
            down = [b for b in backends if not b.up]
            answers = await asyncio.gather(*(is_healthy(session, b.url) for b in down))
            for backend, healthy in zip(down, answers):
                backend.up = healthy

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({b.name: b.up for b in request.app[_BACKENDS]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        named: dict[str, str] = {}
        request_id = request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
        try:
            first = await self._send(
                request,
                self.prefills,
                PREFILL_HEADER,
                prefill_body(body),
                named,
                request_id,
            )
            async with first:
                if first.status != 200:
                    return await _pass_on(request, first, named)
                params = kv_params_of(await first.json())
            second = await self._send(
                request,
                self.decoders[named[PREFILL_HEADER]],
                DECODE_HEADER,
                {**body, "kv_transfer_params": params},
                named,
                request_id,
            )
            async with second:
                return await _pass_on(request, second, named)
        except NoBackendError as error:
            return _failure(503, str(error), named)
        except aiohttp.ClientError as error:
            return _failure(502, f"an instance broke off: {error!r}", named)

    async def _send(
        self,
        request: web.Request,
        pool: Pool,
        header: str,
        body: dict[str, Any],
        named: dict[str, str],
        request_id: str,
    ) -> aiohttp.ClientResponse:
        """Posts `body` to the first instance of `pool` that takes it.

        In push mode a prefill finds a decoder's blocks by the request's id.
        """
        headers = {REQUEST_ID_HEADER: request_id}
        if key := request.headers.get("Authorization"):
            headers["Authorization"] = key
        for backend in pool.candidates(request.headers.get(header)):
            named[header] = backend.name
            try:
                return await request.app[_SESSION].post(
                    f"{backend.url}/v1/completions",
                    json=body,
                    headers=headers,
                )
            except aiohttp.ClientConnectionError as error:
                backend.up = False
                if not isinstance(error, _NOT_CONNECTED) and pool.role == "decode":
                    # It may have read the blocks, and their prefill then gives them
                    # to other requests: another decoder would read wrong data.
                    raise
        raise NoBackendError(f"no {pool.role} instance took the request")


def _failure(status: int, message: str, named: dict[str, str]) -> web.Response:
    answer = {"error": {"message": message, "code": status}}
    return web.json_response(answer, status=status, headers=named)


async def _pass_on(
    request: web.Request, source: aiohttp.ClientResponse, named: dict[str, str]
) -> web.StreamResponse:
    """Streams an instance's answer to the client as it arrives."""
    answer = web.StreamResponse(status=source.status, headers=named)
    answer.content_type = source.content_type
    try:
        await answer.prepare(request)
        async for chunk in source.content.iter_any():
            await answer.write(chunk)
        await answer.write_eof()
    except (aiohttp.ClientError, ConnectionError):
        # One of the two sides is gone. If it is the instance, only a broken
        # connection can still tell the client: the status is out already.
        if request.transport is not None:
            request.transport.abort()
    return answer


@contextlib.asynccontextmanager
async def serve(proxy: Proxy, host: str, port: int) -> AsyncIterator[str]:
    """Serves the proxy inside this process; yields its URL."""
    runner = web.AppRunner(
        proxy.application(), access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
