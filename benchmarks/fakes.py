# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The real worker on a fake agent that does next to nothing, with many peers."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.v1.kv_connector.unit.nixl_peers import decoder as unit
from tests.v1.kv_connector.unit.nixl_peers.decoder import Decoder
from tests.v1.kv_connector.unit.nixl_peers.fake_nixl import FakeNixl


class QuietNixl(FakeNixl):
    """A fake agent that keeps no record: what a step calls costs next to nothing."""

    sends = 0

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return no notifications."""
        return {}

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Count a notification."""
        self.sends += 1


@contextlib.contextmanager
def connected_decoder(interval: float, engine_ids: list[str]) -> Iterator[Decoder]:
    """Yield a decoder that has shaken hands with peers; its clock stands still.

    Args:
        interval: Its `peer_heartbeat_interval`; 0 is the stock worker.
        engine_ids: Its peers. Two workers that are compared get the same strings:
            where in memory they lie matters to stock's look at all of them.

    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit, "FakeNixl", QuietNixl)
        decoder = unit.make_decoder(patch, peer_heartbeat_interval=interval)
        for engine_id in engine_ids:
            decoder.connect(engine_id)
        assert decoder.connected == set(engine_ids)
        try:
            yield decoder
        finally:
            decoder.worker.shutdown()
