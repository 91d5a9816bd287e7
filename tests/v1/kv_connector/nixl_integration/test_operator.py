# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an operator sees of real servers, and does to them: metrics, list, release."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nixl_lab.client import complete, make_prompts, prefill_only
from nixl_lab.model import ensure_model
from nixl_lab.servers import Deployment, ServerOptions, VllmServer
from vllm_nixl_heartbeat.http import PATH

KEY = "secret"
INTERVAL = 1.0
PREFIX = "vllm:nixl_"
OPERATIONS = Path(__file__).parents[4] / "docs" / "operations"
# What counts peer events; how many heartbeats there are depends on the machine.
EVENTS = (
    "peer_heartbeats_failed_total",
    "peers_unreachable_total",
    "peers_suspected_total",
    "peers_released_total",
    "peers_reconnected_total",
    "peer_requests_refused_total",
    "peer_releases_deferred_total",
    "peer_release_seconds_count",
    "connected_peers",
    "suspect_peers",
    "deferred_peer_releases",
)


class Operator:
    """Someone with the key to one decoder, and its user."""

    def __init__(
        self, session: aiohttp.ClientSession, prefill: VllmServer, decoder: VllmServer
    ):
        self.session = session
        self.prefill = prefill
        self.decoder = decoder
        self.prompt, self.other_prompt = make_prompts(2)

    async def metrics(self) -> dict[str, float]:
        """Return the decoder's NIXL metrics, after a step that reports them."""
        assert (await complete(self.session, self.decoder.url, self.other_prompt)).ok
        async with self.session.get(f"{self.decoder.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return {
            sample.name.removeprefix(PREFIX): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }

    async def wait_for_events(self, expected: dict[str, float]) -> None:
        """Wait until the metrics of peer events are these."""
        await self.wait_until(self._events, dict.fromkeys(EVENTS, 0) | expected)

    async def _events(self) -> dict[str, float]:
        metrics = await self.metrics()
        return {name: metrics[name] for name in EVENTS}

    async def wait_until(self, read: Callable[[], Awaitable[Any]], wanted: Any) -> None:
        """Wait until something has a value."""
        deadline = time.monotonic() + 20
        while (value := await read()) != wanted:
            assert time.monotonic() < deadline, (
                f"{value}\nis not\n{wanted}\n{self.decoder.log_tail()}"
            )
            await asyncio.sleep(0.1)

    async def read(self) -> dict[str, Any]:
        """Have the decoder read from the prefill; return the transfer's parameters."""
        params = await prefill_only(self.session, self.prefill.url, self.prompt)
        answer = await complete(
            self.session, self.decoder.url, self.prompt, kv_params=params
        )
        assert answer.ok, answer.error + self.decoder.log_tail()
        return params

    async def peers(self) -> list[dict[str, Any]]:
        """List the decoder's peers."""
        async with self.session.get(f"{self.decoder.url}{PATH}") as response:
            assert response.status == 200, await response.text()
            (rank,) = (await response.json())["ranks"]
        return rank["peers"]

    async def release(self, **name: str) -> dict[str, Any]:
        """Release a peer of the decoder."""
        url = f"{self.decoder.url}{PATH}/release"
        async with self.session.post(url, json=name) as response:
            assert response.status == 200, await response.text()
            (rank,) = (await response.json())["ranks"]
        return rank


@pytest.mark.servers
@pytest.mark.timeout(900)
async def test_an_operator_sees_and_steers_the_release(tmp_path: Path):
    options = ServerOptions(
        model=ensure_model(),
        log_dir=tmp_path,
        interval=INTERVAL,
        env={"VLLM_API_KEY": KEY},
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        Deployment(options) as deployment,
        aiohttp.ClientSession(headers=headers) as session,
        aiohttp.ClientSession() as stranger,
    ):
        prefill = deployment.add("prefill", "prefill")
        decoder = deployment.add("decode", "decode")
        await deployment.start_all()
        operator = Operator(session, prefill, decoder)
        await operator.wait_for_events({})
        engine_id = (await operator.read())["remote_engine_id"]
        await operator.wait_for_events({"connected_peers": 1})
        heartbeats = (await operator.metrics())["peer_heartbeats_sent_total"]

        # Without the key, nothing; with it, the peers of an engine that idles.
        async with stranger.get(f"{decoder.url}{PATH}") as response:
            assert response.status == 401
        body = {"engine_id": engine_id}
        url = f"{decoder.url}{PATH}/release"
        async with stranger.post(url, json=body) as response:
            assert response.status == 401
        (peer,) = await operator.peers()
        assert peer["engine_id"] == engine_id
        assert peer["address"] == f"127.0.0.1:{prefill.side_channel_port}"
        assert peer["state"] == "connected" and peer["in_flight_reads"] == 0

        # Released by hand, twice; the next request connects again.
        released = await operator.release(address=peer["address"])
        assert released["result"] == "released"
        assert released["engine_ids"] == [engine_id]
        unknown = await operator.release(engine_id=engine_id)
        assert unknown["result"] == "unknown" and unknown["known"] == []
        assert await operator.peers() == []
        params = await operator.read()
        events = {
            "peers_released_total": 1,
            "peer_release_seconds_count": 1,
            "peers_reconnected_total": 1,
            "connected_peers": 1,
        }
        await operator.wait_for_events(events)

        # Killed while the decoder idles: the next step reports it.
        prefill.kill_now()
        await operator.wait_until(operator.peers, [])
        events |= {
            "peer_heartbeats_failed_total": 1,
            "peers_unreachable_total": 1,
            "peers_released_total": 2,
            "peer_release_seconds_count": 2,
            "connected_peers": 0,
        }
        await operator.wait_for_events(events)
        metrics = await operator.metrics()
        assert metrics["peer_heartbeats_sent_total"] >= heartbeats
        # A failed heartbeat is no failed transfer.
        assert metrics["num_failed_transfers_total"] == 0

        # Requests to the dead one: a failed handshake, then a refusal.
        for _ in range(2):
            answer = await complete(
                session, decoder.url, operator.prompt, kv_params=params
            )
            assert not answer.ok
        await operator.wait_for_events(events | {"peer_requests_refused_total": 1})
        # The stats logger's line comes every 10 s.
        line = "KV Transfer metrics: .*Peers unreachable=1"

        async def is_logged() -> bool:
            return bool(decoder.log_lines(line))

        await operator.wait_until(is_logged, True)

        # What the dashboard and the alerts ask for is what a real server has.
        async with session.get(f"{decoder.url}/metrics") as response:
            scraped = {
                sample.name
                for family in text_string_to_metric_families(await response.text())
                for sample in family.samples
            }
        asked = {
            name
            for path in OPERATIONS.iterdir()
            for name in re.findall(r"vllm:\w+", path.read_text())
        }
        assert asked and asked <= scraped, asked - scraped
