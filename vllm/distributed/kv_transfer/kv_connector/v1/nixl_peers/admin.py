# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Listing NIXL peers and releasing one by hand, over collective RPC and HTTP.

Off unless the operator starts vLLM with ``--worker-extension-cls`` naming
:class:`NixlPeerWorkerExtension`; for HTTP, ``VLLM_PLUGINS`` must name
``nixl_peer_control`` as well. The routes are under ``/v1``, where vLLM asks for
the server's API key if it has one.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    from starlette.datastructures import State

    from vllm.engine.protocol import EngineClient

PATH = "/v1/nixl/peers"
EXTENSION = f"{__name__}.NixlPeerWorkerExtension"


class NixlPeerWorkerExtension:
    """Methods of a vLLM worker for ``collective_rpc``, which runs them idle too.

    An own extension of the operator's may derive from this one.
    """

    def list_nixl_peers(self) -> list[dict[str, Any]]:
        """List the peers of this rank; see ``NixlConnectorWorker.list_peers``."""
        return [peer for worker in _nixl_workers() for peer in worker.list_peers()]

    def release_nixl_peer(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        """Release a peer on this rank; see ``NixlConnectorWorker.retire_peers``.

        Returns:
            ``result``: "released", "busy" (some are held by ``open_reads`` and go
            as soon as those end) or "unknown", and the ``engine_ids`` found.

        """
        found = [
            peer
            for worker in _nixl_workers()
            for peer in worker.retire_peers(engine_id, address)
        ]
        busy = [peer for peer in found if peer["result"] == "busy"]
        result: Literal["released", "busy", "unknown"] = "unknown"
        if found:
            result = "busy" if busy else "released"
        return {
            "result": result,
            "engine_ids": [peer["engine_id"] for peer in found],
            "open_reads": sum(peer["open_reads"] for peer in busy),
        }


def _nixl_workers() -> list[Any]:
    """Return our NIXL workers of this rank: one, or several in a MultiConnector."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    connectors: list[Any] = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    workers = []
    while connectors:
        connector = connectors.pop()
        connectors.extend(getattr(connector, "_connectors", ()))
        worker = getattr(connector, "connector_worker", None)
        if hasattr(worker, "retire_peers"):
            workers.append(worker)
    return workers


class PeerName(BaseModel):
    """Names a peer by its engine id or by its address."""

    model_config = ConfigDict(extra="forbid")

    engine_id: str | None = None
    address: str | None = None
    """Host and port of its side channel, "host:port"."""

    @model_validator(mode="after")
    def _is_one_name(self) -> "PeerName":
        if (self.engine_id is None) == (self.address is None):
            raise ValueError('name one of "engine_id" and "address"')
        return self


class NixlPeerControl:
    """Endpoint plugin: ``GET /v1/nixl/peers``, ``POST /v1/nixl/peers/release``."""

    name = "nixl_peer_control"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; both answer with one entry a rank."""
        router = APIRouter()

        async def call(request: Request, method: str, *args: Any) -> dict[str, Any]:
            engine = request.app.state.nixl_peer_control_engine
            if engine is None:
                raise HTTPException(501, "This server has no engine.")
            return {"ranks": await engine.collective_rpc(method, args=args)}

        @router.get(PATH)
        async def list_peers(request: Request) -> dict[str, Any]:
            return await call(request, "list_nixl_peers")

        @router.post(f"{PATH}/release")
        async def release(
            request: Request, peer: Annotated[PeerName, Body()]
        ) -> dict[str, Any]:
            args = (peer.engine_id, peer.address)
            return await call(request, "release_nixl_peer", *args)

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
            if not extension or not issubclass(
                resolve_obj_by_qualname(extension), NixlPeerWorkerExtension
            ):
                raise ValueError(
                    f"VLLM_PLUGINS names {self.name}, but --worker-extension-cls is "
                    f"{extension!r}: it must be {EXTENSION} or a class derived from it."
                )
        state.nixl_peer_control_engine = engine_client
