# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A decoder in a process of its own, for what cannot be seen from within."""

import sys
from typing import Any

from tests.support.peers import Decoder, RemotePrefill


class DecoderProcess:
    """The child's side of a decoder; public methods are called by the test."""

    stepping = False

    def __init__(self, engine_id: str, extra: dict[str, Any]):
        """Build the decoder."""
        self.decoder = Decoder(engine_id, **extra)

    def read(self, engine_id: str, host: str, port: int, num_blocks: int) -> bool:
        """Read from a prefill, check the bytes; return whether a monitor runs."""
        self.decoder.read(RemotePrefill(engine_id, host, port, num_blocks))
        return getattr(self.decoder.worker, "_monitor", None) is not None

    def leave(self, shut_down: bool) -> None:
        """Let the interpreter end as any program's does."""
        if shut_down:
            self.decoder.close()
        print("leaving", flush=True)
        sys.exit()
