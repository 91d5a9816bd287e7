# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Push mode on a fake NIXL agent: a prefill and its decoders, and the other way."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from nixl._bindings import nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPushConnectorWorker as StockNixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import push_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    PUSH_REG_NOTIF_PREFIX,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
    NixlPushConnector,
    NixlPushConnectorWorker,
)

from .decoder import HOST, Decoder, make_decoder
from .fake_nixl import PeerState
from .worker_factory import make_connector

Lines = Callable[[str], list[str]]

INTERVAL = 2.0
FIRST_HEARTBEAT = 1.1 * INTERVAL
GONE = nixlRemoteDisconnectError("gone")
LONG = 30.0


class Once:
    """A stop event that lets the writer's loop run once."""

    def __init__(self) -> None:
        self._asked = False

    def is_set(self) -> bool:
        """Return False the first time."""
        asked, self._asked = self._asked, True
        return asked

    def wait(self, timeout: float | None = None) -> bool:
        """Return at once."""
        return True

    def set(self) -> None:
        """Do nothing."""


class PushInstance(Decoder):
    """A worker in push mode, whose writer runs when the test says so."""

    def write(self) -> None:
        """Run the writer's loop once, in this thread."""
        self.worker._push_writer_stop = Once()
        self.worker._push_writer_wake.set()
        self.worker._push_writer_loop()

    def finish_request(self, req_id: str, blocks: tuple[int, ...] = (0, 1)) -> None:
        """As a prefill: have a request's blocks ready to be written."""
        self.serve(req_id)
        self.metadata.push_finished_blocks = {req_id: (list(blocks),)}
        self.step()

    def register(
        self, req_id: str, engine_id: str, blocks: tuple[int, ...] = (0, 1)
    ) -> None:
        """As a prefill: receive a decoder's registration for a request."""
        self.prefills.setdefault(engine_id, [f"{engine_id}-agent"])
        payload = {
            "request_id": req_id,
            "decode_engine_id": engine_id,
            "decode_host": HOST,
            "decode_port": 6000,
            "decode_tp_size": 1,
            "local_block_ids": [list(blocks)],
        }
        notif = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(payload)
        self.nixl.notifs.setdefault(f"{engine_id}-agent", []).append(notif)

    def expect(self, req_id: str, engine_id: str) -> None:
        """As a decoder: register a request with a prefill, and wait for its blocks."""
        self.prefills.setdefault(engine_id, [f"{engine_id}-agent"])
        self.request(req_id, engine_id)
        self.metadata.push_registrations = {
            req_id: {
                "request_id": req_id,
                "remote_engine_id": engine_id,
                "remote_host": HOST,
                "remote_port": 6000,
                "remote_tp_size": 1,
            }
        }
        self.step()
        self.write()
        self.run_handshakes()
        self.write()

    def receive(self, req_id: str, engine_id: str) -> None:
        """As a decoder: be notified that a request's blocks have been written."""
        notifs = self.nixl.notifs.setdefault(f"{engine_id}-agent", [])
        notifs.append(f"{req_id}:1".encode())
        self.write()

    def push(self, req_id: str, engine_id: str) -> None:
        """As a prefill: write a request's blocks to a decoder, up to the post."""
        self.finish_request(req_id)
        self.register(req_id, engine_id)
        self.write()
        self.run_handshakes()
        self.write()


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushInstance]:
    """A prefill in push mode with the default interval, connected to nobody."""
    monkeypatch.setattr(
        push_worker,
        "threading",
        SimpleNamespace(
            Thread=lambda **_: SimpleNamespace(start=lambda: None, join=lambda t: None),
            Event=threading.Event,
            Lock=threading.Lock,
        ),
    )
    made = make_decoder(
        monkeypatch,
        engine_id="prefill",
        role="kv_producer",
        connector_cls=NixlPushConnector,
        kv_connector="NixlPushConnector",
    )
    monkeypatch.setattr(push_worker, "time", made.clock)
    made.__class__ = PushInstance
    yield made  # type: ignore[misc]
    assert made.nixl.violations == []


def test_a_dead_decoder_is_released_by_the_prefill(prefill: PushInstance):
    prefill.push("r", "d")
    prefill.nixl.finish_reads("d-agent")
    assert prefill.step().finished_sending == {"r"}
    assert prefill.connected == {"d"}
    prefill.kill("d")
    prefill.steps(FIRST_HEARTBEAT)
    assert prefill.is_clean("d")
    assert not any(d.open for d in prefill.nixl.dlists.values() if d.agent[0] == "d")


