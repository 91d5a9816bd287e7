# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real workers in push mode, prefills or decoders, here or in other processes."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from tests.support.fork_server import DEFAULT_ENV, ForkServer, environment, model_dir
from tests.support.ports import free_port
from tests.support.prefill_process import (
    building_worker,
    kv_pattern,
    serve_side_channel,
    watching_agents,
)
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
_LEASE_S = 600.0
_PUSH_TIMEOUT_S = 30.0
_numbers = itertools.count()


class PushProcess:
    """A worker in push mode; a child process's side, or used in this process."""

    stepping = True

    def __init__(
        self, engine_id: str, port: int, num_blocks: int, extra: dict[str, Any]
    ):
        """Build the worker, fill its KV cache and serve its side channel."""
        from tests.v1.kv_connector.unit.nixl_peers import worker_factory
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
            NixlConnectorMetadata,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
            NixlPushConnector,
        )

        self.engine_id = engine_id
        self.num_blocks = num_blocks
        self.finished_sending: list[str] = []
        self.finished: list[str] = []
        self.failed: list[str] = []
        self._new_metadata = NixlConnectorMetadata
        self._metadata = NixlConnectorMetadata()
        self._kv_caches = worker_factory.make_kv_caches(num_blocks)
        for layer, words in enumerate(self._words()):
            words.copy_(kv_pattern(engine_id, layer, *words.shape))
        with building_worker(), watching_agents() as agents:
            connector = worker_factory.make_connector(
                engine_id,
                num_blocks,
                connector_cls=NixlPushConnector,
                kv_caches=self._kv_caches,
                kv_connector="NixlPushConnector",
                **extra,
            )
        self.worker = connector.connector_worker
        (self.agent,) = agents
        payload = msgspec.msgpack.encode(self.worker.xfer_handshake_metadata)
        serve_side_channel({(0, 0): payload}, HOST, port)

    def _words(self) -> list[torch.Tensor]:
        caches = self._kv_caches.values()
        return [c.view(torch.int32).view(self.num_blocks, -1) for c in caches]

    def step(self) -> None:
        """Run one step and keep what it reports."""
        metadata, self._metadata = self._metadata, self._new_metadata()
        self.worker.start_load_kv(metadata)
        results = self.worker.get_transfer_results()
        self.finished_sending += sorted(results.finished_sending)
        self.failed += sorted(results.failed_recving)
        self.finished += sorted(results.finished_recving - results.failed_recving)

    def has_prefilled(self, req_id: str, blocks: list[int]) -> None:
        """As a prefill: have a request's blocks ready to be written."""
        self._metadata.reqs_in_batch.add(req_id)
        self._metadata.reqs_to_send[req_id] = time.perf_counter() + _LEASE_S
        self._metadata.push_finished_blocks[req_id] = (blocks,)
        self.step()

    def expect(
        self,
        req_id: str,
        blocks: list[int],
        engine_id: str,
        port: int,
        own: tuple[str, int],
    ) -> None:
        """As a decoder: register a request with a prefill."""
        for words in self._words():
            words[blocks] = 0
        remote = {
            "remote_engine_id": engine_id,
            "remote_host": HOST,
            "remote_port": port,
        }
        self._metadata.add_new_req_to_recv(
            req_id,
            (blocks,),
            {
                **remote,
                "remote_block_ids": (),
                "remote_request_id": req_id,
                "tp_size": 1,
            },
            local_num_computed_blocks=(0,),
            awaiting_kvs=True,
        )
        self._metadata.push_registrations[req_id] = {
            **remote,
            "request_id": req_id,
            "decode_engine_id": own[0],
            "decode_host": HOST,
            "decode_port": own[1],
            "decode_tp_size": 1,
            "local_block_ids": (blocks,),
            "remote_tp_size": 1,
            "remote_pp_size": 1,
        }
        self.step()

    def renew_lease(self, req_id: str, engine_id: str, port: int) -> None:
        """As a decoder: send the lease heartbeat that a scheduler asks for."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            HeartbeatInfo,
        )

        self._metadata.heartbeat_by_engine[engine_id] = HeartbeatInfo(
            req_ids={req_id}, host=HOST, port=port, tp_size=1
        )
        self.step()

    def holds(self, engine_id: str, blocks: list[int]) -> bool:
        """Return whether blocks have the bytes of an engine's."""
        return all(
            torch.equal(
                words[blocks], kv_pattern(engine_id, layer, *words.shape)[blocks]
            )
            for layer, words in enumerate(self._words())
        )

    def state(self) -> dict[str, Any]:
        """Return what tests look at."""
        return {
            "finished": list(self.finished),
            "failed": list(self.failed),
            "connected": sorted(self.worker._remote_agents),
            "violations": list(self.agent.violations),
            "notifs": dict(self.agent.notifs),
        }


