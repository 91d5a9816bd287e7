# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Faults of the network between a decoder and its prefills, and peers that hang.

Real workers and real NIXL agents over TCP. The decoder is in one network namespace,
in this process; prefills are in others.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.fork_server import ForkServer
from tests.support.netns import (
    NamespaceThread,
    VethPair,
    in_namespace,
    why_no_namespaces,
)
from tests.support.peers import Decoder, Prefill
from tests.support.waiting import SLACK_S
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import manager, policy

INTERVAL = 0.5
RELEASED_WITHIN = 2 * INTERVAL + SLACK_S

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


@dataclass
class Site:
    """A place for prefills at the far end of a veth."""

    veth: VethPair
    fork_server: ForkServer


@pytest.fixture(scope="module")
def namespace() -> Iterator[NamespaceThread]:
    """The decoder's namespace; tests that use it run there, by `in_namespace`."""
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(reason)
    with contextlib.closing(NamespaceThread()) as namespace:
        yield namespace


@pytest.fixture(scope="module")
def sites(
    namespace: NamespaceThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Site]]:
    """Two places for prefills."""
    with contextlib.ExitStack() as stack:

        def make() -> Site:
            veth = stack.enter_context(contextlib.closing(VethPair()))
            fork_server = ForkServer(tmp_path_factory.mktemp(veth.netns), veth.netns)
            return Site(veth, stack.enter_context(contextlib.closing(fork_server)))

        try:
            yield namespace.run(lambda: (make(), make()))
        finally:
            namespace.run(stack.close)


@pytest.fixture
def start_at() -> Iterator[StartPrefill]:
    """Starts a prefill: takes a site, an engine id and arguments of `Prefill`."""
    with contextlib.ExitStack() as stack:

        def start(site: Site, engine_id: str, **arguments: object) -> Prefill:
            prefill = Prefill(
                site.fork_server, engine_id, host=site.veth.address, **arguments
            )
            return stack.enter_context(contextlib.closing(prefill))

        yield start


def watch(decoder: Decoder, seconds: float) -> None:
    """Step for a while."""
    end = time.monotonic() + seconds
    decoder.wait_until(lambda: time.monotonic() >= end, seconds + 30)


# -- The connection breaks, the peer lives -------------------------------------


@pytest.mark.netns
@pytest.mark.parametrize("by_decoder", [True, False])
@in_namespace
def test_reset_connections_heal(
    namespace: NamespaceThread,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
    by_decoder: bool,
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    veth = sites[0].veth
    prefill = start_at(sites[0], "prefill")
    decoder.read(prefill)

    for _ in range(3):
        assert veth.reset_connections(by_decoder) > 0
        req_id = decoder.start(prefill, [4, 5])
        if decoder.wait_for(req_id):
            decoder.check(prefill, [4, 5], [4, 5])
        else:
            decoder.read(prefill, [4, 5])
    failed = list(decoder.failed)
    assert len(set(failed)) == len(failed) <= 3

    # And when the heartbeat is the first to meet it, no request fails at all.
    assert veth.reset_connections(by_decoder) > 0
    took = decoder.wait_until(lambda: not decoder.connected, 30)
    assert took < RELEASED_WITHIN, decoder.evidence()
    decoder.read(prefill, [6, 7])

    assert decoder.failed == failed
    assert decoder.connected == {"prefill"}
    assert len(decoder.lines("NIXL peer released: prefill")) == 4
    assert len(decoder.lines("NIXL peer reconnected: prefill")) == 4
    assert decoder.agent.violations == []


@pytest.mark.netns
@in_namespace
def test_reset_connections_stay_broken_in_the_stock_worker(
    namespace: NamespaceThread,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
):
    decoder = make_decoder(peer_heartbeat_interval=0)
    prefill = start_at(sites[0], "prefill")
    decoder.read(prefill)
    assert sites[0].veth.reset_connections(True) > 0
    for attempt in range(5):
        watch(decoder, INTERVAL)
        assert not decoder.wait_for(decoder.start(prefill)), f"attempt {attempt}"
    assert decoder.connected == {"prefill"}


# -- The network drops everything ----------------------------------------------


@pytest.mark.netns
@pytest.mark.parametrize("is_suspect", [False, True])
@in_namespace
def test_an_outage_costs_nothing(
    namespace: NamespaceThread,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
    monkeypatch: pytest.MonkeyPatch,
    is_suspect: bool,
):
    """A peer is suspect only after a while, and released by no outage."""
    if is_suspect:
        for module in (policy, manager):
            monkeypatch.setattr(module, "SUSPECT_AFTER_S", 2.0)
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    reading, idle = start_at(sites[0], "reading"), start_at(sites[0], "idle")
    healthy = start_at(sites[1], "healthy")
    for prefill in (reading, idle, healthy):
        decoder.read(prefill)
    calls = decoder.agent.calls
    handshakes = calls["add_remote_agent"]

    with sites[0].veth.cut():
        req_id = decoder.start(reading, range(8))
        watch(decoder, 4.0)
        heartbeats = calls["send_notif"]
        watch(decoder, 2.0)
        # They went on, and were no evidence of anything.
        assert calls["send_notif"] > heartbeats + 2
        assert decoder.in_flight == {req_id}, decoder.evidence()
        state = "suspect" if is_suspect else "connected"
        assert decoder.peers()["reading"]["state"] == state
        assert decoder.peers()["idle"]["state"] == "connected"
        decoder.read(healthy)

    assert decoder.wait_for(req_id), decoder.evidence()
    decoder.check(reading, list(range(8)), list(range(8)))
    for prefill in (reading, idle):
        decoder.read(prefill, [3, 1])
    assert decoder.failed == []
    assert calls["add_remote_agent"] == handshakes
    assert len(decoder.lines("NIXL peer")) == 2 * is_suspect
    assert decoder.agent.violations == []
