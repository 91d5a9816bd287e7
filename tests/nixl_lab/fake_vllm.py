# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server that the lab takes for vLLM; run as `fake_vllm.py PORT [FLAW]`.

As a decoder it releases a prefill once that no longer listens. The flaw, if any, is
one of "keeps" (it never releases), "wrong" (its tokens), "logs" (errors nobody
expects) and "stock" (no list of peers, but a line in its log).
"""

import asyncio
import os
import sys
from typing import Any

from aiohttp import web

POLL_S = 0.05
TOKENS = [1, 2, 3]


class FakeVllm:
    """Prefill and decoder in one: what it is depends on the request."""

    def __init__(self, port: int, flaw: str = "") -> None:
        self.port = port
        self.flaw = flaw
        self.engine = f"engine-{os.getpid()}"
        self.peers: dict[str, int] = {}

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.0"})

    async def completions(self, request: web.Request) -> web.Response:
        params: dict[str, Any] = (await request.json()).get("kv_transfer_params") or {}
        answer: dict[str, Any] = {"choices": [{"token_ids": TOKENS}]}
        if params.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "remote_engine_id": self.engine,
                "remote_port": self.port,
            }
        elif params:
            self.peers.setdefault(params["remote_engine_id"], params["remote_port"])
            if self.flaw == "wrong":
                answer["choices"][0]["token_ids"] = TOKENS[::-1]
        return web.json_response(answer)

    async def list_peers(self, request: web.Request) -> web.Response:
        peers = [{"engine_id": engine} for engine in self.peers]
        return web.json_response({"ranks": [{"peers": peers}]})

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for engine, port in list(self.peers.items()):
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                except OSError:
                    if self.flaw == "keeps":
                        continue
                    del self.peers[engine]
                    if self.flaw == "logs":
                        say("ERROR 11-30 08:00:00 [core.py:7] CUDA error 700")
                    if self.flaw == "stock":
                        say(f"Released NIXL state for old remote engine {engine}")

    async def serve(self) -> None:
        app = web.Application(middlewares=[ask_for_key])
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_post("/v1/completions", self.completions)
        if self.flaw != "stock":
            app.router.add_get("/v1/nixl/peers", self.list_peers)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        say("INFO 11-30 08:00:00 serving")
        await self.watch()


@web.middleware
async def ask_for_key(request: web.Request, handler: Any) -> web.StreamResponse:
    """Guards what vLLM guards, if there is a key."""
    key = os.environ.get("VLLM_API_KEY")
    given = request.headers.get("Authorization")
    if key and request.path.startswith("/v1") and given != f"Bearer {key}":
        raise web.HTTPUnauthorized
    response: web.StreamResponse = await handler(request)
    return response


def say(line: str) -> None:
    print(f"(Worker pid={os.getpid()}) {line}", flush=True)


if __name__ == "__main__":
    asyncio.run(FakeVllm(int(sys.argv[1]), *sys.argv[2:]).serve())
