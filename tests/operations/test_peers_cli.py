# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command `nixl-peers` against servers on loopback addresses."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import vllm.distributed.kv_transfer as kv_transfer
from tests.operations.servers import (
    BOUND_S,
    KEY,
    Engine,
    Rank,
    app_of,
    peer,
    serving,
    serving_engine,
)
from vllm_nixl_heartbeat import http, peers_cli
from vllm_nixl_heartbeat.nixl_peers.admin import NixlPeerWorkerExtension


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(peers_cli, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(peers_cli, "_LONGEST_PAUSE", 0.001)


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json; return its exit status and its first report."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = peers_cli.main([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)["servers"][0]

    return run


def unused_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_the_stand_in_answers_in_the_shape_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: False)
    real, stand_in = NixlPeerWorkerExtension(), Rank()
    stand_in.enabled = False
    assert stand_in.list_nixl_peers() == real.list_nixl_peers()
    assert stand_in.release_nixl_peers("p") == real.release_nixl_peers("p")


def test_peers_are_listed_as_a_table(capsys: pytest.CaptureFixture[str]):
    rank = Rank(
        peer("p", "10.0.0.7:5600", in_flight_reads=3),
        peer("q", "fd00::7:5600", state="suspect", last_error="gone"),
    )
    rank.unread = [4]
    with serving_engine(Engine(rank, Rank())) as url:
        assert peers_cli.main(["list", url]) == 0
    head, first, second, unread = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["SERVER", "RANK", "ENGINE", "ADDRESS", "STATE"]
    assert first.split() == [
        *(url, "0", "p", "10.0.0.7:5600", "connected", "1.5", "3", "-")
    ]
    assert second.split()[2:] == ["q", "fd00::7:5600", "suspect", "1.5", "0", "gone"]
    assert "4 requests" in unread and "20.0 s" in unread


def test_the_list_as_json_is_what_the_server_says(run: Run):
    with serving_engine(Engine(Rank(peer("p", "p:1")))) as url:
        status, report = run("list", url)
    assert (status, report["url"], report["ok"]) == (0, url, True)
    assert report["ranks"][0]["peers"] == [peer("p", "p:1")]


class Together(Engine):
    """An engine that answers only while another one is being asked as well."""

    def __init__(self, barrier: threading.Barrier):
        super().__init__(Rank(peer("p", "p:1")))
        self.barrier = barrier

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.to_thread(self.barrier.wait, BOUND_S)
        return await super().collective_rpc(method, args)


def test_several_servers_are_told_at_once():
    barrier = threading.Barrier(2)
    engines = Together(barrier), Together(barrier)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving_engine(engine)) for engine in engines]
        assert peers_cli.main(["release", "--engine-id", "p", *urls]) == 0
    assert not engines[0].ranks[0].peers and not engines[1].ranks[0].peers


def test_several_peers_are_released_by_one_command():
    rank = Rank(peer("p", "p:1"), peer("q", "q:1"), peer("r", "r:1"))
    with serving_engine(Engine(rank)) as url:
        names = ["--address", "p:1", "--address", "q:1"]
        assert peers_cli.main(["release", *names, url]) == 0
    assert [p["engine_id"] for p in rank.peers] == ["r"]


def test_a_busy_peer_is_waited_for(run: Run):
    rank = Rank(peer("p", "p:1"))
    rank.deferred_for = 3
    with serving_engine(Engine(rank)) as url:
        status, report = run("release", "--engine-id", "p", url)
    # The peer went on its own, so that the last answer was "unknown".
    assert (status, report["result"]) == (0, "released")
    assert report["ranks"][0]["result"] == "unknown"


def test_a_peer_that_one_rank_still_reads_from_is_busy(run: Run):
    ranks = Rank(peer("p", "p:1")), Rank(peer("p", "p:1"))
    ranks[1].deferred_for = 100
    with serving_engine(Engine(*ranks)) as url:
        status, report = run("release", "--engine-id", "p", "--wait", "0", url)
    assert (status, report["result"], report["ok"]) == (1, "busy", False)


def test_an_unknown_peer_is_no_failure_and_the_known_ones_are_shown(
    capsys: pytest.CaptureFixture[str],
):
    with serving_engine(Engine(Rank(peer("p", "10.0.0.7:5600")))) as url:
        assert peers_cli.main(["release", "--address", "192.0.2.1:5600", url]) == 0
    _, row, known = capsys.readouterr().out.splitlines()
    assert row.split() == [url, "192.0.2.1:5600", "unknown", "0"]
    assert known == f"{url} knows p at 10.0.0.7:5600"


def test_a_server_that_comes_up_later_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    rank = Rank(peer("p", "p:1"))
    app = asyncio.run(app_of(Engine(rank)))
    url = unused_url()
    with contextlib.ExitStack() as stack:
        starts = iter([lambda: serving(app, port=int(url.rpartition(":")[2]))])

        def between_two_tries(low: float, high: float) -> float:
            for start in starts:
                stack.enter_context(start())
            return 1.0

        monkeypatch.setattr(peers_cli.random, "uniform", between_two_tries)
        status, report = run("release", "--engine-id", "p", url)
    assert (status, report["result"], rank.peers) == (0, "released", [])


def answering(*statuses: int) -> tuple[Any, list[str]]:
    """Return an application that answers with these statuses, and what it was asked."""
    left, asked = list(statuses), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        status = left.pop(0) if len(left) > 1 else left[0]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"ranks": []}'})

    return app, asked


