# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Loop turns of a decoder while it loads a peer with many descriptors."""

import contextlib
import functools
import json
import mmap
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from nixl._api import nixl_agent, nixl_agent_config

import vllm
from benchmarks.peers_pool import running_fork_server
from tests.support.fork_server import DEFAULT_ENV, ForkServer, environment
from tests.support.ports import free_port
from tests.support.prefill_process import (
    building_worker,
    serve_side_channel,
)
from tests.v1.kv_connector.unit.nixl_peers import worker_factory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
)

_STEP_PAUSE_S = 0.001
_TIMEOUT_S = 120.0
_HOST = "127.0.0.1"
# Of Linux; Python's module has it from 3.13 on.
_MAP_NORESERVE = 0x4000


def address_space(size: int) -> mmap.mmap:
    """Return that many bytes, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size, flags=flags)


@dataclass(frozen=True)
class Case:
    """A peer to load.

    Attributes:
        descriptors: Descriptors of each of its ranks.
        ranks: Its tensor parallel size; the decoder's is 1.
    """

    descriptors: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.descriptors:,} descriptors, TP {self.ranks} to 1"


CASES = (Case(2_000_000, 1), Case(300_000, 2))
QUICK_CASES = (Case(500_000, 1), Case(50_000, 2))
_ROUNDS = 7
_QUICK_ROUNDS = 3


class LargePrefillProcess:
    """A prefill without a worker: an agent for each rank, and address space."""

    stepping = False

    def __init__(self, engine_id: str, payload: bytes, port: int, blocks: int, tp: int):
        """Register the memory and serve the handshakes.

        Args:
            engine_id: Its engine id.
            payload: Handshake reply of the decoder, whose layout it takes over.
            port: Port of its side channel.
            blocks: Blocks in the KV cache of each rank.
            tp: Its tensor parallel size.

        """
        reply = msgspec.msgpack.decode(payload, type=NixlHandshakePayload)
        metadata = msgspec.msgpack.decode(
            reply.agent_metadata_bytes, type=NixlAgentMetadata
        )
        regions = len(metadata.block_strides)
        size = blocks * max(metadata.block_strides) // tp
        self._memory = address_space(size * regions)
        base = np.frombuffer(self._memory, np.uint8).ctypes.data
        metadata.engine_id = engine_id
        metadata.num_blocks = blocks
        metadata.region_num_blocks = metadata.region_num_blocks and [blocks] * regions
        metadata.block_lens = [length // tp for length in metadata.block_lens]
        metadata.block_strides = [stride // tp for stride in metadata.block_strides]
        metadata.kv_caches_base_addr = [base + n * size for n in range(regions)]
        self._agents = []
        replies = {}
        for rank in range(tp):
            with building_worker():
                agent = nixl_agent(f"{engine_id}-{rank}", nixl_agent_config())
            agent.register_memory([(base, size * regions, 0, "")], "DRAM")
            self._agents.append(agent)
            metadata.agent_metadata = agent.get_agent_metadata()
            reply.agent_metadata_bytes = msgspec.msgpack.encode(metadata)
            replies[0, rank] = msgspec.msgpack.encode(reply)
        serve_side_channel(replies, _HOST, port)


@contextlib.contextmanager
def building_decoder(name: str, blocks: int, interval: float) -> Iterator[Any]:
    """Yield a worker with a KV cache of that many blocks, most never touched."""
    caches = {}
    for layer, one in worker_factory.make_kv_caches(1).items():
        memory = address_space(blocks * one.nbytes)
        cache = torch.frombuffer(memory, dtype=one.dtype)
        caches[layer] = cache.view(blocks, *one.shape[1:])
    with environment(**DEFAULT_ENV), building_worker(nice=0):
        connector = worker_factory.make_connector(
            name, blocks, kv_caches=caches, peer_heartbeat_interval=interval
        )
    try:
        yield connector.connector_worker
    finally:
        connector.connector_worker.shutdown()


def measure_all(fork_server: ForkServer, quick: bool) -> dict[str, Any]:
    """Load the peers of every case."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    rows = [measure(fork_server, c, rounds) for c in (QUICK_CASES if quick else CASES)]
    return {"vllm": vllm.__version__, "rows": rows}


def measure(fork_server: ForkServer, case: Case, rounds: int) -> dict[str, Any]:
    """Load a peer turn by turn with stock and with ours."""
    with contextlib.ExitStack() as stack:
        # Only what is split by rank depends on the decoder's own blocks.
        blocks = case.descriptors // _descriptors_per_block() if case.ranks > 1 else 8
        workers = {
            name: stack.enter_context(building_decoder(name, blocks, interval))
            for name, interval in (("stock", 0.0), ("ours", 2.0))
        }
        worker = workers["stock"]
        port = free_port()
        arguments = {
            "engine_id": "large",
            "payload": msgspec.msgpack.encode(worker.xfer_handshake_metadata),
            "port": port,
            "blocks": case.descriptors // _descriptors_per_block(),
            "tp": case.ranks,
        }
        process = "benchmarks.loading:LargePrefillProcess"
        child = fork_server.spawn("large", process, arguments, {})
        stack.callback(child.close)
        longest: dict[str, list[float]] = {name: [] for name in workers}
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(rounds + 1):
            for name in sorted(workers, reverse=bool(number % 2)):
                turns = _load(workers[name], port, case.ranks)
                _unload(workers[name])
                # The first time takes new memory, and lasts longer for both.
                if number:
                    longest[name].append(max(turns) * 1e3)
                    seconds[name].append(sum(turns))
    return {"case": str(case), "longest_turn_ms": longest, "load_s": seconds}


@functools.cache
def _descriptors_per_block() -> int:
    with building_decoder("probe", 8, 0.0) as worker:
        return worker.num_descs // 8


def _load(worker: Any, port: int, tp: int) -> list[float]:
    """Shake hands with the peer while steps run; return the loop's turns in seconds."""
    metadata = NixlConnectorMetadata()
    turns = []
    worker._ensure_handshake("large", _HOST, port, tp)
    before = start = time.perf_counter()
    while "large" not in worker._remote_agents:
        worker.start_load_kv(metadata)
        worker.get_transfer_results()
        time.sleep(_STEP_PAUSE_S)
        now = time.perf_counter()
        turns.append(now - before)
        before = now
        assert now - start < _TIMEOUT_S, "the peer was not loaded"
    return turns


def _unload(worker: Any) -> None:
    """Forget the peer, and what was split for its ranks."""
    worker._cleanup_remote_engine("large", log_eviction=False)
    for handles in worker.src_xfer_handles_by_tp_ratio.values():
        for handle in handles:
            worker.nixl_wrapper.release_dlist_handle(handle)
    worker.src_xfer_handles_by_tp_ratio.clear()


def main() -> None:
    """Measure every case with this process's vLLM; print the results as JSON."""
    with contextlib.redirect_stdout(sys.stderr), running_fork_server() as fork_server:
        result = measure_all(fork_server, quick=False)
    print(json.dumps(result))
