# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prefills' preStop hook, as kubelet runs it, against servers of this machine."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operations.servers import KEY, Engine, Rank, peer, serving_engine

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "docs" / "kubernetes" / "release-on-stop.sh"

# A host name with two addresses, as a headless Service of two pods has it.
COMMAND = f"""#!{sys.executable}
import socket, sys
sys.path.insert(0, {str(ROOT)!r})
resolve = socket.getaddrinfo
def getaddrinfo(host, port, *args, **kwargs):
    hosts = ["127.0.0.1", "127.0.0.2"] if host == "decoders" else [host]
    return [entry for h in hosts for entry in resolve(h, port, *args, **kwargs)]
socket.getaddrinfo = getaddrinfo
from vllm_nixl_heartbeat.peers_cli import main
sys.exit(main())
"""

Hook = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def hook(tmp_path: Path, log: Path) -> Hook:
    """Run the hook with only `nixl-peers` and the system's programs in the PATH."""
    command = tmp_path / "nixl-peers"
    command.write_text(COMMAND)
    command.chmod(0o755)

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        defaults = {
            "PATH": f"{tmp_path}:{os.defpath}",
            "LOG": str(log),
            "POD_IP": "10.0.0.9",
            "VLLM_API_KEY": KEY,
            "ROUTER_S": "0",
        }
        return subprocess.run(
            [str(HOOK)],
            env=defaults | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


class Recorded(Rank):
    """A rank that writes down what it is asked, in one list for all servers."""

    def __init__(self, calls: list[str], *peers: dict[str, Any]):
        super().__init__(*peers)
        self.calls = calls

    def list_nixl_peers(self) -> dict[str, Any]:
        answer = super().list_nixl_peers()
        self.calls.append(f"unread {answer['unread_requests']}")
        return answer

    def release_nixl_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        self.calls.append(f"release {address}")
        return super().release_nixl_peers(engine_id, address)


@contextlib.contextmanager
def deployment(prefill: Rank, decoders: tuple[Rank, Rank]) -> Iterator[dict[str, str]]:
    """Serve a prefill and two decoders on one port; yield the hook's environment."""
    first, second = decoders
    with (
        serving_engine(Engine(prefill)) as prefill_url,
        serving_engine(Engine(first)) as url,
    ):
        port = int(url.rpartition(":")[2])
        with serving_engine(Engine(second), "127.0.0.2", port):
            yield {
                "SERVER_URL": prefill_url,
                "DECODERS_URL": f"http://decoders:{port}",
            }


def test_every_decoder_releases_every_rank_of_the_prefill(hook: Hook, log: Path):
    def decoder() -> Rank:
        return Rank(
            peer("p0", "10.0.0.9:5600"),
            peer("p1", "10.0.0.9:5601"),
            peer("other", "10.0.0.8:5600"),
        )

    decoders = decoder(), decoder()
    decoders[1].deferred_for = 2
    with deployment(Rank(), decoders) as environment:
        ran = hook(**environment, DATA_PARALLEL_SIZE="2")
    assert ran.returncode == 0, ran.stderr
    for rank in decoders:
        assert [p["engine_id"] for p in rank.peers] == ["other"]
    released = [line for line in log.read_text().splitlines() if "released" in line]
    assert len(released) == 4
    assert all(line.startswith("release-on-stop: http://127.") for line in released)


def test_the_first_rank_of_a_pod_may_be_another_than_zero(hook: Hook):
    decoders = tuple(
        Rank(peer("p3", "10.0.0.9:5603"), peer("p4", "10.0.0.9:5604")) for _ in "ab"
    )
    with deployment(Rank(), decoders) as environment:
        ran = hook(**environment, DATA_PARALLEL_RANK="3")
    assert ran.returncode == 0, ran.stderr
    for rank in decoders:
        assert [p["engine_id"] for p in rank.peers] == ["p4"]


def test_decoders_are_told_only_when_all_blocks_have_been_read(hook: Hook):
    calls: list[str] = []
    prefill = Recorded(calls)
    prefill.unread = [2, 1, 0]
    decoders = tuple(Recorded(calls, peer("p", "10.0.0.9:5600")) for _ in "ab")
    with deployment(prefill, decoders) as environment:
        assert hook(**environment).returncode == 0
    assert calls[:3] == ["unread 2", "unread 1", "unread 0"]
    assert calls[3:] == ["release 10.0.0.9:5600"] * 2


def test_blocks_that_nobody_reads_do_not_keep_the_decoders_from_being_told(hook: Hook):
    prefill = Rank()
    prefill.unread = [2]
    decoders = tuple(Rank(peer("p", "10.0.0.9:5600")) for _ in "ab")
    with deployment(prefill, decoders) as environment:
        assert hook(**environment, DRAIN_WITHIN_S="1").returncode == 0
    assert not decoders[0].peers and not decoders[1].peers


def test_the_wait_for_the_blocks_can_be_left_out(hook: Hook):
    calls: list[str] = []
    decoders = tuple(Rank(peer("p", "10.0.0.9:5600")) for _ in "ab")
    with deployment(Recorded(calls), decoders) as environment:
        assert hook(**environment, DRAIN_WITHIN_S="0").returncode == 0
    assert calls == []
    assert not decoders[0].peers


def test_an_ipv6_prefill_is_named_as_decoders_know_it(hook: Hook):
    decoders = tuple(Rank(peer("p", "fd00::9:5600")) for _ in "ab")
    with deployment(Rank(), decoders) as environment:
        ran = hook(**environment, VLLM_NIXL_SIDE_CHANNEL_HOST="fd00::9")
    assert ran.returncode == 0, ran.stderr
    assert not decoders[0].peers and not decoders[1].peers


def test_a_decoder_that_cannot_be_told_does_not_keep_the_other(hook: Hook, log: Path):
    rank = Rank(peer("p", "10.0.0.9:5600"))
    with (
        serving_engine(Engine(Rank())) as prefill_url,
        serving_engine(Engine(rank)) as url,
    ):
        port = url.rpartition(":")[2]
        ran = hook(
            SERVER_URL=prefill_url,
            DECODERS_URL=f"http://decoders:{port}",
            STOP_WITHIN_S="3",
        )
    assert ran.returncode == 1
    assert rank.peers == []
    assert f"http://127.0.0.2:{port}: ConnectError" in log.read_text()


def test_a_log_that_cannot_be_written_changes_nothing(hook: Hook):
    decoders = tuple(Rank(peer("p", "10.0.0.9:5600")) for _ in "ab")
    with deployment(Rank(), decoders) as environment:
        assert hook(**environment, LOG="/nowhere/log").returncode == 0
    assert not decoders[0].peers and not decoders[1].peers


def test_a_hook_without_the_decoders_service_fails_at_once(hook: Hook):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        ran = hook(SERVER_URL=url, DRAIN_WITHIN_S="0")
    assert ran.returncode != 0 and "DECODERS_URL" in ran.stderr
