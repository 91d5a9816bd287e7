# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Faults of the network between a decoder and its prefills, and peers that hang.

Real workers and real NIXL agents over TCP. The decoder is in one network namespace,
in this process; prefills are in others.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq

from tests.support.netns import Home, Link, at_home, why_no_links
from tests.support.nursery import Nursery
from tests.support.peers import Decoder, Prefill
from tests.support.prefill_process import rss_bytes

INTERVAL = 0.5
RELEASED_WITHIN = 2 * INTERVAL + 1.0
HANDSHAKE_TIMEOUT_S = 5.0
AT_ONCE = 1.0
MIN_SILENCE_S = 30.0
"""A peer is not taken for silent sooner."""
BIG = 4096
"""Blocks of 32 KiB in each of two layers: 256 MiB."""

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


@dataclass
class Site:
    """A place for prefills at the far end of a link."""

    link: Link
    nursery: Nursery


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """The decoder's namespace; tests that use it run there, by `at_home`."""
    if (reason := why_no_links()) is not None:
        pytest.skip(reason)
    with contextlib.closing(Home()) as home:
        yield home


@pytest.fixture(scope="module")
def sites(
    home: Home, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Site]]:
    """Two places for prefills."""
    with contextlib.ExitStack() as stack:

        def make() -> Site:
            link = stack.enter_context(contextlib.closing(Link()))
            nursery = Nursery(tmp_path_factory.mktemp(link.netns), link.netns)
            return Site(link, stack.enter_context(contextlib.closing(nursery)))

        try:
            yield home.run(lambda: (make(), make()))
        finally:
            home.run(stack.close)


