# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one way into NIXL: a proxy in front of the worker's agent, made once.

It lets one thread at a time into the agent, records which transfers are in flight,
hands errors to one place that judges them, and unloads what can be unloaded.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.logger import init_logger

from .policy import is_nixl_error

logger = init_logger(__name__)

# An empty lease heartbeat: renews nothing, and every prefill understands it. Any
# other payload would raise in the step of one that does not run this connector.
HEARTBEAT = b"HB:"
# These touch no peer's state. Descriptors are built in Python mostly, and a step must
# not wait for those of a peer with millions of blocks.
_UNSHARED = frozenset({"get_agent_metadata", "get_reg_descs", "get_xfer_descs"})
# A NIXL call that hangs keeps the others out for so long, not for ever. Then they go
# in beside it, as they do in a worker without this proxy. On starved cores a sound call
# was seen to take more than a second: NIXL waits for its own progress thread.
_PATIENCE_S = 10.0


class AgentObserver(Protocol):
    """What the proxy tells, on the thread that made the call."""

    def sent(self, agent: str) -> None:
        """A notification was sent to an agent, or a transfer posted."""

    def finished(self, agent: str) -> None:
        """A transfer with an agent has finished."""

    def failed(self, agent: str, call: str, error: Exception) -> None:
        """A call for an agent has raised."""


@dataclass(slots=True)
class _Transfer:
    agent: str
    posted_at: float | None = None


class OpenTransfers:
    """Transfer handles that NIXL has made and not yet released, oldest first.

    While one is open, neither descriptor lists nor the agent may go: NIXL would crash
    (vllm-project/vllm#54689).
    """

    def __init__(self) -> None:
        """Create an empty record."""
        self._by_handle: dict[Any, _Transfer] = {}

    def opened(self, handle: Any, agent: str) -> None:
        """Record a new handle."""
        self._by_handle[handle] = _Transfer(agent)

    def posted(self, handle: Any, now: float) -> None:
        """Record that a transfer was posted."""
        self._by_handle[handle].posted_at = now

    def agent_of(self, handle: Any) -> str | None:
        """Return the agent of an open handle."""
        transfer = self._by_handle.get(handle)
        return None if transfer is None else transfer.agent

    def closed(self, handle: Any) -> None:
        """Record that a handle was released."""
        self._by_handle.pop(handle, None)

    def count(self) -> Counter[str]:
        """Return the number of open handles by agent."""
        return Counter(t.agent for t in list(self._by_handle.values()))

    def posted_before(self, when: float) -> Iterator[tuple[str, float]]:
        """Yield agent and time of posting of the transfers posted before ``when``."""
        for transfer in list(self._by_handle.values()):
            if transfer.posted_at is None:
                continue
            if transfer.posted_at > when:
                return
            yield transfer.agent, transfer.posted_at


class _OneAtATime:
    """A method of the agent that is called alone; for the rest it is the method."""

    __slots__ = ("_call", "_method")

    def __init__(self, call: Callable[..., Any], method: Any):
        self._call = call
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._method, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


