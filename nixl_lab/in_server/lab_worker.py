# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the lab adds to a vLLM worker: the operator's calls, and a way to disturb it.

Loaded by the servers, not by the lab: nothing else of it is importable there.
"""

import ctypes

from vllm_nixl_heartbeat.nixl_peers.admin import NixlPeerWorkerExtension


class LabWorkerExtension(NixlPeerWorkerExtension):
    """The worker extension of every server of the lab."""

    def hold_interpreter(self, seconds: int) -> None:
        """Keeps the interpreter from every other thread, as a long C call does.

        Threads that need no interpreter, such as NIXL's, go on.
        """
        # Unlike CDLL, PyDLL does not let the interpreter go for the call.
        ctypes.PyDLL(None).sleep(seconds)
