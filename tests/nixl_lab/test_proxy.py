# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's proxy, with instances that only answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from nixl_lab.client import (
    DECODE_HEADER,
    PREFILL_HEADER,
    completion_body,
    prefill_body,
)
from nixl_lab.proxy import Backend, Pool, Proxy

HEALTH_INTERVAL = 0.02


@dataclass
class FakeInstance:
    """A vLLM server in so far as the proxy sees it."""

    name: str
    status: int = 200
    hangs_up: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    server: TestServer = field(init=False)

    async def start(self, port: int | None = None) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        self.server = TestServer(app, port=port)
        await self.server.start_server()

    @property
    def backend(self) -> Backend:
        return Backend(self.name, str(self.server.make_url("")).rstrip("/"))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _completions(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self.hangs_up:
            assert request.transport is not None
            request.transport.abort()
        answer = {"by": self.name, "kv_transfer_params": {"held_by": self.name}}
        return web.json_response(answer, status=self.status)


@dataclass
class Setup:
    prefills: list[FakeInstance]
    decoders: list[FakeInstance]
    client: TestClient

    async def ask(self, **headers: str) -> tuple[int, str, str]:
        async with self.client.post(
            "/v1/completions", json=completion_body("hello"), headers=headers
        ) as answer:
            await answer.read()
            used = answer.headers
            return answer.status, used[PREFILL_HEADER], used.get(DECODE_HEADER, "")

    async def up(self) -> dict[str, bool]:
        async with self.client.get("/health") as answer:
            return await answer.json()


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[Setup]:
    prefills = [FakeInstance("p1"), FakeInstance("p2")]
    decoders = [FakeInstance("d1"), FakeInstance("d2")]
    for instance in prefills + decoders:
        await instance.start()
    proxy = Proxy(
        [i.backend for i in prefills], [i.backend for i in decoders], HEALTH_INTERVAL
    )
    async with TestClient(TestServer(proxy.application())) as client:
        yield Setup(prefills, decoders, client)
    for instance in prefills + decoders:
        await instance.server.close()


def test_pool_takes_turns_and_leaves_out_what_is_down() -> None:
    one, two, three = (Backend(name, "") for name in "abc")
    pool = Pool("prefill", [one, two, three])
    assert [next(pool.candidates()).name for _ in range(4)] == ["a", "b", "c", "a"]
    two.up = False
    assert [b.name for b in pool.candidates()] == ["c", "a"]
    assert [b.name for b in pool.candidates(pinned="b")] == ["b"]
    assert list(pool.candidates(pinned="z")) == []


async def test_proxy_prefills_then_decodes() -> None:
    async with behind_proxy() as setup:
        assert await setup.ask() == (200, "p1", "d1")
        assert await setup.ask() == (200, "p2", "d1")
        # Another decoder than the last time that p1 was used.
        assert await setup.ask() == (200, "p1", "d2")
        prefill, decode = setup.prefills[0].bodies[0], setup.decoders[0].bodies[0]
        assert prefill["max_tokens"] == 1
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert decode["max_tokens"] == completion_body("hello")["max_tokens"]
        assert decode["kv_transfer_params"] == {"held_by": "p1"}


async def test_proxy_lets_the_client_choose() -> None:
    async with behind_proxy() as setup:
        pinned = {PREFILL_HEADER: "p2", DECODE_HEADER: "d1"}
        for _ in range(3):
            assert await setup.ask(**pinned) == (200, "p2", "d1")


async def test_proxy_takes_a_dead_instance_out_and_back_in() -> None:
    async with behind_proxy() as setup:
        dead = setup.prefills[0]
        port = dead.server.port
        await dead.server.close()
        assert [(await setup.ask())[:2] for _ in range(4)] == [(200, "p2")] * 4
        assert (await setup.up())["p1"] is False

        await dead.start(port)
        async with asyncio.timeout(5):
            while not (await setup.up())["p1"]:
                await asyncio.sleep(HEALTH_INTERVAL)
        assert {(await setup.ask())[1] for _ in range(2)} == {"p1", "p2"}


async def test_proxy_answers_503_when_nothing_is_left() -> None:
    async with behind_proxy() as setup:
        for instance in setup.decoders:
            await instance.server.close()
        status, prefill, _ = await setup.ask()
        assert (status, prefill) == (503, "p1")


async def test_proxy_asks_no_other_decoder_once_one_may_have_read() -> None:
    async with behind_proxy() as setup:
        setup.decoders[0].hangs_up = True
        status, _, decode = await setup.ask()
        assert (status, decode) == (502, "d1")
        assert setup.decoders[1].bodies == []
        assert await setup.ask() == (200, "p2", "d2")


async def test_proxy_passes_an_instance_s_own_error_on() -> None:
    async with behind_proxy() as setup:
        setup.decoders[0].status = 500
        assert await setup.ask() == (500, "p1", "d1")
        assert (await setup.up())["d1"] is True


def test_prefill_body_is_not_streamed() -> None:
    body = {**completion_body("x"), "stream": True, "stream_options": {}}
    assert not {"stream", "stream_options"} & prefill_body(body).keys()
