# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers listed and released by hand: on a rank, and over HTTP."""

from types import SimpleNamespace
from typing import Any

import pytest
from decoder import Decoder
from fastapi import FastAPI
from fastapi.testclient import TestClient
from nixl._bindings import nixlRemoteDisconnectError

import vllm.distributed.kv_transfer as kv_transfer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.admin import (
    EXTENSION,
    PATH,
    NixlPeerControl,
    NixlPeerWorkerExtension,
)
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware


@pytest.fixture
def rank(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> NixlPeerWorkerExtension:
    """A worker with the extension, whose connector is one of a MultiConnector's."""
    multi = SimpleNamespace(_connectors=[SimpleNamespace(), decoder.connector])
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: multi)
    return NixlPeerWorkerExtension()


def test_the_list_of_peers(decoder: Decoder, rank: NixlPeerWorkerExtension):
    decoder.connect("p", "a0", "a1", port=7000)
    decoder.request("r", "p")
    decoder.step(1.5)
    assert rank.list_nixl_peers() == [
        {
            "engine_id": "p",
            "address": "p:7000",
            "agents": ["a0", "a1"],
            "state": "connected",
            "since_proof_of_life_s": 1.5,
            "open_reads": 1,
            "last_error": None,
        }
    ]
    decoder.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
    decoder.step(2.2)
    (peer,) = rank.list_nixl_peers()
    assert peer["state"] == "unreachable"
    assert peer["last_error"] == "nixlRemoteDisconnectError from heartbeat"


@pytest.mark.parametrize("name", [{"engine_id": "p"}, {"address": "p:7000"}])
def test_a_release_by_hand(
    decoder: Decoder, rank: NixlPeerWorkerExtension, name: dict[str, str]
):
    decoder.connect("p", port=7000)
    decoder.connect("other", port=7001)
    assert rank.release_nixl_peer(**name) == {
        "result": "released",
        "engine_ids": ["p"],
        "open_reads": 0,
    }
    assert decoder.connected == {"other"} and decoder.is_clean("p")
    # Idempotent; and reversible.
    assert rank.release_nixl_peer(**name)["result"] == "unknown"
    decoder.read("r", "p")
    assert decoder.finished == ["r"]


def test_a_release_by_hand_waits_for_open_reads(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    decoder.connect("p")
    for req_id in ("r0", "r1"):
        decoder.request(req_id, "p")
    decoder.step()
    for _ in range(2):
        answer = rank.release_nixl_peer("p")
        assert (answer["result"], answer["open_reads"]) == ("busy", 2)
    # It takes no new reads, and a sign of life does not keep it.
    decoder.request("late", "p")
    decoder.step()
    decoder.step()
    assert decoder.failed == ["late"]
    decoder.worker._peers.heard("p", decoder.clock.now)
    assert decoder.connected == {"p"}
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.connected == set()
    assert decoder.finished == ["r0", "r1"]


def test_a_rank_without_our_connector_knows_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: False)
    rank = NixlPeerWorkerExtension()
    assert rank.list_nixl_peers() == []
    assert rank.release_nixl_peer("p")["result"] == "unknown"


# -- Over HTTP -----------------------------------------------------------------------


class Engine:
    """An engine of one rank."""

    def __init__(self, rank: NixlPeerWorkerExtension | None, extension: str):
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension)
        )
        self.rank = rank

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self.rank, method)(*args)]


async def serve(engine: Engine | None) -> TestClient:
    app = FastAPI()
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    plugin = NixlPeerControl()
    plugin.attach_router(app)
    await plugin.init_state(engine, app.state, None)  # type: ignore[arg-type]
    return TestClient(app, headers={"Authorization": "Bearer secret"})


async def test_routes(decoder: Decoder, rank: NixlPeerWorkerExtension):
    client = await serve(Engine(rank, EXTENSION))
    decoder.connect("p", port=7000)
    peers = client.get(PATH).json()
    assert [peer["engine_id"] for peer in peers["ranks"][0]] == ["p"]
    answer = client.post(f"{PATH}/release", json={"address": "p:7000"})
    assert answer.json()["ranks"][0]["result"] == "released"
    assert client.get(PATH).json() == {"ranks": [[]]}


async def test_routes_ask_for_the_key(rank: NixlPeerWorkerExtension):
    client = await serve(Engine(rank, EXTENSION))
    client.headers.clear()
    assert client.get(PATH).status_code == 401
    answer = client.post(f"{PATH}/release", json={"engine_id": "p"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "body",
    [{}, {"engine_id": "p", "address": "p:1"}, {"engine": "p"}, {"address": 1}, []],
)
async def test_a_bad_body_is_refused(rank: NixlPeerWorkerExtension, body: object):
    client = await serve(Engine(rank, EXTENSION))
    assert client.post(f"{PATH}/release", json=body).status_code == 422


class OwnExtension(NixlPeerWorkerExtension):
    """An operator's own."""


async def test_the_workers_must_have_the_extension(rank: NixlPeerWorkerExtension):
    await serve(Engine(rank, f"{__name__}.OwnExtension"))
    for extension in ("", "collections.OrderedDict"):
        with pytest.raises(
            ValueError, match=f"--worker-extension-cls is '{extension}'"
        ):
            await serve(Engine(rank, extension))


async def test_a_server_without_an_engine_says_so():
    assert (await serve(None)).get(PATH).status_code == 501
