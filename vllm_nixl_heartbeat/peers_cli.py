# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``nixl-peers``: lists and releases NIXL peers of running servers.

It speaks to the routes of ``http.py`` with nothing but httpx, which every vLLM image
has, so that it runs in the image of a server, in its preStop hook for example.
"""

import argparse
import asyncio
import dataclasses
import ipaddress
import json
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import httpx

PATH = "/v1/nixl/peers"

# An answer waits for the step that runs in the server.
_CALL_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0

# Worth another try: what a server, or a proxy before it, says while it starts or ends.
_PASSING_STATUS = frozenset({429, 500, 502, 503, 504})
_HINTS = {
    401: "wrong or no API key: set VLLM_API_KEY",
    404: "no such route: VLLM_PLUGINS must name nixl_peer_admin",
    501: "the server has no engine",
}

Row = tuple[str, ...]


class _Failed(Exception):
    """A server that cannot be asked, with the reason as text."""

    def __init__(self, reason: str, *, passing: bool = False):
        super().__init__(reason)
        self.passing = passing


@dataclasses.dataclass
class _Target:
    """One server: its base URL, and the host name that an address in it stands for."""

    url: str
    host: str | None = None


@dataclasses.dataclass
class _Calls:
    """Calls to servers that are retried until a common deadline."""

    client: httpx.AsyncClient
    deadline: float

    async def pause(self, attempt: int) -> bool:
        """Wait before another try; False if there is no time left for one."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return False
        pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
        # Many prefills that are stopped at once do not call in step.
        await asyncio.sleep(min(pause * random.uniform(0.75, 1.25), left))
        return True

    async def retry(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return what a call returns, tried again while it fails in passing."""
        attempt = 0
        while True:
            try:
                return await call()
            except _Failed as failure:
                if not failure.passing or not await self.pause(attempt):
                    raise
            attempt += 1

    async def send(
        self, method: str, target: _Target, path: str, body: Any = None
    ) -> list[dict[str, Any]]:
        """Call one server; return what its ranks answered."""

        async def once() -> list[dict[str, Any]]:
            # The certificate of an address is its host name's.
            tls = {} if target.host is None else {"sni_hostname": target.host}
            try:
                response = await self.client.request(
                    method, f"{target.url}{path}", json=body, extensions=tls
                )
            except httpx.HTTPError as e:
                reason = f"{type(e).__name__}: {e}".removesuffix(": ")
                raise _Failed(reason, passing=True) from e
            status = response.status_code
            if status != 200:
                said = _HINTS.get(status) or response.text.strip()[:200]
                raise _Failed(
                    f"HTTP {status}: {said}", passing=status in _PASSING_STATUS
                )
            try:
                ranks = list(response.json()["ranks"])
                enabled = all(rank["enabled"] for rank in ranks)
            except (ValueError, LookupError, TypeError) as e:
                raise _Failed("this is no answer of a vLLM server with peers") from e
            if not enabled:
                # The stock connector: it holds peers all the same, and releases none.
                raise _Failed("peer release is off on this server")
            return ranks

        return await self.retry(once)

    async def addresses(self, url: str) -> list[_Target]:
        """Return a server for every address, IPv4 and IPv6, of a URL's host name."""
        parsed = httpx.URL(url)

        async def resolve() -> list[str]:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(
                    parsed.host, None, type=socket.SOCK_STREAM
                )
            except socket.gaierror as e:
                raise _Failed(f"{parsed.host}: {e.strerror}", passing=True) from e
            return sorted({str(entry[4][0]) for entry in found})

        found = await self.retry(resolve)
        return [_Target(str(parsed.copy_with(host=a)), parsed.host) for a in found]


# -- The commands: each returns a report of one server -----------------------------


async def _list(calls: _Calls, target: _Target) -> dict[str, Any]:
    return {"ok": True, "ranks": await calls.send("GET", target, PATH)}


async def _release(
    calls: _Calls, target: _Target, name: dict[str, str]
) -> dict[str, Any]:
    """Release a peer, asking again while reads in flight defer it."""
    was_busy = False
    attempt = 0
    while True:
        ranks = await calls.send("POST", target, f"{PATH}/release", name)
        results = {rank["result"] for rank in ranks}
        if "busy" not in results or not await calls.pause(min(attempt, 2)):
            break
        was_busy = True
        attempt += 1
    if "busy" in results:
        result = "busy"
    elif "released" in results or was_busy:
        # A deferred release happens on its own, and the next answer is "unknown".
        result = "released"
    else:
        result = "unknown"
    return {**name, "ok": result != "busy", "result": result, "ranks": ranks}


async def _drain(calls: _Calls, target: _Target) -> dict[str, Any]:
    """Wait until no rank has blocks that decoders are still to read."""
    attempt = 0
    while True:
        ranks = await calls.send("GET", target, PATH)
        unread = max((rank["unread_requests"] for rank in ranks), default=0)
        lease_s = max((rank["unread_lease_s"] for rank in ranks), default=0.0)
        if not unread or not await calls.pause(min(attempt, 2)):
            return {
                "ok": not unread,
                "unread_requests": unread,
                "unread_lease_s": lease_s,
            }
        attempt += 1


async def _run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask all servers at once; return a report for each of them and each name."""
    key = os.environ.get("VLLM_API_KEY")
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=_CALL_TIMEOUT,
        limits=httpx.Limits(max_connections=None),
        # Pods are called by their addresses, which is nothing for HTTP_PROXY.
        trust_env=False,
        verify=ssl.create_default_context(),
    ) as client:
        calls = _Calls(client, time.monotonic() + arguments.wait)

        async def report(url: str, call: Coroutine[Any, Any, Any]) -> dict[str, Any]:
            try:
                return {"url": url, **await call}
            except _Failed as failure:
                return {"url": url, "ok": False, "error": str(failure)}

        async def ask(url: str) -> list[dict[str, Any]]:
            if not getattr(arguments, "all_addresses", False):
                targets = [_Target(url)]
            else:
                try:
                    targets = await calls.addresses(url)
                except _Failed as failure:
                    return [{"url": url, "ok": False, "error": str(failure)}]
            if arguments.command == "release":
                todo = [
                    (target, _release(calls, target, name))
                    for target in targets
                    for name in arguments.names
                ]
            else:
                command = _list if arguments.command == "list" else _drain
                todo = [(target, command(calls, target)) for target in targets]
            return await asyncio.gather(*[report(t.url, call) for t, call in todo])

        reports = await asyncio.gather(*[ask(url) for url in arguments.urls])
        return [each for of_url in reports for each in of_url]


# -- What is printed ---------------------------------------------------------------


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
        for line in lines
    )


def _list_rows(reports: list[dict[str, Any]]) -> list[Row]:
    return [
        (
            report["url"],
            str(index),
            str(peer["engine_id"]),
            str(peer["address"]),
            str(peer["state"]),
            f"{peer['since_proof_of_life_s']:.1f}",
            str(peer["in_flight_reads"]),
            str(peer["last_error"] or "-"),
        )
        for report in reports
        for index, rank in enumerate(report.get("ranks", ()))
        for peer in rank["peers"]
    ]


def _print_list(reports: list[dict[str, Any]]) -> None:
    head = ("SERVER", "RANK", "ENGINE", "ADDRESS", "STATE", "SEEN_S", "READS", "ERROR")
    print(_table(head, _list_rows(reports)))
    for report in reports:
        for index, rank in enumerate(report.get("ranks", ())):
            if rank["unread_requests"]:
                print(
                    f"{report['url']} rank {index}: blocks of "
                    f"{rank['unread_requests']} requests still to be read, last lease "
                    f"ends in {rank['unread_lease_s']:.1f} s"
                )


def _print_release(reports: list[dict[str, Any]]) -> None:
    rows = [
        (
            report["url"],
            report.get("engine_id") or report["address"],
            report["result"],
            str(sum(rank["in_flight_reads"] for rank in report["ranks"])),
        )
        for report in reports
        if "result" in report
    ]
    print(_table(("SERVER", "PEER", "RESULT", "READS"), rows))
    for report in reports:
        if report.get("result") == "unknown":
            known = {
                f"{peer['engine_id']} at {peer['address']}"
                for rank in report["ranks"]
                for peer in rank.get("known", ())
            }
            print(f"{report['url']} knows {', '.join(sorted(known)) or 'no peer'}")


def _print_drain(reports: list[dict[str, Any]]) -> None:
    rows = [
        (
            report["url"],
            str(report["unread_requests"]),
            f"{report['unread_lease_s']:.1f}",
        )
        for report in reports
        if "unread_requests" in report
    ]
    print(_table(("SERVER", "UNREAD_REQUESTS", "LAST_LEASE_ENDS_IN_S"), rows))


# -- Arguments ---------------------------------------------------------------------


def _url(text: str) -> str:
    """Return the base URL of a server; ``host:port`` and ``[::1]:port`` do as well."""
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("not an HTTP URL")
    except (httpx.InvalidURL, ValueError) as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from e
    return str(url.copy_with(query=None, fragment=None)).rstrip("/")


def _address(text: str) -> str:
    """Return "host:port"; decoders take IPv6 with and without brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        try:
            ipaddress.ip_address(host)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from e
    return f"{host}:{port}"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nixl-peers",
        description=(
            "Lists and releases the NIXL peers of vLLM servers that run the endpoint "
            "plugin nixl_peer_admin. VLLM_API_KEY is sent as the API key."
        ),
        epilog=(
            "Exit status: 0 done, 1 a server could not be asked or is still busy, 2 "
            "wrong usage."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, wait: float) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--wait",
            type=_seconds,
            default=wait,
            metavar="SECONDS",
            help="how long to go on trying (default: %(default)g); one call more may "
            "take 10 s",
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    def add_urls(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--all-addresses",
            action="store_true",
            help="ask every IPv4 and IPv6 address of a URL's host name (a headless "
            "Service's pods)",
        )
        command.add_argument("urls", nargs="+", type=_url, metavar="URL")

    add_urls(add("list", "List the peers of servers.", 5))
    release = add("release", "Release a peer on servers.", 30)
    names = release.add_mutually_exclusive_group(required=True)
    names.add_argument(
        "--engine-id", action="append", metavar="ID", help="may be given repeatedly"
    )
    names.add_argument(
        "--address",
        action="append",
        type=_address,
        metavar="HOST:PORT",
        help="side channel of the peer as the servers list it; may be given repeatedly",
    )
    add_urls(release)
    drain = add("drain", "Wait until a prefill's blocks have been read.", 30)
    drain.add_argument("urls", nargs=1, type=_url, metavar="URL")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        The exit status.

    """
    arguments = _parser().parse_args(argv)
    if arguments.command == "release":
        arguments.names = [
            *({"engine_id": value} for value in arguments.engine_id or ()),
            *({"address": value} for value in arguments.address or ()),
        ]
    reports = asyncio.run(_run(arguments))
    if arguments.json:
        print(json.dumps({"servers": reports}, indent=2))
    else:
        printers = {"list": _print_list, "release": _print_release}
        printers.get(arguments.command, _print_drain)(reports)
    for report in reports:
        if "error" in report:
            print(f"{report['url']}: {report['error']}", file=sys.stderr)
    return 0 if all(report["ok"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
