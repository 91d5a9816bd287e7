# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What can be said about a peer's side channel before and after a handshake."""

import errno
import socket

# Long enough for one lost SYN (resent after 1 s).
_CONNECT_TIMEOUT_S = 2.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


_MAX_HOST = 255  # characters of a name in DNS


def address_of(host: object, port: object) -> str:
    """Return an address as "host:port", whatever a request gives for the two."""
    text = str(host)[:_MAX_HOST]
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    return f"{text}:{str(port)[:_MAX_HOST]}"


class PeerRefusedError(RuntimeError):
    """A request was refused at once, without trying its peer."""


def check_listener(host: str, port: int) -> None:
    """Make sure that a ZMQ listener lives, in milliseconds instead of ZMQ's 5 s.

    A dead process refuses the connection. One that is just dying, or stopped, is still
    connected by its kernel, but does not send ZMQ's greeting.

    Args:
        host: Name or address; an IPv6 address with or without brackets.
        port: Port of the side channel.

    Raises:
        OSError: If nothing lives there.

    """
    with socket.create_connection((_bare(host), port), _CONNECT_TIMEOUT_S) as probe:
        if not probe.recv(1):
            raise ConnectionError(f"{host}:{port} closed the connection")


def says_nothing_about_peer(error: BaseException, host: str) -> bool:
    """Return whether a handshake failed for a reason of this host's own.

    That is: no file descriptors are left, or the name does not resolve (which ZMQ
    reports as a time-out).
    """
    if isinstance(error, socket.gaierror):
        return True
    if getattr(error, "errno", None) in _OUT_OF_DESCRIPTORS:
        return True
    try:
        socket.getaddrinfo(_bare(host), None)
    except OSError:
        return True
    except ValueError:
        return False  # no name at all: that is the request's fault
    return False


def _bare(host: str) -> str:
    host = str(host)
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
