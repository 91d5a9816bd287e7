# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A command line of the lab with fake servers in vLLM's place.

Run as `lab_with_fakes.py drill|demo|soak FLAW ARGUMENT...`.
"""

import importlib
import signal
import sys
from pathlib import Path

import psutil

from nixl_lab import scenarios, session, soak
from nixl_lab.servers import VllmServer


def command(server: VllmServer, flaw: str) -> list[str]:
    fake = Path(__file__).with_name("fake_vllm.py")
    return [sys.executable, str(fake), str(server.port), flaw]


def processes(server: VllmServer, title: str) -> list[psutil.Process]:
    return [p for p in server._members() if "fake_vllm" in p.cmdline()[1]]


if __name__ == "__main__":
    # Ignored where tests run in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, flaw, *arguments = sys.argv[1:]
    setattr(VllmServer, "_command", lambda server: command(server, flaw))  # noqa: B010
    setattr(session, "ensure_model", lambda cache: cache)  # noqa: B010
    setattr(VllmServer, "processes", processes)  # noqa: B010
    scenarios._STEADY_S = 0.3
    soak._PAUSES_S = (0.0, 0.2)
    soak._STOPS_S = (0.5,)
    soak._SETTLE_S = 0.3
    sys.exit(importlib.import_module(f"nixl_lab.{module}").main(arguments))
