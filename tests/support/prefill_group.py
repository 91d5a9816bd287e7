# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Many prefills without a worker, in one process: they die together."""

from collections.abc import Iterable
from typing import Any

import msgspec

from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder, RemotePrefill
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_CONNECT_TIMEOUT_S = 120.0


class PrefillGroup:
    """NIXL agents with side channels that have a decoder's layout of the KV cache.

    They have no progress thread: it would spin, and few cores would be busy with
    nothing but dozens of them.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        decoder: Decoder,
        name: str,
        count: int,
        port: int | None = None,
    ):
        """Start the process.

        Args:
            fork_server: Where to start the process.
            decoder: Whose handshake reply the prefills take after.
            name: What their engine ids begin with.
            count: How many prefills.
            port: Port of the side channel, if there is only one prefill.

        """
        ports = [port or free_port() for _ in range(count)]
        self.prefills = [
            RemotePrefill(f"{name}-{number}", "127.0.0.1", port, decoder.num_blocks)
            for number, port in enumerate(ports)
        ]
        arguments: dict[str, Any] = {
            "engine_ids": self.engine_ids,
            "payload": msgspec.msgpack.encode(decoder.worker.xfer_handshake_metadata),
            "ports": ports,
        }
        self.child = fork_server.spawn(
            name, "tests.support.agent_process:PrefillGroupProcess", arguments, {}
        )
        self.close = self.child.close

    @property
    def engine_ids(self) -> list[str]:
        """Ids of its engines."""
        return [prefill.engine_id for prefill in self.prefills]


def connect(decoder: Decoder, prefills: Iterable[RemotePrefill]) -> None:
    """Have a decoder shake hands with prefills, as their first requests would."""
    wanted = set()
    for prefill in prefills:
        wanted.add(prefill.engine_id)
        decoder.worker._ensure_handshake(
            prefill.engine_id, prefill.host, prefill.port, 1
        )
    wait_until(
        lambda: wanted <= decoder.connected,
        _CONNECT_TIMEOUT_S,
        decoder.evidence,
        every=decoder.step,
    )
