# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A side channel whose answers the test decides."""

from collections.abc import Iterator

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.monitor import Answer

ANSWER_TIMEOUT_S = 5.0


class FakeSideChannel:
    """Stands in for ``SideChannel``; time is what the caller says it is."""

    def __init__(self) -> None:
        self.answered_by: dict[str, str] = {}
        """Engine that answers at an engine's address; nobody if it is not here."""
        self.asked: list[tuple[str, tuple[str, int], tuple[int, int]]] = []
        """Every question: the engine, its address and the rank."""
        self._open: dict[str, float] = {}

    def ask(
        self,
        engine_id: str,
        address: tuple[str, int],
        rank: tuple[int, int],
        now: float,
    ) -> bool:
        """Record a question, unless one to this engine is open."""
        if engine_id in self._open:
            return False
        self._open[engine_id] = now
        self.asked.append((engine_id, address, rank))
        return True

    def answers(self, now: float) -> Iterator[Answer]:
        """Yield the answers to questions, and those that have timed out."""
        for engine_id, asked_at in list(self._open.items()):
            answered_by = self.answered_by.get(engine_id)
            if answered_by is not None or now - asked_at >= ANSWER_TIMEOUT_S:
                del self._open[engine_id]
                yield Answer(engine_id, asked_at, answered_by)

    def close(self) -> None:
        """Forget every open question."""
        self._open.clear()