def test_an_idle_prefill_releases_a_dead_decoder(prefill: PushInstance):
    prefill.push("r", "d")
    prefill.nixl.finish_reads("d-agent")
    prefill.step()
    prefill.kill("d")
    prefill.idle(FIRST_HEARTBEAT + INTERVAL)
    assert prefill.is_clean("d")


def test_a_decoder_is_not_released_under_a_write(prefill: PushInstance):
    prefill.push("r", "d")
    prefill.nixl.raises["send_notif"] = [GONE]
    prefill.steps(FIRST_HEARTBEAT)
    assert prefill.states() == {"d": "unreachable"}
    assert prefill.connected == {"d"}
    prefill.kill("d")
    prefill.step()
    assert prefill.is_clean("d")


def test_a_write_that_fails_releases_its_decoder_and_leaves_the_blocks_to_the_lease(
    prefill: PushInstance,
):
    prefill.push("r", "d")
    prefill.kill("d")
    assert prefill.step().finished_sending == set()
    assert prefill.is_clean("d")
    assert prefill.step(31).finished_sending == {"r"}


def test_writes_to_a_decoder_that_is_to_be_released_are_refused(prefill: PushInstance):
    prefill.push("open", "d")
    assert prefill.worker.release_peers("d")["result"] == "busy"
    prefill.finish_request("late")
    prefill.register("late", "d")
    prefill.write()
    assert prefill.nixl.open_handles("d-agent") == 1
    prefill.nixl.finish_reads("d-agent")
    assert prefill.step().finished_sending == {"open"}
    assert prefill.is_clean("d")
    assert prefill.counted()["peer_requests_refused"] == 1


def test_a_write_to_a_quarantined_decoder_counts_as_refused(prefill: PushInstance):
    prefill.prefills["d"] = RuntimeError("nobody there")
    prefill.push("first", "d")
    prefill.push("second", "d")
    assert prefill.attempts == ["d"]
    prefill.step()
    assert prefill.counted()["peer_requests_refused"] == 1


def test_registrations_of_a_quarantined_decoder_fail_at_once(prefill: PushInstance):
    prefill.prefills["d"] = TimeoutError("no answer")
    for i in range(5):
        prefill.push(f"r{i}", "d")
    assert prefill.attempts == ["d"]
    assert prefill.nixl.called("make_prepped_xfer") == []
    assert prefill.counted()["peer_requests_refused"] == 4


def test_a_decoder_that_a_write_is_stuck_in_is_suspect(prefill: PushInstance):
    prefill.push("stuck", "d")
    prefill.nixl.peers["d-agent"].state = PeerState.HUNG
    prefill.steps(62, every=0.5)
    assert prefill.states() == {"d": "suspect"}
    prefill.finish_request("late")
    prefill.register("late", "d")
    prefill.write()
    assert prefill.nixl.open_handles("d-agent") == 1
    prefill.nixl.peers["d-agent"].state = PeerState.ALIVE
    prefill.nixl.finish_reads("d-agent")
    prefill.step()
    assert prefill.states() == {"d": "connected"}


def test_a_release_waits_for_the_writer_and_the_step_does_not(prefill: PushInstance):
    """The writer is between looking a decoder up and posting to it."""
    prefill.push("first", "d")
    prefill.nixl.finish_reads("d-agent")
    prefill.step()
    seen: list[Any] = []

    def meanwhile(*_: Any) -> None:
        prefill.kill("d")
        seen.append(prefill.worker.release_peers("d")["result"])
        prefill.step(FIRST_HEARTBEAT)
        seen.append(prefill.connected)

    prefill.nixl.before["make_prepped_xfer"] = meanwhile
    prefill.finish_request("second")
    prefill.register("second", "d")
    prefill.write()
    assert seen == ["busy", {"d"}]
    prefill.steps(0.2)
    assert prefill.is_clean("d")


def test_the_ttl_does_not_evict_a_decoder_under_a_write(prefill: PushInstance):
    """Stock looks at reads only."""
    prefill.push("stuck", "d")
    prefill.nixl.peers["d-agent"].state = PeerState.HUNG
    prefill.clock.now += 2 * 3600
    prefill.connect("e")
    assert "d" in prefill.connected


def test_a_decoder_releases_the_notification_agents_of_a_dead_prefill(
    prefill: PushInstance,
):
    """The other side: this instance decodes, and registers with a prefill."""
    decoder = prefill
    decoder.expect("r", "p")
    decoder.receive("r", "p")
    decoder.step()
    assert decoder.finished == ["r"]
    assert decoder.connected == {"p"}
    decoder.kill("p")
    decoder.idle(FIRST_HEARTBEAT + INTERVAL)
    assert decoder.is_clean("p")
    assert decoder.nixl.peers == {}


