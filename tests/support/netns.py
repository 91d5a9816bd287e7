# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Network namespaces to put prefills in, and what can go wrong on the way there.

``NamespaceThread`` is a thread in a network namespace of its own, where decoders live:
nobody else on the machine sees its devices, which any other UCX would use too. A
``VethPair`` joins it to a namespace for prefills.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:01"
_numbers = itertools.count()


def _run(*command: str) -> str:
    """Run a command and return its output; an OSError says what it had to say."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as e:
        raise OSError(f"{' '.join(command)}: {e.stderr.strip()}") from e
    return done.stdout


def _ip(netns: str | None, *command: str) -> None:
    """Run ``ip`` in a namespace; None is the calling thread's own."""
    _run("ip", *(["-n", netns] if netns else []), *command)


def why_no_namespaces() -> str | None:
    """Return why this machine lets us make no namespaces, or None if it does."""
    for command in ("ip", "ss", "mount"):
        if shutil.which(command) is None:
            return f"the command {command} is missing"
    try:
        with contextlib.closing(NamespaceThread()) as namespace:
            return namespace.run(_why_no_namespaces)
    except OSError as e:
        return f"network namespaces are not permitted: {e}"


def _why_no_namespaces() -> str | None:
    with (
        contextlib.closing(VethPair()),
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            _run("ss", "-K", "-t", "dport", "=", f":{port}")
            try:
                client.send(b"x")
            except OSError:
                return None
    return "the kernel does not take ss -K (CONFIG_INET_DIAG_DESTROY)"


class NamespaceThread:
    """A thread in a network namespace of its own."""

    def __init__(self) -> None:
        """Start the thread.

        Raises:
            OSError: If that is not permitted.

        """
        self._executor = ThreadPoolExecutor(1, "namespace")
        try:
            self.run(self._move_out)
        except OSError:
            self.close()
            raise

    @staticmethod
    def _move_out() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # A mount namespace as well: UCX looks for network devices under /sys.
        if libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _run("mount", "--make-rprivate", "/")
        _run("mount", "-t", "sysfs", "sysfs", "/sys")
        _ip(None, "link", "set", "lo", "up")

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in the thread; what it starts lives in the namespace."""
        return self._executor.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        """End the thread; the kernel removes the namespaces."""
        self._executor.shutdown()


def in_namespace(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in the thread of its fixture ``namespace``."""

    @functools.wraps(test)
    def run(namespace: NamespaceThread, **fixtures: Any) -> None:
        namespace.run(test, namespace=namespace, **fixtures)

    return run


class VethPair:
    """A namespace for prefills, joined to the thread's by a pair of virtual devices.

    Only for the thread of a `NamespaceThread`.
    """

    def __init__(self) -> None:
        """Make the namespace and the devices.

        Raises:
            OSError: If that is not permitted; nothing is left behind.

        """
        number = next(_numbers)
        self.netns = f"nixl-{os.getpid()}-{number}"
        """Name of the namespace."""
        self._device = f"veth{number}"
        near_address, self.address = f"10.233.{number}.1", f"10.233.{number}.2"
        # Namespace, own address and the other one, of either end.
        self._ends: tuple[tuple[str | None, str, str], ...] = (
            (None, near_address, self.address),
            (self.netns, self.address, near_address),
        )
        with contextlib.ExitStack() as undo:
            _ip(None, "netns", "add", self.netns)
            undo.callback(_ip, None, "netns", "del", self.netns)
            # NIXL's constructor hangs in a namespace whose `lo` is down.
            _ip(self.netns, "link", "set", "lo", "up")
            peer = ["peer", "name", self._device, "netns", self.netns]
            _ip(None, "link", "add", self._device, "type", "veth", *peer)
            undo.callback(_ip, None, "link", "del", self._device)
            for netns, own, _ in self._ends:
                _ip(netns, "address", "add", f"{own}/30", "dev", self._device)
                _ip(netns, "link", "set", self._device, "up")
            self._undo = undo.pop_all()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Drop every packet, both ways, for a while; no end is told.

        Packets go to a hardware address that nobody has. (A device that is down
        gives errors to its own side, and a queue that drops is a kernel module
        that not every kernel has.)
        """
        for netns, _, other in self._ends:
            entry = [other, "dev", self._device, "lladdr", _NOBODY, "nud", "permanent"]
            _ip(netns, "neighbour", "replace", *entry)
        try:
            yield
        finally:
            for netns, _, other in self._ends:
                _ip(netns, "neighbour", "del", other, "dev", self._device)

    def reset_connections(self, by_decoder: bool) -> int:
        """Abort every established TCP connection; return how many there were.

        Args:
            by_decoder: Which end aborts; the other one gets a RST.

        """
        netns, _, other = self._ends[not by_decoder]
        where = ["-N", netns] if netns else []
        killed = _run("ss", *where, "-KHtn", "state", "established", "dst", other)
        return len(killed.splitlines())

    def close(self) -> None:
        """Remove the namespace and the devices."""
        self._undo.close()
