# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The thread that does the peer work of a step while no step runs.

An engine without requests runs no step, so an idle decoder would never notice that a
peer has died.
"""

import atexit
import threading
import weakref
from typing import Any, Protocol

from vllm.logger import init_logger

logger = init_logger(__name__)

_JOIN_TIMEOUT_S = 1.0
# Between two rounds when work is left: a Python lock is not fair, and taking it again
# at once could keep a step out.
_PAUSE_S = 0.001


class MonitoredWorker(Protocol):
    """What the monitor calls, on its own thread."""

    def _run_idle_round(self) -> bool: ...


class PeerMonitor:
    """A thread that runs a worker's rounds until stopped, or the worker is gone.

    It holds no strong reference between rounds, so it keeps no worker alive; and it is
    stopped before the interpreter finalises, when a thread inside native code would
    abort the process.
    """

    def __init__(self, worker: MonitoredWorker, period: float):
        """Prepare the thread.

        Args:
            worker: The worker; its round returns whether work is left.
            period: Seconds between two rounds with nothing left.

        """
        self._worker = weakref.ref(worker)
        self._period = period
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="vllm-nixl-peer-monitor", daemon=True
        )

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: If there are no threads left.

        """
        self._thread.start()
        atexit.register(self.stop)

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> bool:
        """Stop the thread and wait up to a second; return whether it has ended."""
        self._stopping.set()
        atexit.unregister(self.stop)
        if self._thread is threading.current_thread():
            # Its round held the last reference to the worker; it ends after this.
            return True
        if self._thread.ident:
            self._thread.join(_JOIN_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        logged: set[str] = set()
        wait = self._period
        while not self._stopping.wait(wait):
            worker: Any = self._worker()
            if worker is None:
                break
            wait = self._period
            try:
                if worker._run_idle_round():
                    wait = _PAUSE_S
            except Exception as e:
                # An error must not end the monitor; nor fill the log.
                if (kind := type(e).__name__) not in logged:
                    logged.add(kind)
                    logger.exception("NIXL peer monitor: round failed")
            del worker
