# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Peers for a decoder in this process: NIXL agents in processes of their own."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.fork_server import ForkServer


@contextlib.contextmanager
def running_fork_server() -> Iterator[ForkServer]:
    """Yield a process that forks prefills; they and their logs go with it."""
    with (
        tempfile.TemporaryDirectory(prefix="nixl-bench-") as folder,
        contextlib.closing(ForkServer(Path(folder))) as fork_server,
    ):
        yield fork_server
