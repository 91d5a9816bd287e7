# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Waiting for what another thread or process does, with evidence if it does not."""

import faulthandler
import time
from collections.abc import Callable
from typing import Any

# What a machine whose few cores are busy may add to the time that a test allows.
SLACK_S = 3.0
POLL_S = 0.005
_DUMP_AFTER_S = 10.0


def wait_until(
    condition: Callable[[], Any],
    deadline_s: float,
    evidence: Callable[[], str] = str,
    every: Callable[[], Any] | None = None,
    poll_s: float = POLL_S,
) -> float:
    """Wait for a condition; return the seconds it took.

    Args:
        condition: What to wait for.
        deadline_s: Seconds after which to give up.
        evidence: Describes what is going on, for the failure's message.
        every: Called before each check, for instance a decoder's step.
        poll_s: Seconds between two checks.

    Raises:
        AssertionError: If the condition does not come true in time.

    """
    start = time.monotonic()
    # Written even while a call into NIXL keeps the interpreter's lock: the failure
    # alone would not show who waited, and for what.
    faulthandler.dump_traceback_later(min(_DUMP_AFTER_S, 0.8 * deadline_s))
    try:
        while True:
            if every is not None:
                every()
            if condition():
                return time.monotonic() - start
            if time.monotonic() - start > deadline_s:
                raise AssertionError(f"not within {deadline_s} s\n{evidence()}")
            time.sleep(poll_s)
    finally:
        faulthandler.cancel_dump_traceback_later()
