# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real connector workers on real NIXL agents: prefills in processes, decoders here."""

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.fork_server import DEFAULT_ENV, ForkServer, environment, model_dir
from tests.support.ports import free_port
from tests.support.prefill_process import building_worker, kv_pattern, watching_agents
from tests.support.waiting import wait_until
from tests.v1.kv_connector.unit.nixl_peers import worker_factory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

_READ_TIMEOUT_S = 60.0


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_LOG = _ListHandler()


@dataclass
class RemotePrefill:
    """What a decoder has to know about a prefill."""

    engine_id: str
    host: str
    port: int
    num_blocks: int

    def expect(self, req_id: str) -> None:
        """Do not tell the prefill: nobody here can."""

    def evidence(self) -> str:
        """Say that nothing more is known."""
        return f"--- {self}"


class Prefill(RemotePrefill):
    """A prefill in a process of its own: real worker, real agent, side channel."""

    def __init__(
        self,
        fork_server: ForkServer,
        engine_id: str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        num_blocks: int = 8,
        stepping: bool = True,
        env: dict[str, str] | None = None,
        **extra: Any,
    ):
        """Start the process and wait until it serves handshakes.

        Args:
            fork_server: Where to start it.
            engine_id: Its engine id.
            host: Address of its side channel.
            port: Port of its side channel; a free one by default.
            num_blocks: Blocks in its KV cache, which `kv_pattern` fills.
            stepping: Whether it takes a step every 10 ms, or none until told.
            env: Environment variables to set.
            **extra: Keys of its ``kv_connector_extra_config``;
                ``peer_heartbeat_interval=0`` makes it a stock prefill.

        """
        super().__init__(engine_id, host, port or free_port(), num_blocks)
        self.child = fork_server.spawn(
            engine_id,
            "tests.support.prefill_process:PrefillProcess",
            {
                "engine_id": engine_id,
                "host": host,
                "port": self.port,
                "num_blocks": num_blocks,
                "stepping": stepping,
                "extra": extra,
            },
            env or {},
        )
        self.call = self.child.call
        self.kill = self.child.kill
        self.stop = self.child.stop
        self.resume = self.child.resume
        self.close = self.child.close

    def expect(self, req_id: str) -> None:
        """Tell a prefill that can hear it to hold a request's blocks."""
        if self.child.responsive:
            self.call("expect", req_id)

    def evidence(self) -> str:
        """Return the end of the process's log."""
        return self.child.evidence()

    def state(self) -> dict[str, Any]:
        """Return what `PrefillProcess.state` reports."""
        return self.call("state")