@pytest.fixture
def start_at() -> Iterator[StartPrefill]:
    """Starts a prefill: takes a site, an engine id and arguments of `Prefill`."""
    with contextlib.ExitStack() as stack:

        def start(site: Site, engine_id: str, **arguments: object) -> Prefill:
            prefill = Prefill(
                site.nursery, engine_id, host=site.link.address, **arguments
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
@at_home
def test_reset_connections_heal(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
    by_decoder: bool,
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    link = sites[0].link
    prefill = start_at(sites[0], "prefill")
    decoder.read(prefill)

    for _ in range(3):
        assert link.reset_connections(by_decoder) > 0
        req_id = decoder.start(prefill, [4, 5])
        if decoder.wait_for(req_id):
            decoder.check(prefill, [4, 5], [4, 5])
        else:
            decoder.read(prefill, [4, 5])
    failed = list(decoder.failed)
    assert len(set(failed)) == len(failed) <= 3

    # And when the heartbeat is the first to meet it, no request fails at all.
    assert link.reset_connections(by_decoder) > 0
    took = decoder.wait_until(lambda: not decoder.connected, 30)
    assert took < RELEASED_WITHIN, decoder.evidence()
    decoder.read(prefill, [6, 7])

    assert decoder.failed == failed
    assert decoder.connected == {"prefill"}
    assert len(decoder.lines("NIXL peer released: prefill")) == 4
    assert len(decoder.lines("NIXL peer reconnected: prefill")) == 4
    assert decoder.agent.violations == []


@pytest.mark.netns
@at_home
def test_reset_connections_stay_broken_in_the_stock_worker(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
):
    decoder = make_decoder(peer_heartbeat_interval=0)
    prefill = start_at(sites[0], "prefill")
    decoder.read(prefill)
    assert sites[0].link.reset_connections(True) > 0
    for attempt in range(5):
        watch(decoder, INTERVAL)
        assert not decoder.wait_for(decoder.start(prefill)), f"attempt {attempt}"
    assert decoder.connected == {"prefill"}


# -- The network drops everything ----------------------------------------------


@pytest.mark.netns
@pytest.mark.parametrize("seconds", [5.0, 12.0])
@at_home
def test_a_short_outage_costs_nothing(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
    seconds: float,
):
    """The longer one leaves a question unanswered as well."""
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    prefill = start_at(sites[0], "prefill")
    decoder.read(prefill)
    with sites[0].link.cut():
        cut_at = time.perf_counter()
        req_id = decoder.start(prefill, range(8))
        watch(decoder, seconds)
        assert req_id in decoder.worker._recving_transfers, decoder.evidence()
    # Heartbeats went on, and were no evidence of anything.
    assert decoder.worker._peers.get("prefill").last_sent > cut_at + seconds - 2.0
    assert decoder.wait_for(req_id, 60), decoder.evidence()
    decoder.check(prefill, list(range(8)), list(range(8)))
    decoder.read(prefill, [3, 1])
    assert decoder.failed == []
    assert decoder.lines("NIXL peer") == []


@pytest.mark.netns
@at_home
def test_silent_peers(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
):
    """Two that the network has cut off, one of them with an open read; one hangs."""
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    idle, reading = start_at(sites[0], "idle"), start_at(sites[0], "reading")
    hung, healthy = start_at(sites[1], "hung"), start_at(sites[1], "healthy")
    for prefill in (idle, reading, hung, healthy):
        decoder.read(prefill)
    held = "NIXL peer held by open reads: reading"
    # The first question comes after a question's interval, the last one is out for
    # another; the third is for a busy machine.
    silent_within = MIN_SILENCE_S + 3 * decoder.worker._peers.question_interval

    hung.stop()
    hung_at = time.monotonic()
    with sites[0].link.cut():
        stuck = decoder.start(reading, [2, 3])
        took = decoder.wait_until(
            lambda: decoder.connected == {"reading", "healthy"} and decoder.lines(held),
            silent_within,
        )
        assert took > MIN_SILENCE_S - AT_ONCE, decoder.evidence()
        print(f"silent after {took:.1f} s")
        for engine_id in ("idle", "reading", "hung"):
            assert len(decoder.lines(f"NIXL peer silent: {engine_id}")) == 1
        for engine_id in ("idle", "hung"):
            (line,) = decoder.lines(f"NIXL peer released: {engine_id}")
            assert "'verdict': 'silent'" in line
        verdict_at = time.monotonic()

        # Nothing more is read from the peer that is to be released.
        refused = decoder.start(reading, [4, 5])
        decoder.wait_until(lambda: refused in decoder.failed, AT_ONCE)
        # One request to the hung one finds out; those after it need not wait.
        first = decoder.start(hung)
        assert not decoder.wait_for(first, HANDSHAKE_TIMEOUT_S + 5.0)
        refused_too = {decoder.start(hung) for _ in range(3)}
        decoder.wait_until(lambda: refused_too <= set(decoder.failed), AT_ONCE)

        # A release is never forced while a read is open.
        watch(decoder, verdict_at + 10.0 - time.monotonic())
        assert decoder.worker._recving_transfers.keys() == {stuck}
        assert decoder.connected == {"reading", "healthy"}
        assert len(decoder.lines(held)) == 1
        decoder.read(healthy)

    # Late data lands where it was meant to, and proves that the peer lives.
    took = decoder.wait_until(lambda: stuck in decoder.finished, 120)
    print(f"the stuck read finished {took:.1f} s after the network was back")
    decoder.check(reading, [2, 3], [2, 3])
    decoder.read(reading, [6, 7])
    assert decoder.lines("NIXL peer released: reading") == []
    decoder.read(idle)

    watch(decoder, hung_at + 60.0 - time.monotonic())
    hung.resume()
    decoder.read(hung)

    assert decoder.connected == {"idle", "reading", "hung", "healthy"}
    for engine_id in ("idle", "hung"):
        assert len(decoder.lines(f"NIXL peer reconnected: {engine_id}")) == 1
    assert sorted(decoder.failed) == sorted({refused, first} | refused_too)
    assert not any("healthy" in line for line in decoder.lines("NIXL peer"))
    assert decoder.agent.violations == []


# -- The peer dies -------------------------------------------------------------


@pytest.mark.netns
@at_home
def test_a_prefill_killed_during_a_large_read(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
):
    common = {"num_blocks": BIG, "num_threads": 4}
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL, **common)
    victim = start_at(sites[0], "victim", **common)
    survivor = start_at(sites[1], "survivor")
    decoder.read(victim)

    req_id = decoder.start(victim, range(BIG))
    decoder.step()
    cache = next(iter(decoder.kv_caches.values()))
    decoder.wait_until(lambda: cache[:64].any(), 10, stepping=False)
    victim.kill()
    took = decoder.wait_until(lambda: "victim" not in decoder.connected, 30)

    assert took < RELEASED_WITHIN, decoder.evidence()
    assert not decoder.worker._recving_transfers
    assert decoder.failed == [req_id]
    assert decoder.invalid_blocks == set(range(BIG))
    # It was the middle: some bytes had come, not all.
    assert not all(c.flatten(1).any(1).all() for c in decoder.kv_caches.values())
    decoder.read(survivor)
    replacement = start_at(sites[0], "replacement", port=victim.port, **common)
    decoder.read(replacement, range(BIG), deadline_s=60)
    assert decoder.connected == {"survivor", "replacement"}
    assert decoder.failed == [req_id]
    assert req_id not in decoder.finished
    assert decoder.agent.violations == []


@pytest.mark.netns
@pytest.mark.timeout(900)
@at_home
def test_memory_is_flat_over_200_kills(
    home: Home,
    sites: tuple[Site, Site],
    make_decoder: MakeDecoder,
    start_at: StartPrefill,
):
    """With vLLM's default of four NIXL threads."""
    common = {"num_threads": 4}
    decoder = make_decoder(peer_heartbeat_interval=0.1, **common)
    port = None
    seen = []
    start = time.monotonic()
    for cycle in range(200):
        victim = start_at(sites[cycle % 2], f"victim-{cycle}", port=port, **common)
        port = victim.port
        decoder.read(victim, [cycle % 8])
        victim.close()
        decoder.wait_until(lambda: not decoder.connected, 30)
        if cycle % 20 == 19:
            fds = len(os.listdir("/proc/self/fd"))
            seen.append(rss_bytes())
            print(
                f"cycle {cycle + 1}, {time.monotonic() - start:.0f} s: "
                f"{seen[-1] / 2**20:.1f} MiB, {fds} file descriptors"
            )
    assert max(seen) - seen[0] < 20e6
    assert decoder.failed == []
    assert len(decoder.lines("NIXL peer released")) == 200
    assert decoder.agent.violations == []


# -- The peer accepts and never answers ----------------------------------------


class MutePrefill:
    """An address that accepts connections and answers nothing."""

    def __init__(self, router: zmq.Socket):
        """Take the address of a bound socket."""
        self.engine_id = "mute"
        self.host = "127.0.0.1"
        self.port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def expect(self, req_id: str) -> None:
        """Hold nothing."""

    def evidence(self) -> str:
        """Have nothing to show."""
        return ""


def test_a_handshake_that_nobody_answers(
    make_decoder: MakeDecoder, start_prefill: StartPrefill
):
    decoder = make_decoder(peer_heartbeat_interval=INTERVAL)
    victim, healthy = start_prefill("victim"), start_prefill("healthy")
    newcomer = start_prefill("newcomer")
    decoder.read(victim)
    decoder.read(healthy)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:*")
        mute = MutePrefill(router)
        start = time.monotonic()
        unanswered = decoder.start(mute)
        behind = decoder.start(newcomer, [2, 3])
        decoder.step()

        # Neither a dead peer's release nor a healthy peer's reads wait for it.
        victim.kill()
        took = decoder.wait_until(lambda: "victim" not in decoder.connected, 30)
        assert took < RELEASED_WITHIN, decoder.evidence()
        decoder.read(healthy)
        assert "mute" in decoder.worker._handshake_futures, decoder.evidence()

        assert not decoder.wait_for(unanswered)
        assert time.monotonic() - start < HANDSHAKE_TIMEOUT_S + 2 * AT_ONCE
        again = decoder.start(mute)
        decoder.wait_until(lambda: again in decoder.failed, AT_ONCE)
        assert decoder.wait_for(behind), decoder.evidence()
        decoder.check(newcomer, [2, 3], [2, 3])
        decoder.read(healthy)
        assert decoder.failed == [unanswered, again]
        assert decoder.agent.violations == []
