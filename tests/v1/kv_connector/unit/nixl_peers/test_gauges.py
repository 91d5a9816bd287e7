# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The gauges of an engine that idles after a step say what holds while it idles."""

from nixl._bindings import nixlBackendError, nixlRemoteDisconnectError

from .decoder import Decoder


def gauges(decoder: Decoder) -> tuple[int, int]:
    """Return the suspect peers and the deferred releases that a step hands over."""
    data = decoder.connector.get_kv_connector_stats().data
    return data["suspect_peers"][0], data["deferred_peer_releases"][0]


def test_a_stuck_read_that_ends_between_two_scans_makes_nobody_suspect(
    decoder: Decoder,
):
    decoder.connect("p")
    decoder.request("r", "p")
    decoder.step()
    decoder.step(61.0)
    assert gauges(decoder) == (1, 0)
    decoder.nixl.raises["check_xfer_state"] = [nixlBackendError("?")]
    decoder.step(0.3)
    assert gauges(decoder) == (0, 0)


def test_a_release_that_a_round_has_left_over_is_not_deferred(decoder: Decoder):
    peers = ["p1", "p2", "p3", "p4"]
    for peer in peers:
        decoder.connect(peer)
        decoder.request(f"r-{peer}", peer)
    decoder.step()
    gone = nixlRemoteDisconnectError("gone")
    decoder.nixl.raises["send_notif"] = [gone] * len(peers)
    decoder.steps(2.5)
    assert gauges(decoder) == (0, len(peers))
    decoder.nixl.raises["check_xfer_state"] = [gone] * len(peers)
    decoder.step(0.1)
    assert gauges(decoder) == (0, 0)
    assert len(decoder.connected) == len(peers) - 1
