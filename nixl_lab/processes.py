# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the lab asks of the kernel: priorities, signals, the end of processes."""

import contextlib
import ctypes
import os
import signal
import time

import psutil

_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.02
_LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def wait_until_ended(processes: list[psutil.Process]) -> None:
    """Waits for processes that are not children of this one.

    One that has ended may stay a zombie for as long as init does not collect it.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"process {process.pid} survived SIGKILL")
                time.sleep(_POLL_S)


def ask_for_sigterm_when_parent_dies() -> None:
    """For `preexec_fn`: whatever ends this process, its child learns of it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def settle_threads(pid: int) -> None:
    """Lets several workers share few cores.

    vLLM pins the main thread and all NIXL threads to the last core, the same one
    for every server, and NIXL's progress thread polls without a pause: without
    this the servers starve each other.
    """
    cores = range(os.cpu_count() or 1)
    for thread in os.listdir(f"/proc/{pid}/task"):
        tid = int(thread)
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(tid, cores)
            if tid != pid:
                os.setpriority(os.PRIO_PROCESS, tid, _LOWEST_PRIORITY)