def test_blocks_of_a_prefill_that_has_died_since_are_used(prefill: PushInstance):
    """It was released before the step that learns of its last write."""
    decoder = prefill
    decoder.expect("r", "p")
    decoder.kill("p")
    decoder.steps(FIRST_HEARTBEAT)
    assert decoder.connected == set()
    decoder.receive("r", "p")
    decoder.step()
    assert (decoder.finished, decoder.failed) == (["r"], [])
    decoder.steps(1.1)
    assert decoder.is_clean("p")


@pytest.mark.parametrize(
    ("error", "failed"),
    [(ConnectionRefusedError(), ["r"]), (TimeoutError(), [])],
    ids=["nobody listens", "no answer"],
)
def test_a_request_ends_once_its_lost_prefill_is_known_to_be_gone(
    prefill: PushInstance, error: OSError, failed: list[str]
):
    """One that only does not answer may live, and write into the request's blocks."""
    decoder = prefill
    decoder.expect("r", "p")
    decoder.kill("p")
    decoder.prefills["p"] = error
    decoder.steps(FIRST_HEARTBEAT)
    assert (decoder.connected, decoder.failed) == (set(), [])
    decoder.lease_heartbeat("p", "r")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    assert (decoder.finished, decoder.failed) == ([], failed)
    decoder.steps(1.1)
    assert decoder.is_clean("p") == bool(failed)


def test_a_request_waits_for_a_prefill_that_the_operator_has_released(
    prefill: PushInstance,
):
    decoder = prefill
    decoder.expect("r", "p")
    assert decoder.worker.release_peers("p")["result"] == "released"
    decoder.prefills["p"] = ConnectionRefusedError()
    decoder.lease_heartbeat("p", "r")
    decoder.step()
    decoder.run_handshakes()
    decoder.step()
    assert decoder.failed == []
    decoder.receive("r", "p")
    decoder.step()
    assert decoder.finished == ["r"]


def test_a_request_whose_registration_cannot_be_sent_fails(prefill: PushInstance):
    """Stock waits for ever for blocks that nobody knows of."""
    decoder = prefill
    decoder.expect("first", "p")
    decoder.kill("p")
    decoder.expect("late", "p")
    decoder.step()
    assert decoder.failed == ["late"]
    decoder.expect("later", "p")
    decoder.receive("later", "p")
    decoder.step()
    assert (decoder.finished, decoder.failed) == (["later"], ["late"])


def test_an_idle_prefill_renews_leases_and_lets_nothing_pile_up(prefill: PushInstance):
    prefill.serve("r", lease=10)
    for _ in range(30):
        prefill.nixl.notifs["d-agent"] = [b"HB:", b"HB:r", b"done:1"]
        prefill.idle_round(INTERVAL)
        prefill.write()
    prefill.idle_round()
    assert prefill.worker._pending_completion_notifs.qsize() == 30
    assert prefill.worker.list_peers()["unread_requests"] == 1


def test_a_failed_handshake_is_unloaded_while_the_writer_asks_for_another(
    prefill: PushInstance, monkeypatch: pytest.MonkeyPatch
):
    prefill.prefills["d"] = ["d-agent", TimeoutError("rank 1 is gone")]
    prefill.finish_request("first")
    prefill.register("first", "d")
    prefill.write()
    monkeypatch.setattr(prefill.worker, "_evict_stale_engines", prefill.run_handshakes)
    prefill.finish_request("second")
    prefill.register("second", "d")
    prefill.write()
    assert prefill.attempts == ["d"]
    assert prefill.is_clean("d")


def test_zero_builds_the_stock_push_worker(
    prefill: PushInstance, monkeypatch: pytest.MonkeyPatch
):
    connector = make_connector(
        "other",
        connector_cls=NixlPushConnector,
        kv_connector="NixlPushConnector",
        peer_heartbeat_interval=0,
    )
    assert type(connector.connector_worker) is StockNixlPushConnectorWorker
    assert isinstance(prefill.worker, NixlPushConnectorWorker)


@pytest.mark.skipif(
    not hasattr(StockNixlPushConnectorWorker, "unregister_kv_caches"),
    reason="vLLM has sleep mode for NIXL from 0.33 on",
)
def test_the_kv_cache_is_not_unregistered_under_a_write(prefill: PushInstance):
    prefill.push("r", "d")
    with pytest.raises(RuntimeError, match=r"Transfers with \['d'\] are in flight"):
        prefill.worker.unregister_kv_caches()
    prefill.nixl.finish_reads("d-agent")
    prefill.step()
    prefill.worker.unregister_kv_caches()
    assert prefill.is_clean("d")
