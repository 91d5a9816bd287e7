# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the scheduler sees, whatever happens to the peers and in whatever order.

It sees each request end once, finished or failed; a failed one with its own blocks
and no others, and no exception ever. Behind its back nothing of a released peer
stays, nothing is released without evidence or under a read in flight, and a peer that
hangs takes no new reads.
"""

import logging
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nixl._bindings import (
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)

from .decoder import Decoder, make_decoder
from .fake_nixl import PeerState

# Engines with their number of ranks and their port; two share an address, as a
# prefill and its replacement do.
ENGINES = {
    "two": (2, 7001),
    "four": (4, 7002),
    "old": (1, 7003),
    "new": (1, 7003),
}
TYPED = (nixlRemoteDisconnectError, nixlNotFoundError)
UNTYPED = (nixlBackendError, RuntimeError, OSError)
# Calls of a step or a handshake, and what may be raised there without being
# stock's to handle: it does not expect notifications to fail. A connection that fails
# for notifications alone is the most telling, so it comes most often.
STEP_CALLS = (
    "send_notif",
    "send_notif",
    "send_notif",
    "check_xfer_state",
    "get_xfer_telemetry",
    "transfer",
    "make_prepped_xfer",
    "release_xfer_handle",
    "release_dlist_handle",
    "remove_remote_agent",
    "check_remote_metadata",
    "add_remote_agent",
    "prep_xfer_dlist",
)
NIXL_CALLS = ("get_new_notifs",)

# One engine gets most of what happens: faults must meet to be of interest.
engines = st.sampled_from(["two", "two", "two", "four", "old", "new"])


class SchedulerView(RuleBasedStateMachine):
    """A decoder, its peers, and everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()
        self.decoder = make_decoder(self.monkeypatch)
        self.nixl = self.decoder.nixl
        self.blocks: dict[str, set[int]] = {}
        self.served: set[str] = set()
        self.sent: list[str] = []
        # Engines that something has shown to be gone, or that somebody wants gone.
        self.may_go: set[str] = set()
        self.release_errors = False
        # Half of all runs see no evidence, only errors that are none.
        self.with_evidence = True
        self.were_connected: set[str] = set()
        for engine_id in ENGINES:
            self.prefill(engine_id, "works")
        for engine_id in ("two", "old"):
            self.decoder.connect(engine_id, port=ENGINES[engine_id][1])

    @staticmethod
    def agents(engine_id: str) -> list[str]:
        return [f"{engine_id}-{rank}" for rank in range(ENGINES[engine_id][0])]

    # -- Requests ----------------------------------------------------------------

    @rule(engine_id=engines, num_blocks=st.integers(0, 3))
    def request(self, engine_id: str, num_blocks: int):
        number = len(self.blocks)
        blocks = range(10 * number, 10 * number + num_blocks)
        self.blocks[f"r{number}"] = set(blocks)
        port = ENGINES[engine_id][1]
        # A handshake at another engine's address makes vLLM release that one.
        self.may_go |= {e for e, (_, p) in ENGINES.items() if p == port} - {engine_id}
        self.decoder.request(f"r{number}", engine_id, tuple(blocks), port=port)

    @rule(engine_id=engines)
    def lease_heartbeat(self, engine_id: str):
        if engine_id in self.decoder.connected:
            self.decoder.lease_heartbeat(engine_id, "waiting")

    @rule(engine_id=engines)
    def finish_reads(self, engine_id: str):
        for agent in self.agents(engine_id):
            self.nixl.finish_reads(agent)

    @rule()
    def serve_a_request(self):
        """Be somebody's prefill as well; the reader has notified already."""
        req_id = f"s{len(self.served)}"
        self.served.add(req_id)
        self.decoder.serve(req_id)
        notifs = self.nixl.notifs.setdefault("reader", [])
        notifs += [b"HB:" + req_id.encode(), f"{req_id}:1".encode()]

    # -- Faults ------------------------------------------------------------------

    @rule(engine_id=engines, state=st.sampled_from(PeerState), sends=st.integers(0, 3))
    def change(self, engine_id: str, state: PeerState, sends: int):
        if state not in (PeerState.ALIVE, PeerState.HUNG):
            if not self.with_evidence:
                return
            self.may_go.add(engine_id)
        for agent in self.agents(engine_id):
            if (peer := self.nixl.peers.get(agent)) is not None:
                peer.state, peer.sends_left = state, sends

    @precondition(lambda self: self.with_evidence)
    @rule(engine_id=engines, rank=st.integers(0, 3))
    def lose_one_rank(self, engine_id: str, rank: int):
        agents = self.agents(engine_id)
        self.may_go.add(engine_id)
        if (peer := self.nixl.peers.get(agents[rank % len(agents)])) is not None:
            peer.die()

    @rule(
        where=st.one_of(
            st.tuples(st.sampled_from(STEP_CALLS), st.sampled_from(TYPED + UNTYPED)),
            st.tuples(
                st.sampled_from(NIXL_CALLS), st.sampled_from((*TYPED, nixlBackendError))
            ),
        )
    )
    def error(self, where: tuple[str, type[Exception]]):
        call, error = where
        if error in TYPED and not self.with_evidence:
            error = nixlBackendError
        self.nixl.raises.setdefault(call, []).append(error("?"))
        self.release_errors |= call in ("remove_remote_agent", "release_dlist_handle")

    @precondition(lambda self: self.with_evidence)
    @rule(engine_id=engines)
    def lose_under_a_read(self, engine_id: str):
        """Get to where a release is deferred, which chance seldom does."""
        self.have_a_read(engine_id)
        self.error(("send_notif", nixlRemoteDisconnectError))
        self.step(2.2, between=False)

    @rule(engine_id=engines)
    def hang_under_a_read(self, engine_id: str):
        """Nothing of the peer finishes for a minute: it must take no new reads."""
        self.have_a_read(engine_id)
        self.change(engine_id, PeerState.HUNG, 0)
        for seconds in (0.1, 62.0, 2.2):
            self.step(seconds, between=False)
        stuck = any(map(self.nixl.open_handles, self.agents(engine_id)))
        if stuck and engine_id in self.decoder.connected:
            assert self.decoder.states()[engine_id] != "connected"

    def have_a_read(self, engine_id: str) -> None:
        """Ask for blocks, and give the read the steps that it takes to be posted."""
        self.request(engine_id, 2)
        self.step(0.1, between=False)
        self.run_handshakes()
        self.step(0.1, between=False)

    @rule(engine_id=engines, how=st.sampled_from(["works", "fails", "half-way"]))
    def prefill(self, engine_id: str, how: str):
        """Decide how handshakes with an engine end."""
        answer: Any = self.agents(engine_id)
        if how == "fails":
            answer = TimeoutError("no answer")
        elif how == "half-way":
            answer[-1] = TimeoutError("no answer")
        self.decoder.prefills[engine_id] = answer

    @precondition(lambda self: self.with_evidence)
    @rule(engine_id=engines)
    def release_by_hand(self, engine_id: str):
        self.may_go.add(engine_id)
        answer = self.decoder.worker.release_peers(engine_id)
        is_there = engine_id in self.decoder.connected
        assert (answer["result"] == "busy") or not is_there

    # -- Time --------------------------------------------------------------------

    def note_errors(self) -> None:
        """A typed error may turn up in a call for any peer."""
        errors = [e for queued in self.nixl.raises.values() for e in queued]
        if any(isinstance(e, TYPED) for e in errors):
            self.may_go |= self.decoder.connected

    @rule()
    def run_handshakes(self):
        self.decoder.run_handshakes()

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.2, 7.0, 30.0]))
    def idle(self, seconds: float):
        self.note_errors()
        self.decoder.idle_round(seconds)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.2, 30.0]), between=st.booleans())
    def step(self, seconds: float, between: bool):
        """Run a step, with an idle round between its halves or not."""
        decoder = self.decoder
        failed = len(decoder.failed)
        made = len(self.nixl.called("make_prepped_xfer"))
        self.note_errors()
        refusing = {e for e, state in decoder.states().items() if state != "connected"}
        decoder.start_step(seconds)
        readers = set(self.nixl.called("make_prepped_xfer")[made:])
        for engine_id in refusing:
            assert not readers & set(self.agents(engine_id))
        if between:
            decoder.idle_round(2.2)
        self.sent += sorted(decoder.end_step().finished_sending)
        of_failed = {b for r in decoder.failed[failed:] for b in self.blocks[r]}
        assert decoder.worker.get_block_ids_with_load_errors() == of_failed

    # -- What always holds -------------------------------------------------------

    @initialize(with_evidence=st.booleans())
    def start(self, with_evidence: bool):
        self.with_evidence = with_evidence
        self.step(0.0, between=False)

    @invariant()
    def each_request_ends_once(self):
        ended = self.decoder.finished + self.decoder.failed
        assert len(ended) == len(set(ended)) and set(ended) <= self.blocks.keys()
        assert len(self.sent) == len(set(self.sent)) and set(self.sent) <= self.served

    @invariant()
    def nixl_is_used_by_its_rules(self):
        assert self.nixl.violations == []

    @invariant()
    def nothing_goes_without_evidence(self):
        gone = self.were_connected - self.decoder.connected
        assert gone <= self.may_go
        self.may_go -= gone
        self.were_connected = self.decoder.connected

    @invariant()
    def a_peer_that_is_gone_leaves_nothing(self):
        for engine_id in ENGINES.keys() - self.decoder.connected:
            assert self.decoder.is_clean(engine_id)
            if not self.release_errors:
                assert not self.nixl.peers.keys() & set(self.agents(engine_id))
                assert not any(
                    dlist.open and dlist.agent in self.agents(engine_id)
                    for dlist in self.nixl.dlists.values()
                )

    # -- The end -----------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.decoder.worker.shutdown()
            self.monkeypatch.undo()

    def drain(self) -> None:
        """First without those that hang, then let everything work again."""
        self.nixl.raises.clear()
        for engine_id in ENGINES:
            self.prefill(engine_id, "works")
        for _ in range(4):
            self.run_handshakes()
            self.step(1.0, between=False)
        # What has not ended by now has a read of its own in flight.
        reading = sum(xfer.open for xfer in self.nixl.xfers.values())
        ended = self.decoder.finished + self.decoder.failed
        assert len(self.blocks.keys() - set(ended)) <= reading
        for engine_id in ENGINES:
            self.change(engine_id, PeerState.ALIVE, 0)
        for _ in range(2):
            for engine_id in ENGINES:
                self.finish_reads(engine_id)
            self.step(1.0, between=False)
        self.step(3.0, between=False)
        self.each_request_ends_once()
        self.nixl_is_used_by_its_rules()
        self.a_peer_that_is_gone_leaves_nothing()
        ended = self.decoder.finished + self.decoder.failed
        assert set(ended) == self.blocks.keys()
        assert set(self.sent) == self.served
        assert set(self.decoder.states().values()) <= {"connected"}
        assert not any(xfer.open for xfer in self.nixl.xfers.values())


def test_each_request_ends_once_whatever_happens():
    vllm_logger = logging.getLogger("vllm")
    level = vllm_logger.level
    # Hundreds of failures are logged, and would only take time.
    vllm_logger.setLevel(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            SchedulerView,
            settings=settings(
                derandomize=True,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                max_examples=80,
                stateful_step_count=50,
            ),
        )
    finally:
        vllm_logger.setLevel(level)


@pytest.mark.parametrize("error", [*TYPED, *UNTYPED])
def test_a_handshake_that_loads_nothing_leaves_nothing(
    decoder: Decoder, error: type[Exception]
):
    """Stock registers the engine before it loads the first rank."""
    decoder.nixl.raises["add_remote_agent"] = [error("?")]
    decoder.connect("p")
    assert decoder.connected == set()
    assert decoder.is_clean("p")
