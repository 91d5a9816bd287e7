# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Off the main thread: the monitor that ticks a worker, and the side channel.

An engine without requests runs no step, so an idle decoder would never notice
that a peer has died: the monitor has its worker do the step's peer work then.
"""

import atexit
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

logger = init_logger(__name__)

# The handshake gives the side channel as long to answer (`_nixl_handshake`).
_ANSWER_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 1.0
# A ZMQ context has room for 1023 sockets.
_MAX_OPEN_QUESTIONS = 512


@dataclass(slots=True)
class Answer:
    """What became of a question."""

    asked_engine_id: str
    asked_at: float
    engine_id: str | None
    """The engine that answered; None if nothing did in time."""


class SideChannel:
    """Asks peers for a sign of life, without waiting for the answer.

    The question is the one that a handshake starts with, so every peer, patched
    or not, understands it. Not thread-safe: ZMQ sockets stay in one thread.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._open: dict[str, tuple[float, zmq.Socket]] = {}

    def ask(
        self,
        engine_id: str,
        address: tuple[str, int],
        rank: tuple[int, int],
        now: float,
    ) -> bool:
        """Send a question, unless one to this engine, or too many, are open.

        Args:
            engine_id: The engine that is expected at the address.
            address: Host and port of its side channel.
            rank: The (pp_rank, tp_rank) whose metadata to ask for.
            now: Current time in seconds.

        Returns:
            Whether a question was sent.

        """
        if engine_id in self._open or len(self._open) >= _MAX_OPEN_QUESTIONS:
            return False
        # Not make_zmq_socket: it looks up the machine's memory for each socket.
        try:
            socket = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)  # allows IPv4 as well
            socket.connect(make_zmq_path("tcp", *address))
        except zmq.ZMQError as e:
            # No file descriptors left, or a name that no longer resolves: neither
            # says that the peer is gone, nor may it end the monitor's tick.
            logger.debug("Side channel of %s: %s", engine_id, e)
            return False
        self._open[engine_id] = now, socket
        socket.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
        return True

    def answers(self, now: float) -> Iterator[Answer]:
        """Yield every question that was answered or has timed out by ``now``."""
        for engine_id, (asked_at, socket) in list(self._open.items()):
            answered_by = None
            try:
                answered_by = _engine_id_of(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                if now - asked_at < _ANSWER_TIMEOUT_S:
                    continue
            except (zmq.ZMQError, msgspec.MsgspecError) as e:
                # Something else listens there by now: no sign of the peer.
                logger.debug("Side channel of %s: %r", engine_id, e)
            del self._open[engine_id]
            socket.close()
            yield Answer(engine_id, asked_at, answered_by)

    def close(self) -> None:
        """Close every socket."""
        self._context.destroy(linger=0)
        self._open.clear()


# Of the reply only what the question is about is decoded: a ``NixlHandshakePayload``
# with a ``NixlAgentMetadata`` in it, whose lists grow with the model.
class _Payload(msgspec.Struct):
    agent_metadata_bytes: bytes


class _Metadata(msgspec.Struct):
    engine_id: str


_payload_decoder = msgspec.msgpack.Decoder(_Payload)
_metadata_decoder = msgspec.msgpack.Decoder(_Metadata)


def _engine_id_of(reply: bytes) -> str:
    payload = _payload_decoder.decode(reply)
    return _metadata_decoder.decode(payload.agent_metadata_bytes).engine_id


class MonitoredWorker(Protocol):
    """What the monitor calls, on its own thread."""

    def _monitor_tick(
        self, side_channel: SideChannel, stopping: threading.Event
    ) -> None: ...


class PeerMonitor:
    """A thread that ticks a worker until stopped, or until the worker is gone.

    It holds no strong reference between ticks, so it keeps no worker alive; and
    it is stopped before the interpreter finalises, when a thread inside native
    code would abort the process.
    """

    def __init__(self, worker: MonitoredWorker, period: float):
        """Prepare the thread.

        Args:
            worker: The worker to tick.
            period: Seconds between two ticks.

        """
        self._worker = weakref.ref(worker)
        self._period = period
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="vllm-nixl-peer-monitor", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> bool:
        """Stop the thread and wait up to a second; return whether it has ended."""
        self._stopping.set()
        atexit.unregister(self.stop)
        if self._thread is threading.current_thread():
            # Its tick held the last reference to the worker; it ends after this.
            return True
        if self._thread.ident:
            self._thread.join(_JOIN_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        side_channel = SideChannel()
        logged: set[str] = set()
        try:
            while not self._stopping.wait(self._period):
                worker: Any = self._worker()
                if worker is None:
                    break
                try:
                    worker._monitor_tick(side_channel, self._stopping)
                except Exception as e:
                    # An error must not end the monitor; nor fill the log.
                    if (kind := type(e).__name__) not in logged:
                        logged.add(kind)
                        logger.exception("NIXL peer monitor: tick failed")
                del worker
        finally:
            side_channel.close()
