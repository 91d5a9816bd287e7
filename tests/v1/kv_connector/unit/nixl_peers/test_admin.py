# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers listed and released by hand: what an operator gets from each rank."""

from types import SimpleNamespace
from typing import Any

import pytest
from nixl._bindings import nixlRemoteDisconnectError

import vllm.distributed.kv_transfer as kv_transfer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.admin import (
    NixlPeerWorkerExtension,
)

from .decoder import Decoder, make_decoder

GONE = nixlRemoteDisconnectError("gone")


def serve_as(monkeypatch: pytest.MonkeyPatch, connector: Any) -> None:
    """Make a connector the one of this process."""
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)


@pytest.fixture
def rank(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> NixlPeerWorkerExtension:
    """The worker of a decoder, with the extension."""
    serve_as(monkeypatch, decoder.connector)
    return NixlPeerWorkerExtension()


# -- The list --------------------------------------------------------------------


def test_the_list_of_peers(decoder: Decoder, rank: NixlPeerWorkerExtension):
    decoder.connect("p", "a0", "a1", port=7000)
    decoder.request("r", "p")
    decoder.step(1.5)
    assert rank.list_nixl_peers() == {
        "enabled": True,
        "peers": [
            {
                "engine_id": "p",
                "address": "127.0.0.1:7000",
                "agents": ["a0", "a1"],
                "state": "connected",
                "since_proof_of_life_s": 1.5,
                "in_flight_reads": 2,
                "last_error": None,
            }
        ],
        "unread_requests": 0,
        "unread_lease_s": 0.0,
    }
    decoder.nixl.raises["send_notif"] = [GONE]
    decoder.step(2.2)
    (peer,) = rank.list_nixl_peers()["peers"]
    assert peer["state"] == "unreachable"
    assert peer["last_error"] == "nixlRemoteDisconnectError from send_notif"


def test_what_is_still_to_be_read_from_here(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    """An operator waits for it before stopping a prefill."""

    def unread() -> tuple[int, float]:
        listed = rank.list_nixl_peers()
        return listed["unread_requests"], listed["unread_lease_s"]

    assert unread() == (0, 0.0)
    decoder.serve("short", lease=10.0)
    decoder.serve("long", lease=30.0)
    decoder.step()
    assert unread() == (2, 30.0)
    decoder.clock.now += 10
    assert unread() == (1, 20.0)
    # An idle engine takes note of what has been read, though no step reports it.
    decoder.nixl.notifs = {"d": [b"long:1"]}
    decoder.idle_round()
    assert unread() == (0, 0.0)
    assert decoder.step().finished_sending == {"short", "long"}


def test_a_request_with_several_readers_is_unread_until_the_last_one_has_read(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    """Its decoder has a larger TP, so several of its ranks read from here."""

    def unread() -> int:
        return rank.list_nixl_peers()["unread_requests"]

    decoder.serve("r:with:colons")
    decoder.step()
    decoder.nixl.notifs = {"d0": [b"r:with:colons:3"]}
    decoder.step()
    assert unread() == 1
    decoder.nixl.notifs = {"d1": [b"r:with:colons:3"]}
    decoder.idle_round(2.0)
    assert unread() == 1
    decoder.nixl.notifs = {"d2": [b"r:with:colons:3"]}
    decoder.idle_round(2.0)
    assert unread() == 0
    assert decoder.step().finished_sending == {"r:with:colons"}


def test_a_renewed_lease_is_listed(decoder: Decoder, rank: NixlPeerWorkerExtension):
    decoder.serve("r", lease=30.0)
    decoder.step()
    decoder.nixl.notifs = {"d": [b"HB:r"]}
    decoder.idle_round(25.0)
    assert rank.list_nixl_peers()["unread_lease_s"] > 5.0


# -- A release -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [{"engine_id": "p"}, {"address": "127.0.0.1:7000"}])
def test_a_release_by_hand(
    decoder: Decoder, rank: NixlPeerWorkerExtension, name: dict[str, str]
):
    decoder.connect("p", port=7000)
    decoder.connect("other", port=7001)
    assert rank.release_nixl_peers(**name) == {
        "enabled": True,
        "result": "released",
        "engine_ids": ["p"],
        "in_flight_reads": 0,
    }
    assert decoder.connected == {"other"} and decoder.is_clean("p")
    assert rank.release_nixl_peers(**name) == {
        "enabled": True,
        "result": "unknown",
        "engine_ids": [],
        "in_flight_reads": 0,
        "known": [{"engine_id": "other", "address": "127.0.0.1:7001"}],
    }
    # Nothing is held against it.
    decoder.read("r", "p")
    assert decoder.finished == ["r"]


def test_more_peers_than_a_round_releases_go_with_one_request(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    engine_ids = [f"p{i}" for i in range(5)]
    for engine_id in engine_ids:
        decoder.connect(engine_id, port=7000)
    answer = rank.release_nixl_peers(address="127.0.0.1:7000")
    assert answer["result"] == "released"
    assert sorted(answer["engine_ids"]) == engine_ids
    assert decoder.connected == set()


def test_a_release_by_hand_waits_for_reads_in_flight(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    decoder.connect("p")
    for req_id in ("r0", "r1"):
        decoder.request(req_id, "p")
    decoder.step()
    for _ in range(2):
        assert rank.release_nixl_peers("p") == {
            "enabled": True,
            "result": "busy",
            "engine_ids": ["p"],
            "in_flight_reads": 2,
        }
    assert decoder.states() == {"p": "releasing"}
    # It takes no new reads, and a read that finishes does not keep it.
    decoder.nixl.finish_one_read("p-agent")
    decoder.request("late", "p", blocks=(2,))
    decoder.step()
    assert decoder.failed == ["late"] and decoder.connected == {"p"}
    decoder.nixl.finish_reads("p-agent")
    decoder.step()
    assert decoder.finished == ["r0", "r1"]
    assert decoder.is_clean("p")
    assert rank.release_nixl_peers("p")["result"] == "unknown"


def test_of_two_engines_at_an_address_the_free_one_goes_at_once(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    decoder.connect("free", port=7000)
    decoder.connect("busy", port=7000)
    decoder.request("r", "busy")
    decoder.step()
    answer = rank.release_nixl_peers(address="127.0.0.1:7000")
    assert answer["result"] == "busy" and answer["in_flight_reads"] == 1
    assert decoder.connected == {"busy"}


def test_an_engine_with_a_running_handshake_is_busy(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    """It would be connected a moment after a false "released"."""
    decoder.prefills["p"] = ["p-agent"]
    decoder.request("r", "p")
    decoder.step()
    assert rank.release_nixl_peers("p") == {
        "enabled": True,
        "result": "busy",
        "engine_ids": ["p"],
        "in_flight_reads": 0,
    }
    decoder.run_handshakes()
    assert rank.release_nixl_peers("p")["result"] == "released"
    assert decoder.is_clean("p")


def test_the_operator_s_word_ends_no_suspicion_and_releases_no_suspect(
    decoder: Decoder, rank: NixlPeerWorkerExtension
):
    decoder.connect("p")
    decoder.request("stuck", "p")
    decoder.step()
    decoder.steps(62, every=0.5)
    (peer,) = rank.list_nixl_peers()["peers"]
    assert peer["state"] == "suspect"
    assert rank.release_nixl_peers("p")["result"] == "busy"
    decoder.steps(100, every=0.5)
    assert decoder.connected == {"p"}


# -- Ranks ---------------------------------------------------------------------------


def test_a_rank_without_a_connector_knows_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: False)
    rank = NixlPeerWorkerExtension()
    assert rank.list_nixl_peers() == {
        "enabled": False,
        "peers": [],
        "unread_requests": 0,
        "unread_lease_s": 0.0,
    }
    assert rank.release_nixl_peers("p") == {
        "enabled": False,
        "result": "unknown",
        "engine_ids": [],
        "in_flight_reads": 0,
        "known": [],
    }


def test_neither_does_one_with_another_connector(monkeypatch: pytest.MonkeyPatch):
    serve_as(monkeypatch, SimpleNamespace(connector_worker=object()))
    rank = NixlPeerWorkerExtension()
    assert rank.list_nixl_peers()["peers"] == []
    assert rank.release_nixl_peers("p")["result"] == "unknown"


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Decoder]:
    """Two decoders in one MultiConnector, beside a connector of another kind."""
    other = make_decoder(monkeypatch, engine_id="other")
    decoder = make_decoder(monkeypatch)
    inner = SimpleNamespace(_connectors=[decoder.connector])
    serve_as(
        monkeypatch,
        SimpleNamespace(
            _connectors=[SimpleNamespace(connector_worker=None), other.connector, inner]
        ),
    )
    return other, decoder


def test_connectors_inside_a_multi_connector_answer_together(
    two: tuple[Decoder, Decoder],
):
    other, decoder = two
    rank = NixlPeerWorkerExtension()
    decoder.connect("p", port=7000)
    decoder.serve("r", lease=20.0)
    other.serve("s", lease=10.0)
    listed = rank.list_nixl_peers()
    assert [peer["engine_id"] for peer in listed["peers"]] == ["p"]
    assert listed["unread_requests"] == 2 and listed["unread_lease_s"] == 20.0
    # One that does not know the peer does not spoil the other's answer.
    assert rank.release_nixl_peers("p") == {
        "enabled": True,
        "result": "released",
        "engine_ids": ["p"],
        "in_flight_reads": 0,
    }
    assert rank.release_nixl_peers("p")["result"] == "unknown"


def test_it_is_busy_if_one_of_them_is(two: tuple[Decoder, Decoder]):
    other, decoder = two
    decoder.connect("p", port=7000)
    decoder.request("r", "p")
    decoder.step()
    other.prefills = decoder.prefills
    other.connect("p", port=7001)
    answer = NixlPeerWorkerExtension().release_nixl_peers("p")
    assert answer["result"] == "busy"
    assert answer["engine_ids"] == ["p", "p"] and answer["in_flight_reads"] == 1
    assert decoder.connected == {"p"} and other.connected == set()


def test_it_names_all_that_are_known(two: tuple[Decoder, Decoder]):
    other, decoder = two
    decoder.connect("p", port=7000)
    other.prefills = decoder.prefills
    other.prefills["q"] = ["q-agent"]
    other.connect("q", port=7001)
    answer = NixlPeerWorkerExtension().release_nixl_peers("nobody")
    assert answer["result"] == "unknown"
    assert {peer["engine_id"] for peer in answer["known"]} == {"p", "q"}