def test_a_server_that_is_ill_in_passing_is_asked_again(run: Run):
    app, asked = answering(503, 500, 200)
    with serving(app) as (url, _):
        assert run("list", url)[0] == 0
    assert asked == ["/v1/nixl/peers"] * 3


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "VLLM_API_KEY"), (404, "nixl_peer_admin"), (422, "422")]
)
def test_what_will_not_pass_is_not_tried_again(run: Run, status: int, hint: str):
    app, asked = answering(status)
    with serving(app) as (url, _):
        exit_status, report = run("list", url)
    assert exit_status == 1 and hint in report["error"]
    assert len(asked) == 1


def test_a_server_that_cannot_be_reached_does_not_keep_the_others(
    capsys: pytest.CaptureFixture[str],
):
    rank, dead = Rank(peer("p", "p:1")), unused_url()
    with serving_engine(Engine(rank)) as url:
        arguments = ["release", "--engine-id", "p", "--wait", "0", dead, url]
        assert peers_cli.main(arguments) == 1
    assert rank.peers == []
    captured = capsys.readouterr()
    assert f"{dead}: ConnectError" in captured.err
    assert "released" in captured.out


def test_what_is_no_vllm_server_is_said_to_be_none(run: Run):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    with serving(app) as (url, _):
        status, report = run("list", url)
    assert status == 1 and "no answer of a vLLM server" in report["error"]


def test_the_api_key_comes_from_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_API_KEY", "another")
    with serving_engine(Engine(Rank())) as url:
        status, report = run("list", url)
    assert status == 1 and "401" in report["error"]


def test_an_ipv6_server_is_asked(run: Run):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    rank = Rank(peer("p", "fd00::7:5600"))
    with serving_engine(Engine(rank), "::1") as url:
        assert url.startswith("http://[::1]:")
        # Without a scheme as well, and the peer's address as people write it.
        bare = url.removeprefix("http://")
        status, report = run("release", "--address", "[fd00::7]:5600", bare)
    assert (status, report["url"], rank.peers) == (0, url, [])


def test_every_address_of_a_host_name_is_asked(monkeypatch: pytest.MonkeyPatch):
    ranks = Rank(peer("p", "p:1")), Rank(peer("p", "p:1"))
    resolve = socket.getaddrinfo
    failures = [socket.gaierror(socket.EAI_AGAIN, "try again")]

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "vllm-decode-all":
            return resolve(host, port, *args, **kwargs)
        if failures:
            raise failures.pop()
        found = [resolve(f"127.0.0.{n}", port, *args, **kwargs) for n in (1, 2, 2)]
        return [entry for entries in found for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with serving_engine(Engine(ranks[0])) as url:
        port = int(url.rpartition(":")[2])
        with serving_engine(Engine(ranks[1]), "127.0.0.2", port):
            name = f"http://vllm-decode-all:{port}"
            arguments = ["release", "--engine-id", "p", "--all-addresses", name]
            assert peers_cli.main(arguments) == 0
    assert ranks[0].peers == [] and ranks[1].peers == []


def test_a_name_that_does_not_resolve_is_a_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    status, report = run("list", "--all-addresses", "--wait", "0.01", "http://none:1")
    assert (status, report["error"]) == (1, "none: no such name")


def test_a_drain_waits_until_everything_has_been_read(run: Run):
    first, second = Rank(), Rank()
    first.unread, second.unread = [3, 1, 0], [3, 2, 2, 0]
    with serving_engine(Engine(first, second)) as url:
        status, report = run("drain", url)
    assert (status, report["unread_requests"]) == (0, 0)
    assert second.unread == [0]


def test_a_drain_says_what_is_left_when_its_time_is_up(
    capsys: pytest.CaptureFixture[str],
):
    rank = Rank()
    rank.unread = [3]
    with serving_engine(Engine(rank)) as url:
        assert peers_cli.main(["drain", "--wait", "0", url]) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == [url, "3", "20.0"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list"],
        ["list", "ftp://decode:8000"],
        ["list", "http://"],
        ["list", "--wait", "-1", "http://decode"],
        ["list", "--wait", "soon", "http://decode"],
        ["release", "http://decode"],
        ["release", "--engine-id", "p", "--address", "p:1", "http://decode"],
        ["release", "--address", "p", "http://decode"],
        ["release", "--address", "a:b:c:1", "http://decode"],
        ["drain", "http://one", "http://two"],
    ],
)
def test_wrong_usage_has_a_status_of_its_own(arguments: list[str]):
    with pytest.raises(SystemExit) as stopped:
        peers_cli.main(arguments)
    assert stopped.value.code == 2


def test_the_command_needs_little_of_the_image():
    assert http.PATH == peers_cli.PATH
    script = (
        "import sys, vllm_nixl_heartbeat.peers_cli;"
        "print([m for m in ('vllm', 'torch', 'fastapi', 'pydantic', 'nixl')"
        " if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


@pytest.mark.parametrize(
    "command", [["list"], ["release", "--engine-id", "p"], ["drain"]]
)
def test_a_server_with_the_stock_connector_is_no_success(run: Run, command: list[str]):
    """It may hold the peer, and has nothing to release it with."""
    rank = Rank()
    rank.enabled = False
    with serving_engine(Engine(rank)) as url:
        status, report = run(*command, url)
    assert status == 1
    assert "peer release is off on this server" in str(report)
