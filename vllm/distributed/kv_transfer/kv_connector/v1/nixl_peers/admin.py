# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Listing and releasing NIXL peers by hand, over vLLM's collective RPC.

Off unless vLLM is started with ``--worker-extension-cls`` naming
:class:`NixlPeerWorkerExtension`. An idle engine serves these calls as well.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .worker import PeerWorkerMixin as _PeerWorker
else:
    _PeerWorker = object


class PeerAdminMixin(_PeerWorker):
    """Lists and releases the peers of one worker."""

    def list_peers(self) -> dict[str, Any]:
        """Return what is known about the peers, and what is still to be read from here.

        Returns:
            ``peers``, one dict per connected peer: ``engine_id``, ``address``
            ("host:port"), ``agents``, ``state`` ("connected", "suspect",
            "unreachable", "releasing"), ``since_proof_of_life_s``,
            ``in_flight_reads`` and ``last_error`` (None if there was none).
            ``unread_requests``, the requests whose blocks decoders are still to read
            from this engine, and ``unread_lease_s``, after which the last of their
            leases ends.

        """
        assert self._peers is not None
        with self._peers.lock:
            now = self._peers.clock()
            # What has been read while no step ran is accounted for by the next one;
            # each of a request's readers notifies, with the number of them.
            num_read: Counter[str] = Counter(self.consumer_notification_counts_by_req)
            read = set()
            for notif in self._agent.kept_notifs():
                req_id, _, readers = notif.decode("utf-8", "replace").rpartition(":")
                num_read[req_id] += 1
                if str(num_read[req_id]) == readers:
                    read.add(req_id)
            unread = [
                lease_end - now
                for req_id, lease_end in self._reqs_to_send.items()
                if lease_end > now and req_id not in read
            ]
            return {
                "peers": self._peers.list_peers(),
                "unread_requests": len(unread),
                "unread_lease_s": round(max(unread, default=0.0), 3),
            }

    def release_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        """Release the peers that the operator names as soon as nothing is in flight.

        The next request for a released engine connects again.

        Args:
            engine_id: Engine to release.
            address: Side channel of the engines to release, "host:port".

        Returns:
            ``result``: "released"; "busy" if reads in flight defer it (it goes when
            they end, and takes no new ones until then) or a handshake is running; or
            "unknown". ``engine_ids`` found, ``in_flight_reads`` from them, and with
            "unknown" the ``known`` peers.

        """
        assert self._peers is not None
        with self._peers.lock:
            named = self._peers.request_release(engine_id, address)
            while self._release_unreachable_remote_engines():
                pass
            peers = self._peers.list_peers()
            left = [peer for peer in peers if peer["engine_id"] in named]
            connecting = engine_id not in named and (
                engine_id in self._handshake_futures or engine_id in self._remote_agents
            )
            result: dict[str, Any] = {
                "result": "released",
                "engine_ids": named or ([engine_id] if connecting else []),
                "in_flight_reads": sum(peer["in_flight_reads"] for peer in left),
            }
            if left or connecting:
                result["result"] = "busy"
            elif not named:
                result["result"] = "unknown"
                result["known"] = [
                    {key: peer[key] for key in ("engine_id", "address")}
                    for peer in peers
                ]
            return result


class NixlPeerWorkerExtension:
    """Methods of a vLLM worker; an extension of the operator's may derive from it."""

    def list_nixl_peers(self) -> dict[str, Any]:
        """List the peers of this rank; see ``NixlConnectorWorker.list_peers``.

        Returns:
            The same, and ``enabled``: whether peers are managed here at all.

        """
        listed = [worker.list_peers() for worker in _nixl_workers()]
        return {
            "enabled": bool(listed),
            "peers": [peer for each in listed for peer in each["peers"]],
            "unread_requests": sum(each["unread_requests"] for each in listed),
            "unread_lease_s": max((e["unread_lease_s"] for e in listed), default=0.0),
        }

    def release_nixl_peers(
        self, engine_id: str | None = None, address: str | None = None
    ) -> dict[str, Any]:
        """Release peers on this rank; see ``NixlConnectorWorker.release_peers``.

        Returns:
            The same, and ``enabled``: whether peers are managed here at all.

        """
        answers = [w.release_peers(engine_id, address) for w in _nixl_workers()]
        found = [answer for answer in answers if answer["result"] != "unknown"]
        if not found:
            known = [peer for answer in answers for peer in answer["known"]]
            return {
                "enabled": bool(answers),
                "result": "unknown",
                "engine_ids": [],
                "in_flight_reads": 0,
                "known": known,
            }
        busy = any(answer["result"] == "busy" for answer in found)
        return {
            "enabled": True,
            "result": "busy" if busy else "released",
            "engine_ids": [e for answer in found for e in answer["engine_ids"]],
            "in_flight_reads": sum(answer["in_flight_reads"] for answer in found),
        }


def _nixl_workers() -> Iterator[Any]:
    """Yield the workers with peers of this rank; a MultiConnector may have several."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    connectors: list[Any] = [get_kv_transfer_group()] if has_kv_transfer_group() else []
    while connectors:
        connector = connectors.pop()
        connectors.extend(getattr(connector, "_connectors", ()))
        worker = getattr(connector, "connector_worker", None)
        # With the heartbeat off the worker is vLLM's own, which has none.
        if hasattr(worker, "release_peers"):
            yield worker
