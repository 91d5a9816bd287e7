# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Processes of bare NIXL agents, for tests that need one alone or a hundred."""

from typing import Any

import msgspec
import torch
from nixl._api import nixl_agent, nixl_agent_config

from tests.support.prefill_process import building_worker, serve_side_channel


def make_agent(name: str) -> nixl_agent:
    """Create an agent like a worker's."""
    with building_worker():
        return nixl_agent(name, nixl_agent_config(num_threads=0))


class AgentProcess:
    """One agent with registered memory."""

    stepping = False

    def __init__(self, name: str, size: int):
        """Create the agent.

        Args:
            name: Its name.
            size: Bytes of memory to register.

        """
        self._agent = make_agent(name)
        self._memory = torch.ones(size, dtype=torch.uint8)
        self._agent.register_memory(self._memory)

    def describe(self) -> tuple[bytes, int]:
        """Return the agent's metadata and the address of its memory."""
        return self._agent.get_agent_metadata(), self._memory.data_ptr()

    def notify(self, metadata: bytes, message: bytes) -> None:
        """Send a notification to the agent with this metadata."""
        self._agent.send_notif(self._agent.add_remote_agent(metadata), message)


class PrefillGroupProcess:
    """Many prefills: an agent and a side channel each, one memory for all.

    The agents have no progress thread, which would spin on a core each; a step
    makes progress on all of them.
    """

    stepping = True

    def __init__(self, engine_ids: list[str], payload: bytes, ports: list[int]):
        """Create the agents and serve their side channels.

        Args:
            engine_ids: Engine ids.
            payload: The handshake reply of a worker; each engine answers it with
                its own id and agent.
            ports: Ports of the side channels.

        """
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
            NixlAgentMetadata,
            NixlHandshakePayload,
        )

        self._agents: list[Any] = []
        reply = msgspec.msgpack.decode(payload, type=NixlHandshakePayload)
        metadata = msgspec.msgpack.decode(
            reply.agent_metadata_bytes, type=NixlAgentMetadata
        )
        self._memory = torch.zeros(metadata.num_blocks * max(metadata.block_strides))
        for engine_id, port in zip(engine_ids, ports, strict=True):
            config = nixl_agent_config(enable_prog_thread=False, num_threads=0)
            agent = nixl_agent(f"agent-{engine_id}", config)
            agent.register_memory(self._memory)
            self._agents.append(agent)
            metadata.engine_id = engine_id
            metadata.agent_metadata = agent.get_agent_metadata()
            base = self._memory.data_ptr()
            metadata.kv_caches_base_addr = [base] * len(metadata.kv_caches_base_addr)
            reply.agent_metadata_bytes = msgspec.msgpack.encode(metadata)
            payloads = {(0, 0): msgspec.msgpack.encode(reply)}
            serve_side_channel(payloads, "127.0.0.1", port)

    def step(self) -> None:
        """Make progress on every agent and drop its notifications."""
        for agent in self._agents:
            agent.get_new_notifs()

    def rest(self) -> None:
        """Only answer the side channels from now on."""
        self.stepping = False
