# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Threads that tests stop half-way."""

import threading
from collections.abc import Callable
from typing import Any

LONG = 30.0
"""Seconds; longer than any of these tests takes: it ends those that would hang."""


class Gate:
    """Stops the next call of a method of an object until it may go on."""

    def __init__(self, target: Any, method: str):
        self.inside = threading.Event()
        self.go = threading.Event()
        original = getattr(target, method)

        def gated(*args: Any, **kwargs: Any) -> Any:
            setattr(target, method, original)
            self.inside.set()
            assert self.go.wait(LONG)
            return original(*args, **kwargs)

        setattr(target, method, gated)


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    """Have another thread make a call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
