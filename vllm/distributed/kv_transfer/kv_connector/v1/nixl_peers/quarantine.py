# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Back-off of handshakes with engines that do not answer, or keep breaking.

A record outlives the peer's state, and is kept per engine and address: a wrong
address must not keep requests from the right one. Plain Python, no clock.
"""

import math
from dataclasses import dataclass

MIN_QUARANTINE_S = 1.0
MAX_QUARANTINE_S = 60.0
# A half-open attempt that nobody has answered for this long is not joined: the
# request would wait for its time-out.
_JOIN_WITHIN_S = 0.5
_MAX_DOUBLINGS = math.ceil(math.log2(MAX_QUARANTINE_S / MIN_QUARANTINE_S))
# Engine ids of dead instances never come back: their records must not pile up.
_FORGET_AFTER_S = 600.0


@dataclass(slots=True)
class _Record:
    until: float
    """End of the quarantine."""
    strikes: int = 0
    """Level of the back-off: 1 is free, each one more doubles the quarantine."""
    attempt_at: float = -math.inf
    """When the last half-open attempt began."""
    answered: bool = False
    """Whether the peer has answered the attempt that runs."""
    released: bool = False
    """Whether the engine's state was released since the last finished read."""


class Quarantine:
    """Which engines must not be tried now, through which address.

    Not thread-safe: the manager's lock guards it.
    """

    def __init__(self) -> None:
        """Create an empty quarantine."""
        self._records: dict[str, dict[str, _Record]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def has_record(self, engine_id: str, address: str) -> bool:
        """Return whether the engine was released or failed there lately."""
        return address in self._records.get(engine_id, ())

    def was_released(self, engine_id: str) -> bool:
        """Return whether the engine was released since its last finished read."""
        return any(r.released for r in self._records.get(engine_id, {}).values())

    def released(
        self, engine_id: str, address: str, now: float, *, failed: bool
    ) -> None:
        """Record a release.

        The first handshake after a release is free, later ones back off: each
        unload/load cycle leaves file descriptors behind in NIXL over TCP, so a
        connection that keeps breaking must not cycle freely.

        Args:
            engine_id: The engine that was released.
            address: The address that it was connected through.
            now: Current time.
            failed: Whether its connection had failed; a release that was asked for
                counts against nobody.

        """
        record = self._record(engine_id, address, now)
        record.released = True
        if failed:
            self._fail(record, record.strikes, now)

    def handshake_failed(self, engine_id: str, address: str, now: float) -> float:
        """Record a failed handshake; return for how many seconds it is refused."""
        record = self._record(engine_id, address, now)
        # Worse than a release: it quarantines from the first one on.
        self._fail(record, max(record.strikes, 1), now)
        return record.until - now

    @staticmethod
    def _fail(record: _Record, strikes: int, now: float) -> None:
        record.strikes = strikes + 1
        record.answered = False
        doublings = min(strikes - 1, _MAX_DOUBLINGS)
        if doublings >= 0:
            record.until = now + min(MIN_QUARANTINE_S * 2**doublings, MAX_QUARANTINE_S)

    def _record(self, engine_id: str, address: str, now: float) -> _Record:
        for other, records in list(self._records.items()):
            for where, record in list(records.items()):
                if now - record.until > _FORGET_AFTER_S:
                    del records[where]
            if not records:
                del self._records[other]
        return self._records.setdefault(engine_id, {}).setdefault(
            address, _Record(until=now)
        )

    def recovered(self, engine_id: str, address: str) -> None:
        """Record that a read finished: the connection works again."""
        records = self._records.get(engine_id)
        if records is not None:
            records.pop(address, None)
            if not records:
                del self._records[engine_id]

    def answered(self, engine_id: str) -> None:
        """Record that the peer has answered the handshake that runs."""
        for record in self._records.get(engine_id, {}).values():
            record.answered = True

    def refusal(
        self, engine_id: str, address: str, now: float, *, running: bool
    ) -> str | None:
        """Return why a request must not wait for a handshake now, or None.

        Args:
            engine_id: The engine to connect to; its state is not loaded.
            address: The address that the request names.
            now: Current time.
            running: Whether a handshake with the engine runs already.

        """
        record = self._records.get(engine_id, {}).get(address)
        if record is None or record.strikes < 2:
            return None
        if running and record.answered:
            return None
        if now < record.until:
            return f"quarantined for another {record.until - now:.1f} s"
        if not running:
            record.attempt_at = now
            record.answered = False
        elif now - record.attempt_at > _JOIN_WITHIN_S:
            return "quarantined, and has not answered the half-open attempt yet"
        return None