class NixlAgentProxy:
    """A NIXL agent for several threads; what it does not define, the agent does.

    It passes for the agent: forks and vLLM's own tests look at the worker's agent, and
    set what they like on it.
    """

    __slots__ = (
        "_agent",
        "_agent_of_dlist",
        "_clock",
        "_is_stuck",
        "_kept_notifs",
        "_lock",
        "_logged",
        "_observer",
        "_this_thread",
        "_transfers",
    )

    def __init__(
        self,
        agent: Any,
        observer: AgentObserver,
        transfers: OpenTransfers,
        clock: Callable[[], float],
    ):
        """Wrap an agent.

        Args:
            agent: A ``nixl_agent``.
            observer: Whom to tell what happens to peers.
            transfers: Where to record open transfer handles.
            clock: Returns the current time in seconds.

        """
        self._agent = agent
        self._observer = observer
        self._transfers = transfers
        self._clock = clock
        self._lock = threading.Lock()
        self._is_stuck = False
        self._agent_of_dlist: dict[Any, str] = {}
        self._kept_notifs: dict[str, list[bytes]] = {}
        self._logged: set[str] = set()
        self._this_thread = threading.local()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._agent)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NixlAgentProxy.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._agent, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._agent, name)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._agent, name)
        if name in _UNSHARED or not callable(attribute):
            return attribute
        return _OneAtATime(self._call, attribute)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call NIXL, alone inside it."""
        alone = self._lock.acquire(False) or self._wait()
        try:
            return method(*args, **kwargs)
        finally:
            if alone:
                self._is_stuck = False
                self._lock.release()

    def _wait(self) -> bool:
        """Wait for another thread's call; return False if it has hung."""
        if self._is_stuck:
            return False
        # Not by `_is_stuck`: a third thread may set it in the moment in which this one
        # gets the lock, which then nobody would give back.
        if self._lock.acquire(timeout=_PATIENCE_S):
            return True
        self._is_stuck = True
        logger.error("A NIXL call has not returned for %s s", _PATIENCE_S)
        return False

    def _call_for(self, agent: str | None, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call NIXL for a peer, and have the error judged if it raises."""
        try:
            return self._call(getattr(self._agent, name), *args, **kwargs)
        except Exception as e:
            if agent is not None:
                self._observer.failed(agent, name, e)
            raise

    # -- Peers -----------------------------------------------------------------

    @contextlib.contextmanager
    def record_loads(self) -> Iterator[list[str]]:
        """Collect the agents that this thread loads, for the time of a handshake."""
        loaded: list[str] = []
        self._this_thread.loaded = loaded
        try:
            yield loaded
        finally:
            del self._this_thread.loaded

    def add_remote_agent(self, metadata: bytes) -> str:
        """Load a peer's metadata and remote keys."""
        agent: str = self._call(self._agent.add_remote_agent, metadata)
        if (loaded := getattr(self._this_thread, "loaded", None)) is not None:
            loaded.append(agent)
        return agent

    def remove_remote_agent(self, agent: str) -> None:
        """Unload a peer, as far as NIXL does; a failure is logged."""
        self._unload(self._agent.remove_remote_agent, agent, agent)

    def prep_xfer_dlist(self, agent: str, *args: Any, **kwargs: Any) -> Any:
        """Prepare a descriptor list of a peer, or of this agent."""
        dlist = self._call(self._agent.prep_xfer_dlist, agent, *args, **kwargs)
        self._agent_of_dlist[dlist] = agent
        return dlist

    def release_dlist_handle(self, dlist: Any) -> None:
        """Release a descriptor list, as far as NIXL does; a failure is logged."""
        agent = self._agent_of_dlist.pop(dlist, "?")
        self._unload(self._agent.release_dlist_handle, dlist, agent)

    def _unload(self, method: Callable[..., Any], target: Any, agent: str) -> None:
        # Nothing else of the peer may stay loaded because of one call that raises.
        try:
            self._call(method, target)
        except Exception as e:
            logger.warning("NIXL could not fully unload agent %s: %r", agent, e)

    # -- Transfers -------------------------------------------------------------

    def make_prepped_xfer(
        self,
        operation: str,
        local: Any,
        local_ids: Any,
        remote: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """Make a transfer between two descriptor lists."""
        agent = self._agent_of_dlist.get(remote, "?")
        handle = self._call_for(
            agent, "make_prepped_xfer", operation, local, local_ids, remote, *args, **kw
        )
        self._transfers.opened(handle, agent)
        return handle

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Post a transfer."""
        agent = self._transfers.agent_of(handle)
        state = self._call_for(agent, "transfer", handle, *args, **kwargs)
        if agent is not None:
            self._transfers.posted(handle, self._clock())
            self._observer.sent(agent)
        return state

    def check_xfer_state(self, handle: Any) -> Any:
        """Return the state of a transfer; DONE is a proof of life."""
        agent = self._transfers.agent_of(handle)
        state = self._call_for(agent, "check_xfer_state", handle)
        if state == "DONE" and agent is not None:
            self._observer.finished(agent)
        return state

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; one that raises counts as in flight."""
        self._call(self._agent.release_xfer_handle, handle)
        self._transfers.closed(handle)

    # -- Notifications -----------------------------------------------------------

    def send_notif(self, agent: str, *args: Any, **kwargs: Any) -> None:
        """Send a notification; it counts as the peer's heartbeat."""
        self._call_for(agent, "send_notif", agent, *args, **kwargs)
        self._observer.sent(agent)

    def send_heartbeat(self, agent: str) -> None:
        """Send a heartbeat, which does not count as traffic."""
        self._call_for(agent, "send_notif", agent, notif_msg=HEARTBEAT)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the notifications kept by :meth:`drain`, then those that are new."""
        try:
            fresh = self._call(self._agent.get_new_notifs)
        except Exception as e:
            # A failure of one peer must not end the step, and with it the engine.
            if not is_nixl_error(e):
                raise
            if (kind := type(e).__name__) not in self._logged:
                self._logged.add(kind)
                logger.error("NIXL could not report notifications", exc_info=e)
            fresh = {}
        if not self._kept_notifs:
            return fresh
        kept, self._kept_notifs = self._kept_notifs, {}
        for agent, notifs in fresh.items():
            kept.setdefault(agent, []).extend(notifs)
        return kept

    def drain(self) -> list[str]:
        """Fetch what has arrived while no step runs; NIXL's own list is unbounded.

        Returns:
            The payloads of the lease heartbeats. Everything else is kept for the
            next :meth:`get_new_notifs`.

        """
        heartbeats = []
        kept: dict[str, list[bytes]] = {}
        for agent, notifs in self.get_new_notifs().items():
            for notif in notifs:
                if notif.startswith(HEARTBEAT):
                    payload = notif[len(HEARTBEAT) :]
                    heartbeats.append(payload.decode("utf-8", "replace"))
                else:
                    kept.setdefault(agent, []).append(notif)
        self._kept_notifs = kept
        return heartbeats

    def kept_notifs(self) -> list[bytes]:
        """Return the notifications that wait for the next step."""
        return [n for notifs in self._kept_notifs.values() for n in notifs]
