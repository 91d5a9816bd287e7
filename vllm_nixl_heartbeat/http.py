# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""HTTP routes that list NIXL peers and release them: an endpoint plugin of vLLM.

Off unless ``VLLM_PLUGINS`` names ``nixl_peer_admin`` and ``--worker-extension-cls``
names the worker extension. The routes are under ``/v1``, where vLLM asks for the
server's API key if it has one.
"""

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, model_validator

from .nixl_peers.admin import NixlPeerWorkerExtension

if TYPE_CHECKING:
    from starlette.datastructures import State

    from vllm.engine.protocol import EngineClient

PATH = "/v1/nixl/peers"
EXTENSION = f"{NixlPeerWorkerExtension.__module__}.{NixlPeerWorkerExtension.__name__}"


class PeerName(BaseModel):
    """Names peers by their engine id or by their address."""

    model_config = ConfigDict(extra="forbid")

    engine_id: str | None = None
    address: str | None = None
    """Host and port of the side channel, as the decoder knows it: "host:port"."""

    @model_validator(mode="after")
    def _is_one_name(self) -> "PeerName":
        if (self.engine_id is None) == (self.address is None):
            raise ValueError('name one of "engine_id" and "address"')
        return self


class NixlPeerAdmin:
    """Adds ``GET /v1/nixl/peers`` and ``POST /v1/nixl/peers/release``."""

    name = "nixl_peer_admin"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; both answer with one entry per rank."""
        router = APIRouter()

        async def call(request: Request, method: str, *args: Any) -> dict[str, Any]:
            engine = request.app.state.nixl_peer_admin_engine
            if engine is None:
                raise HTTPException(501, "This server has no engine.")
            return {"ranks": await _call_all_ranks(engine, method, args)}

        @router.get(PATH)
        async def list_peers(request: Request) -> dict[str, Any]:
            return await call(request, "list_nixl_peers")

        @router.post(f"{PATH}/release")
        async def release(
            request: Request, peer: Annotated[PeerName, Body()]
        ) -> dict[str, Any]:
            args = (peer.engine_id, peer.address)
            return await call(request, "release_nixl_peers", *args)

        app.include_router(router)

    async def init_state(
        self, engine_client: "EngineClient | None", state: "State", args: Namespace
    ) -> None:
        """Keep the engine for the routes.

        Raises:
            ValueError: If the workers lack the methods that the routes call.

        """
        from vllm.utils.import_utils import resolve_obj_by_qualname

        if engine_client is not None:
            parallel_config = engine_client.vllm_config.parallel_config
            extension = parallel_config.worker_extension_cls
            if not extension or not hasattr(
                resolve_obj_by_qualname(extension), "release_nixl_peers"
            ):
                raise ValueError(
                    f"VLLM_PLUGINS names {self.name}, but --worker-extension-cls is "
                    f"{extension!r}: it must be {EXTENSION} or a class derived from it."
                )
        state.nixl_peer_admin_engine = engine_client


async def _call_all_ranks(
    engine_client: Any, method: str, args: tuple[Any, ...]
) -> list[Any]:
    """Call a worker method on every rank of every data-parallel engine.

    vLLM's ``collective_rpc`` reaches all engines behind this server, and returns only
    what the ranks of the first one answer: a peer that another engine still reads from
    would be reported as released.
    """
    client: Any = getattr(engine_client, "engine_core", None)
    engines = getattr(client, "core_engines", ())
    if len(engines) < 2:
        return await engine_client.collective_rpc(method, args=args)
    answers = await asyncio.gather(
        *[
            client._call_utility_async(
                "collective_rpc", method, None, args, None, engine=engine
            )
            for engine in engines
        ]
    )
    return [rank for ranks in answers for rank in ranks]