class RemotePush:
    """A worker in push mode in a process of its own."""

    def __init__(
        self,
        fork_server: ForkServer,
        engine_id: str,
        *,
        port: int | None = None,
        num_blocks: int = 8,
        **extra: Any,
    ):
        """Start the process and wait until it serves handshakes.

        Args:
            fork_server: Where to start it.
            engine_id: Its engine id.
            port: Port of its side channel; a free one by default.
            num_blocks: Blocks in its KV cache.
            **extra: Keys of its ``kv_connector_extra_config``.

        """
        self.engine_id = engine_id
        self.port = port or free_port()
        self.child = fork_server.spawn(
            engine_id,
            "tests.support.push_instance:PushProcess",
            {
                "engine_id": engine_id,
                "port": self.port,
                "num_blocks": num_blocks,
                "extra": extra,
            },
            {},
        )
        self.close = self.child.close

    def state(self) -> dict[str, Any]:
        """Return what `PushProcess.state` reports."""
        return self.child.call("state")


class LocalPush(PushProcess):
    """A worker in push mode in this process, driven step by step."""

    def __init__(
        self,
        engine_id: str = "prefill",
        *,
        num_blocks: int = 8,
        **extra: Any,
    ):
        """Build the worker.

        Args:
            engine_id: Its engine id.
            num_blocks: Blocks in its KV cache.
            **extra: Keys of its ``kv_connector_extra_config``.

        """
        model_dir()
        self.port = free_port()
        with environment(**DEFAULT_ENV):
            super().__init__(engine_id, self.port, num_blocks, extra)
        self._log: list[str] = []
        self._handler = _Handler(self._log)
        logging.getLogger("vllm").addHandler(self._handler)

    @property
    def connected(self) -> set[str]:
        """Engines whose NIXL state is loaded."""
        return set(self.worker._remote_agents)

    def peers(self) -> dict[str, dict[str, Any]]:
        """Return what an operator sees, by engine id."""
        return {p["engine_id"]: p for p in self.worker.list_peers()["peers"]}

    def evidence(self) -> str:
        """Describe the worker."""
        return "\n".join([f"--- {self.state()}", repr(self.peers()), *self._log[-25:]])

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

    def register(self, decoder: RemotePush, blocks: Iterable[int]) -> str:
        """Have a decoder register a new request with this prefill."""
        req_id = f"request{next(_numbers)}"
        own = (decoder.engine_id, decoder.port)
        decoder.child.call(
            "expect", req_id, list(blocks), self.engine_id, self.port, own
        )
        return req_id

    def push(self, decoder: RemotePush, blocks: Iterable[int] = (0, 1)) -> None:
        """Write blocks to a decoder and have it check every byte of them."""
        req_id = self.register(decoder, blocks)
        self.has_prefilled(req_id, list(blocks))
        self.wait_until(lambda: req_id in self.finished_sending, _PUSH_TIMEOUT_S)
        self.check(decoder, req_id, blocks)

    def check(self, decoder: RemotePush, req_id: str, blocks: Iterable[int]) -> None:
        """Have a decoder check the bytes of a request once it has them."""
        self.wait_until(lambda: req_id in decoder.state()["finished"], _PUSH_TIMEOUT_S)
        assert decoder.child.call("holds", self.engine_id, list(blocks)), (
            f"wrong bytes from {self.engine_id}"
        )

    def close(self) -> None:
        """Shut the worker down."""
        logging.getLogger("vllm").removeHandler(self._handler)
        with contextlib.suppress(AttributeError):
            self.worker.shutdown()


class _Handler(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
