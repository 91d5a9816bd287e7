# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The routes that list and release peers, as vLLM loads and guards them."""

import inspect

import pytest
from fastapi.testclient import TestClient

from tests.operations.servers import (
    KEY,
    DataParallelEngines,
    Engine,
    Rank,
    app_of,
    peer,
)
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient
from vllm_nixl_heartbeat.http import EXTENSION, PATH
from vllm_nixl_heartbeat.nixl_peers.admin import NixlPeerWorkerExtension

RELEASE = f"{PATH}/release"


async def client_of(engine: Engine | None) -> TestClient:
    return TestClient(await app_of(engine), headers={"Authorization": f"Bearer {KEY}"})


async def test_the_peers_of_every_rank_are_listed():
    client = await client_of(Engine(Rank(peer("p", "p:7000")), Rank()))
    first, second = client.get(PATH).json()["ranks"]
    assert first["peers"] == [peer("p", "p:7000")]
    assert second == {
        "enabled": True,
        "peers": [],
        "unread_requests": 0,
        "unread_lease_s": 0.0,
    }


@pytest.mark.parametrize("name", [{"engine_id": "p"}, {"address": "p:7000"}])
async def test_a_named_peer_is_released_on_every_rank(name: dict[str, str]):
    ranks = Rank(peer("p", "p:7000"), peer("q", "q:7000")), Rank(peer("p", "p:7000"))
    client = await client_of(Engine(*ranks))
    answers = client.post(RELEASE, json=name).json()["ranks"]
    assert [answer["result"] for answer in answers] == ["released"] * 2
    assert [p["engine_id"] for p in ranks[0].peers] == ["q"]
    first, second = client.post(RELEASE, json=name).json()["ranks"]
    assert first["known"] == [{"engine_id": "q", "address": "q:7000"}]
    assert (second["result"], second["known"]) == ("unknown", [])


async def test_all_data_parallel_engines_answer():
    busy = Rank(peer("p", "p:7000"))
    busy.deferred_for = 2
    engines = Engine(Rank(peer("p", "p:7000"))), Engine(busy)
    client = await client_of(DataParallelEngines(*engines))
    assert len(client.get(PATH).json()["ranks"]) == 2
    answers = client.post(RELEASE, json={"engine_id": "p"}).json()["ranks"]
    assert [answer["result"] for answer in answers] == ["released", "busy"]


def test_vllm_reaches_each_data_parallel_engine_by_the_call_that_we_use():
    parameters = inspect.signature(AsyncMPClient._call_utility_async).parameters
    assert list(parameters) == ["self", "method", "args", "engine"]
    assert issubclass(DPLBAsyncMPClient, AsyncMPClient)
    call = inspect.getsource(AsyncMPClient.collective_rpc_async)
    assert '"collective_rpc", method, timeout, args, kwargs' in call
    assert "self.core_engines" in inspect.getsource(DPLBAsyncMPClient)


async def test_the_routes_ask_for_the_api_key():
    client = await client_of(Engine(Rank(peer("p", "p:7000"))))
    client.headers.clear()
    assert client.get(PATH).status_code == 401
    assert client.post(RELEASE, json={"engine_id": "p"}).status_code == 401


@pytest.mark.parametrize(
    "body",
    [{}, {"engine_id": "p", "address": "p:1"}, {"engine": "p"}, {"address": 1}, []],
)
async def test_a_body_that_names_no_peer_is_refused(body: object):
    client = await client_of(Engine(Rank()))
    assert client.post(RELEASE, json=body).status_code == 422


class OwnExtension(NixlPeerWorkerExtension):
    """An operator's own."""


async def test_a_server_whose_workers_lack_the_extension_does_not_start():
    await app_of(Engine(extension=f"{__name__}.OwnExtension"))
    for extension in ("", "collections.OrderedDict"):
        with pytest.raises(
            ValueError, match=f"--worker-extension-cls is '{extension}'"
        ):
            await app_of(Engine(extension=extension))


async def test_a_server_without_an_engine_says_so():
    assert (await client_of(None)).get(PATH).status_code == 501


def test_the_extension_is_named_as_users_name_it():
    assert EXTENSION == "vllm_nixl_heartbeat.nixl_peers.admin.NixlPeerWorkerExtension"
