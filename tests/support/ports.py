# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TCP ports for servers that a test is about to start."""

import contextlib
import random
import socket

# From anywhere: other tests may run on this machine at the same time.
_PORTS = iter(range(random.SystemRandom().randrange(15_000, 25_000), 32_000))


def free_port() -> int:
    """Return a TCP port that nothing listens on; a new one each time.

    It lies below the ports that the kernel hands out, so that no connection takes
    it before a prefill that has yet to start does.
    """
    for port in _PORTS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            return port
    raise AssertionError("no port is free")
