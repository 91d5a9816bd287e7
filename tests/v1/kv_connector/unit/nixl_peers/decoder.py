# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The real connector worker on a fake NIXL agent, driven step by step.

Time is a number that the test moves, and handshakes run when the test says so:
nothing here sleeps or depends on the scheduling of threads.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from nixl._bindings import nixlRemoteDisconnectError

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo

from .fake_nixl import FakeNixl
from .worker_factory import make_connector, per_engine_state

HOST = "127.0.0.1"


class Clock:
    """Stands in for the ``time`` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        """Return the time that the test has set, in seconds."""
        return self.now


class ManualExecutor:
    """Runs submitted handshakes when told to, in the caller's thread."""

    def __init__(self) -> None:
        self.pending: list[tuple[Future, Callable, tuple]] = []

    def submit(self, fn: Callable, *args: Any) -> Future:
        """Queue a call."""
        future: Future = Future()
        self.pending.append((future, fn, args))
        return future

    def run(self) -> None:
        """Run everything that is queued."""
        pending, self.pending = self.pending, []
        for future, fn, args in pending:
            try:
                result = fn(*args)
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing."""


class Decoder:
    """A decode worker and what its scheduler would see of it."""

    def __init__(self, connector: Any, nixl: FakeNixl, clock: Clock):
        self.connector = connector
        self.worker = connector.connector_worker
        self.nixl = nixl
        self.clock = clock
        self.handshakes = ManualExecutor()
        self.worker._handshake_initiation_executor = self.handshakes
        self.prefills: dict[str, Any] = {}
        """Agents by engine id, or what a handshake with the engine raises."""
        self.attempts: list[str] = []
        """Engines of all handshakes that have run."""
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.metadata = NixlConnectorMetadata()
        """What the scheduler asks for in the next step."""

    # -- The other side ---------------------------------------------------------

    def serve_handshake(
        self, worker: Any, host: str, port: int, tp_size: int, engine_id: str
    ) -> Any:
        """Do what the stock handshake does once it has a peer's answer."""
        self.attempts.append(engine_id)
        answer = self.prefills[engine_id]
        if callable(answer):
            answer = answer(host, port)
        if isinstance(answer, Exception):
            raise answer
        names = {}
        for rank, agent in enumerate(answer):
            if isinstance(agent, Exception):
                raise agent
            metadata = self.remote_metadata(engine_id, agent, len(answer))
            names[(0, rank)] = worker.add_remote_agent(metadata, rank, len(answer), 1)
        return names, 0.0

    def remote_metadata(
        self, engine_id: str, agent: str, tp_size: int
    ) -> NixlAgentMetadata:
        """Return what a prefill rank would answer: our own layout, split by TP."""
        payload = self.worker.xfer_handshake_metadata
        metadata = msgspec.msgpack.decode(
            payload.agent_metadata_bytes, type=NixlAgentMetadata
        )
        metadata.engine_id = engine_id
        metadata.agent_metadata = f"{agent}/{len(self.attempts)}".encode()
        metadata.block_lens = [n // tp_size for n in metadata.block_lens]
        metadata.block_strides = [n // tp_size for n in metadata.block_strides]
        return metadata

    # -- Our side -----------------------------------------------------------------

    def connect(self, engine_id: str, *agents: str, port: int | None = None) -> None:
        """Connect to an engine; its agent has its name unless named."""
        self.prefills.setdefault(engine_id, list(agents) or [f"{engine_id}-agent"])
        prefill = self.prefills[engine_id]
        tp_size = len(prefill) if isinstance(prefill, list) else 1
        port = port if port is not None else 5000 + len(self.prefills)
        self.worker._ensure_handshake(engine_id, HOST, port, tp_size)
        self.run_handshakes()

    def run_handshakes(self) -> None:
        """Run all pending handshakes."""
        self.handshakes.run()

    def request(
        self,
        req_id: str,
        engine_id: str,
        blocks: tuple[int, ...] = (0, 1),
        port: int = 6000,
        host: str = HOST,
    ) -> None:
        """Ask for a remote prefill's blocks in the next step."""
        prefill = self.prefills.get(engine_id)
        tp_size = len(prefill) if isinstance(prefill, list) else 1
        self.metadata.add_new_req_to_recv(
            req_id,
            (list(blocks),),
            {
                "remote_block_ids": (list(blocks),),
                "remote_engine_id": engine_id,
                "remote_request_id": f"remote-{req_id}",
                "remote_host": host,
                "remote_port": port,
                "tp_size": tp_size,
            },
            local_num_computed_blocks=(0,),
            awaiting_kvs=True,
        )

    def read(self, req_id: str, engine_id: str, **where: Any) -> None:
        """Read from an engine of one agent, connecting first if need be."""
        self.request(req_id, engine_id, **where)
        self.step()
        self.run_handshakes()
        self.step()
        self.nixl.finish_reads(f"{engine_id}-agent")
        self.step()

    def kill(self, *engine_ids: str) -> None:
        """Let the connections to some engines break, or to all."""
        for peer in self.nixl.peers.values():
            if not engine_ids or peer.name.removesuffix("-agent") in engine_ids:
                peer.die()

    def break_under_a_read(self, req_id: str = "r", engine_id: str = "p") -> None:
        """Have a peer found unreachable while a read from it is in flight."""
        self.connect(engine_id)
        self.request(req_id, engine_id)
        self.step()
        self.nixl.raises["send_notif"] = [nixlRemoteDisconnectError("gone")]
        self.steps(1.1 * self.worker._peers.interval)
        assert self.states()[engine_id] == "unreachable"

    def release_all(self) -> None:
        """Let every connection break, and the heartbeats find it."""
        self.kill()
        self.steps(1.1 * self.worker._peers.interval)
        for _ in range(len(self.connected)):
            self.step()
        assert self.connected == set()

    def lease_heartbeat(self, engine_id: str, *req_ids: str, port: int = 6000) -> None:
        """Let the scheduler's lease heartbeat go out in the next step."""
        self.metadata.heartbeat_by_engine[engine_id] = HeartbeatInfo(
            req_ids=set(req_ids), host=HOST, port=port, tp_size=1
        )

    def serve(self, req_id: str, lease: float = 30.0) -> None:
        """Have a decoder still to read a request's blocks from here."""
        self.worker._reqs_to_process.add(req_id)
        self.worker._reqs_to_send[req_id] = self.clock.now + lease

    def start_step(self, seconds: float = 0.0) -> None:
        """Let time pass, then run the first half of a step."""
        self.clock.now += seconds
        metadata, self.metadata = self.metadata, NixlConnectorMetadata()
        self.worker.start_load_kv(metadata)

    def end_step(self) -> Any:
        """Run the second half of a step; return its transfer results."""
        results = self.worker.get_transfer_results()
        self.failed += sorted(results.failed_recving)
        self.finished += sorted(results.finished_recving - results.failed_recving)
        return results

    def step(self, seconds: float = 0.0) -> Any:
        """Let time pass, then run one step; return its transfer results."""
        self.start_step(seconds)
        return self.end_step()

    def steps(self, duration: float, every: float = 0.1) -> None:
        """Run steps for some time."""
        for _ in range(round(duration / every)):
            self.step(every)

    def idle_round(self, seconds: float = 0.0) -> bool:
        """Let time pass, then run a round as the monitor does; is work left?"""
        self.clock.now += seconds
        return self.worker._run_idle_round()

    def idle(self, duration: float, every: float = 0.1) -> None:
        """Let the monitor run for some time."""
        for _ in range(round(duration / every)):
            left = self.idle_round(every)
            while left:
                left = self.idle_round()

    @property
    def connected(self) -> set[str]:
        """Engines whose state is loaded."""
        return set(self.worker._remote_agents)

    def states(self) -> dict[str, str]:
        """State of each peer, as operators see it."""
        listed = self.worker.list_peers()["peers"]
        return {peer["engine_id"]: peer["state"] for peer in listed}

    def counted(self) -> dict[str, float]:
        """Peer statistics that a step hands over now, summed up by name."""
        stats = self.worker.get_kv_connector_stats()
        data = stats.data if stats is not None else {}
        return {name: sum(values) for name, values in data.items() if values}

    def is_clean(self, engine_id: str) -> bool:
        """Return whether nothing about an engine is left, but its back-off."""
        worker = self.worker
        registered = {key[0] for key in worker.transfer_topo._engines}
        return (
            all(engine_id not in mapping for mapping in per_engine_state(worker))
            and engine_id not in worker._engine_by_address.values()
            and engine_id not in registered
        )


def make_decoder(
    monkeypatch: Any, engine_id: str = "decoder", **arguments: Any
) -> Decoder:
    """Build a decoder on a fake NIXL agent and a manual clock.

    Args:
        monkeypatch: pytest's fixture.
        engine_id: Id of the decoder's engine.
        **arguments: Passed on to ``make_connector``.

    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
        base_worker,
        pull_worker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import worker

    clock = Clock()
    agents: list[FakeNixl] = []

    def make_agent(*args: Any) -> FakeNixl:
        agents.append(FakeNixl(*args))
        return agents[-1]

    monkeypatch.setattr(base_worker, "NixlWrapper", make_agent)
    monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    for module in (base_worker, pull_worker, worker):
        monkeypatch.setattr(module, "time", clock)
    connector = make_connector(engine_id, **arguments)
    decoder = Decoder(connector, agents[-1], clock)

    def nixl_handshake(
        self: Any, host: str, port: int, tp_size: int, engine_id: str, *_: Any
    ) -> Any:
        return decoder.serve_handshake(self, host, port, tp_size, engine_id)

    monkeypatch.setattr(
        base_worker.NixlBaseConnectorWorker, "_nixl_handshake", nixl_handshake
    )
    # A peer that was released lately is checked first; there is no listener here.
    monkeypatch.setattr(worker, "check_listener", lambda host, port: None)
    monkeypatch.setattr(worker.PeerWorkerMixin, "_start_monitor", lambda worker: None)
    return decoder
