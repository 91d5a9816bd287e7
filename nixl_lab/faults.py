# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Faults other than a kill: TCP connections reset while both their ends live."""

import os
import shutil
import socket
import subprocess

import psutil

from nixl_lab.servers import VllmServer

Endpoint = tuple[str, int]
Connection = tuple[Endpoint, Endpoint]


def why_no_resets() -> str | None:
    """Why this machine does not let us reset TCP connections; None if it does."""
    if shutil.which("ss") is None:
        return "the command ss is missing (package iproute2)"
    if os.geteuid() != 0:
        return "resetting TCP connections needs root"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            reset_connection((client.getsockname(), client.getpeername()))
            try:
                client.send(b"x")
            except OSError:
                return None
    return "the kernel does not take ss -K (CONFIG_INET_DIAG_DESTROY)"


def reset_worker_connections(one: VllmServer, other: VllmServer) -> int:
    """Resets every TCP connection between the workers of two servers.

    Between workers only NIXL talks, so HTTP and the handshakes stay untouched.

    Returns:
        How many connections were reset.
    """
    # Each end names itself first, so the same connection reads reversed there.
    mirrored = {(remote, local) for local, remote in _established(other)}
    shared = [c for c in _established(one) if c in mirrored]
    for connection in shared:
        reset_connection(connection)
    return len(shared)


def reset_connection(connection: Connection) -> None:
    """Has the kernel abort one connection; its peer gets a RST."""
    (source, source_port), (target, target_port) = connection
    subprocess.run(
        ["ss", "-K", "-H", "-t", "src", source, "sport", "=", f":{source_port}"]
        + ["dst", target, "dport", "=", f":{target_port}"],
        check=True,
        capture_output=True,
    )


def _established(server: VllmServer) -> list[Connection]:
    return [
        (
            (connection.laddr.ip, connection.laddr.port),
            (connection.raddr.ip, connection.raddr.port),
        )
        for worker in server.workers()
        for connection in worker.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    ]
