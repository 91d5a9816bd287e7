# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers for a decoder in this process: NIXL agents in processes of their own."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.support.nursery import Nursery
from tests.support.peers import Decoder, Prefill, RemotePrefill
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_CONNECT_TIMEOUT_S = 120.0


@dataclass
class Crowd:
    """Prefills without a worker that share a process; it dies with all of them."""

    child: Any
    prefills: list[RemotePrefill]

    @property
    def engine_ids(self) -> list[str]:
        """Ids of its engines."""
        return [prefill.engine_id for prefill in self.prefills]


@contextlib.contextmanager
def running_nursery() -> Iterator[Nursery]:
    """Yield a process that forks prefills; they and their logs go with it."""
    with (
        tempfile.TemporaryDirectory(prefix="nixl-bench-") as folder,
        contextlib.closing(Nursery(Path(folder))) as nursery,
    ):
        yield nursery


def start_crowd(
    nursery: Nursery, decoder: Decoder, name: str, count: int, port: int | None = None
) -> Crowd:
    """Start a process of prefills that have the decoder's layout of the KV cache.

    They have no progress thread: it would spin, and few cores would be busy with
    nothing but dozens of them.

    Args:
        nursery: Where to start the process.
        decoder: Whose handshake reply the prefills take after.
        name: What their engine ids begin with.
        count: How many prefills.
        port: Port of the side channel, if there is only one prefill.

    """
    ports = [port or free_port() for _ in range(count)]
    prefills = [
        RemotePrefill(f"{name}-{number}", "127.0.0.1", port, decoder.num_blocks)
        for number, port in enumerate(ports)
    ]
    payload = msgspec.msgpack.encode(decoder.worker.xfer_handshake_metadata)
    arguments = {
        "engine_ids": [prefill.engine_id for prefill in prefills],
        "payload": payload,
        "ports": ports,
    }
    child = nursery.spawn(
        name, "tests.support.agent_process:PrefillCrowdProcess", arguments, {}
    )
    return Crowd(child, prefills)


def connect(decoder: Decoder, prefills: list[RemotePrefill] | list[Prefill]) -> None:
    """Have a decoder shake hands with prefills, as their first requests would."""
    wanted = {prefill.engine_id for prefill in prefills}
    for prefill in prefills:
        decoder.worker._ensure_handshake(
            prefill.engine_id, prefill.host, prefill.port, 1
        )
    wait_until(
        lambda: wanted <= decoder.connected,
        _CONNECT_TIMEOUT_S,
        decoder.evidence,
        every=decoder.step,
    )
