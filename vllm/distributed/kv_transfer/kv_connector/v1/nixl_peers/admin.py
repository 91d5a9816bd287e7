# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Listing and releasing NIXL peers by hand, over vLLM's collective RPC.

Off unless vLLM is started with ``--worker-extension-cls`` naming
:class:`NixlPeerWorkerExtension`. An idle engine serves these calls as well.
"""

from collections.abc import Iterator
from typing import Any


class NixlPeerWorkerExtension:
    """Methods of a vLLM worker; an extension of the operator's may derive from it."""

    def list_nixl_peers(self) -> dict[str, Any]:
        """List the peers of this rank; see ``NixlConnectorWorker.list_peers``."""
        listed = [worker.list_peers() for worker in _nixl_workers()]
        return {
            "peers": [peer for each in listed for peer in each["peers"]],
            "unread_requests": sum(each["unread_requests"] for each in listed),
            "unread_lease_s": max((e["unread_lease_s"] for e in listed), default=0.0),
        }

    def release_nixl_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        """Release peers on this rank; see ``NixlConnectorWorker.release_peers``."""
        answers = [w.release_peers(engine_id, address) for w in _nixl_workers()]
        found = [answer for answer in answers if answer["result"] != "unknown"]
        if not found:
            known = [peer for answer in answers for peer in answer["known"]]
            return {
                "result": "unknown",
                "engine_ids": [],
                "in_flight_reads": 0,
                "known": known,
            }
        busy = any(answer["result"] == "busy" for answer in found)
        return {
            "result": "busy" if busy else "released",
            "engine_ids": [e for answer in found for e in answer["engine_ids"]],
            "in_flight_reads": sum(answer["in_flight_reads"] for answer in found),
        }


def _nixl_workers() -> Iterator[Any]:
    """Yield our NIXL workers of this rank: one, or several in a MultiConnector."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    connectors: list[Any] = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    while connectors:
        connector = connectors.pop()
        connectors.extend(getattr(connector, "_connectors", ()))
        worker = getattr(connector, "connector_worker", None)
        if hasattr(worker, "release_peers"):
            yield worker
