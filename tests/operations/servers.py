# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A vLLM server of these tests: the real routes under the real API key check.

Only the engine behind them is a stand-in, whose ranks answer what a test says.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI

from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm_nixl_heartbeat.http import EXTENSION, NixlPeerAdmin

KEY = "secret"
BOUND_S = 10.0


def peer(engine_id: str, address: str, **values: Any) -> dict[str, Any]:
    """Return an entry of a rank's list."""
    return {
        "engine_id": engine_id,
        "address": address,
        "agents": [f"{engine_id}-agent"],
        "state": "connected",
        "since_proof_of_life_s": 1.5,
        "in_flight_reads": 0,
        "last_error": None,
    } | values


class Rank:
    """What one worker knows, behind the methods of the worker extension."""

    def __init__(self, *peers: dict[str, Any]):
        self.peers = list(peers)
        self.unread: list[int] = [0]
        """Unread requests in the answers to come; the last one stays."""
        self.enabled = True
        """Whether it has our connector and not vLLM's own."""
        self.deferred_for = 0
        """How often a release is still "busy" before the reads have ended."""

    def list_nixl_peers(self) -> dict[str, Any]:
        unread = self.unread.pop(0) if len(self.unread) > 1 else self.unread[0]
        return {
            "enabled": self.enabled,
            "peers": self.peers,
            "unread_requests": unread,
            "unread_lease_s": 20.0 if unread else 0.0,
        }

    def release_nixl_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        named = [p for p in self.peers if engine_id == p["engine_id"]]
        named += [p for p in self.peers if address == p["address"]]
        answer: dict[str, Any] = {
            "enabled": self.enabled,
            "result": "released",
            "engine_ids": [p["engine_id"] for p in named],
            "in_flight_reads": 0,
        }
        if not named:
            known = [{k: p[k] for k in ("engine_id", "address")} for p in self.peers]
            return answer | {"result": "unknown", "known": known}
        if self.deferred_for:
            self.deferred_for -= 1
            if not self.deferred_for:
                # The reads end, and the peer goes on its own.
                self.peers = [p for p in self.peers if p not in named]
            return answer | {"result": "busy", "in_flight_reads": 2}
        self.peers = [p for p in self.peers if p not in named]
        return answer


class Engine:
    """An engine client of one engine."""

    def __init__(self, *ranks: Rank, extension: str = EXTENSION):
        self.ranks = ranks
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension)
        )

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(rank, method)(*args) for rank in self.ranks]


class DataParallelEngines(Engine):
    """An engine client of several engines, as `vllm serve -dp` has it."""

    def __init__(self, *engines: Engine):
        super().__init__(*engines[0].ranks)
        self.core_engines = engines
        self.engine_core = self

    async def _call_utility_async(self, method: str, *args: Any, engine: Engine) -> Any:
        assert method == "collective_rpc"
        rpc_method, _timeout, rpc_args, _kwargs = args
        return await engine.collective_rpc(rpc_method, rpc_args)


async def app_of(engine: Engine | None) -> FastAPI:
    """Return a server's application, with the routes under its API key."""
    app = FastAPI()
    app.add_middleware(AuthenticationMiddleware, tokens=[KEY])
    plugin = NixlPeerAdmin()
    plugin.attach_router(app)
    await plugin.init_state(engine, app.state, None)  # type: ignore[arg-type]
    return app


@contextlib.contextmanager
def serving(
    app: Any, host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[str, int]]:
    """Serve an application on a port of its own; yield its base URL and the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        bound_port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=asyncio.run, args=(server.serve(sockets=[listener]),)
        )
        thread.start()
        try:
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{bound_port}", bound_port
        finally:
            server.should_exit = True
            thread.join(BOUND_S)


@contextlib.contextmanager
def serving_engine(
    engine: Engine, host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """Serve an engine's application; yield its base URL."""
    with serving(asyncio.run(app_of(engine)), host, port) as (url, _):
        yield url