class Decoder:
    """A decoder in this process: the real worker, driven step by step."""

    def __init__(
        self,
        engine_id: str = "decoder",
        *,
        num_blocks: int = 8,
        env: dict[str, str] | None = None,
        nice: int = 19,
        **extra: Any,
    ):
        """Build the worker.

        Args:
            engine_id: Its engine id.
            num_blocks: Blocks in its KV cache.
            env: Environment variables to set while the NIXL agent is made.
            nice: Niceness of NIXL's threads, see `building_worker`.
            **extra: Keys of its ``kv_connector_extra_config``;
                ``peer_heartbeat_interval=0`` builds the stock worker.

        """
        model_dir()
        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.kv_caches = worker_factory.make_kv_caches(num_blocks)
        self.finished: list[str] = []
        """Requests reported as received."""
        self.failed: list[str] = []
        """Requests reported as failed."""
        self.invalid_blocks: set[int] = set()
        """Local blocks reported as not loaded."""
        self._prefills: dict[str, RemotePrefill] = {}
        self._req_ids = itertools.count()
        self._metadata = NixlConnectorMetadata()
        with (
            environment(**DEFAULT_ENV | (env or {})),
            building_worker(nice),
            watching_agents() as agents,
        ):
            connector = worker_factory.make_connector(
                engine_id, num_blocks, kv_caches=self.kv_caches, **extra
            )
        self.connector = connector
        self.worker = connector.connector_worker
        (self.agent,) = agents
        # Again for each decoder: a new vLLM configuration resets vLLM's loggers.
        logging.getLogger("vllm").addHandler(_LOG)
        self._log_start = len(_LOG.lines)

    # -- Reads -----------------------------------------------------------------

    def start(
        self,
        prefill: RemotePrefill,
        blocks: Iterable[int] = (0, 1),
        local_blocks: Iterable[int] | None = None,
        is_local_hit: bool = False,
    ) -> str:
        """Ask for blocks of a prefill in the next step; return the request's id.

        Args:
            prefill: Where to read from.
            blocks: The prefill's blocks.
            local_blocks: Where to put them; the same numbers by default.
            is_local_hit: Whether all are in the decoder's own cache: the request
                goes on at once, and the prefill is notified.

        """
        blocks = list(blocks)
        local_blocks = blocks if local_blocks is None else list(local_blocks)
        req_id = f"{self.engine_id}-{next(self._req_ids)}"
        self._prefills[prefill.engine_id] = prefill
        prefill.expect(f"remote-{req_id}")
        for cache in self.kv_caches.values():
            cache[local_blocks] = 0
        self._metadata.add_new_req_to_recv(
            req_id,
            () if is_local_hit else (local_blocks,),
            {
                "remote_block_ids": (blocks,),
                "remote_engine_id": prefill.engine_id,
                "remote_request_id": f"remote-{req_id}",
                "remote_host": prefill.host,
                "remote_port": prefill.port,
                "tp_size": 1,
            },
            local_num_computed_blocks=(0,),
            awaiting_kvs=not is_local_hit,
        )
        return req_id

    def step(self) -> Any:
        """Run one step and keep what it reports."""
        metadata, self._metadata = self._metadata, NixlConnectorMetadata()
        self.worker.start_load_kv(metadata)
        results = self.worker.get_transfer_results()
        self.failed += sorted(results.failed_recving)
        self.finished += sorted(results.finished_recving - results.failed_recving)
        self.invalid_blocks |= self.worker.get_block_ids_with_load_errors()
        return results

    def wait_until(
        self, condition: Callable[[], Any], deadline_s: float, stepping: bool = True
    ) -> float:
        """Wait for a condition, stepping meanwhile; return the seconds it took."""
        return wait_until(
            condition,
            deadline_s,
            self.evidence,
            every=self.step if stepping else None,
        )

    def wait_for(self, req_id: str, deadline_s: float = _READ_TIMEOUT_S) -> bool:
        """Step until a request is reported; return whether it was received."""
        self.wait_until(
            lambda: req_id in self.finished or req_id in self.failed, deadline_s
        )
        return req_id in self.finished

    def read(
        self,
        prefill: RemotePrefill,
        blocks: Iterable[int] = (0, 1),
        local_blocks: Iterable[int] | None = None,
        deadline_s: float = _READ_TIMEOUT_S,
    ) -> None:
        """Read blocks and check every byte of them."""
        blocks = list(blocks)
        local_blocks = blocks if local_blocks is None else list(local_blocks)
        req_id = self.start(prefill, blocks, local_blocks)
        assert self.wait_for(req_id, deadline_s), f"{req_id} failed\n{self.evidence()}"
        self.check(prefill, blocks, local_blocks)

    def check(
        self, prefill: RemotePrefill, blocks: list[int], local_blocks: list[int]
    ) -> None:
        """Check that blocks hold what the prefill has."""
        for layer, cache in enumerate(self.kv_caches.values()):
            words = cache.view(torch.int32).view(self.num_blocks, -1)
            expected = kv_pattern(
                prefill.engine_id, layer, prefill.num_blocks, words.shape[1]
            )
            assert torch.equal(words[local_blocks].cpu(), expected[blocks]), (
                f"wrong bytes from {prefill.engine_id}, layer {layer}"
            )

    # -- What is known ---------------------------------------------------------

    @property
    def connected(self) -> set[str]:
        """Engines whose NIXL state is loaded."""
        return set(self.worker._remote_agents)

    def agent_of(self, engine_id: str) -> str:
        """Return the agent of a connected engine."""
        (agent,) = self.worker._remote_agents[engine_id].values()
        return agent

    @property
    def handshakes(self) -> set[str]:
        """Engines that a handshake is running with."""
        return set(self.worker._handshake_futures)

    @property
    def in_flight(self) -> set[str]:
        """Requests with reads in flight."""
        return set(self.worker._recving_transfers)

    def peers(self) -> dict[str, dict[str, Any]]:
        """Return what an operator sees, by engine id; nothing of a stock worker."""
        list_peers = getattr(self.worker, "list_peers", None)
        peers = list_peers()["peers"] if list_peers else []
        return {peer["engine_id"]: peer for peer in peers}

    @property
    def log(self) -> list[str]:
        """What vLLM has logged in this process since the decoder was built."""
        return _LOG.lines[self._log_start :]

    def lines(self, start: str) -> list[str]:
        """Return this decoder's log lines with a context that begin like this."""
        own = f"'engine_id': '{self.engine_id}'"
        return [line for line in self.log if line.startswith(start) and own in line]

    def evidence(self) -> str:
        """Describe the worker and the prefills it has read from."""
        state = {
            "connected": sorted(self.connected),
            "reads in flight": sorted(self.in_flight),
            "handshakes": sorted(self.handshakes),
            "peers": self.peers(),
            "finished": self.finished[-5:],
            "failed": self.failed[-5:],
        }
        parts = [f"--- {self.engine_id}: {state}", *self.log[-25:]]
        parts += [prefill.evidence() for prefill in self._prefills.values()]
        return "\n".join(parts)

    def close(self) -> None:
        """Shut the worker down."""
        self.worker.shutdown()
