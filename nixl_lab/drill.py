# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prefill-replacement drill.

Two or more prefill and two or more decode instances serve continuous traffic. The last
prefill is killed and replaced again and again, the last decoder is restarted after the
third time, and rules decide whether the decoders let go and everything else kept
working. Writes drill.json and report.html; the exit status is 0 when all rules hold.
"""

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from nixl_lab.arguments import DEFAULT_INTERVAL, seconds
from nixl_lab.drill_rules import Record

_OWN_DEPLOYMENT = """\
a deployment of your own:
  With --prefill and --decode nothing is started here: the drill brings its own proxy
  and clients, and kills and starts instances with the commands you give. The shell
  finds INSTANCE (the name), ROLE (prefill or decode) and URL in its environment. The
  start command has to return; the drill then waits for /health. A log is read from
  now on, and what a command prints twice counts twice. For example:

    nixl-drill --prefill p1=http://10.0.0.1:8000 --prefill p2=http://10.0.0.2:8000 \\
        --decode d1=http://10.0.0.3:8000 --decode d2=http://10.0.0.4:8000 \\
        --kill 'kubectl delete pod "$INSTANCE" --grace-period=0 --force' \\
        --start 'kubectl apply -f "$INSTANCE.yaml"' \\
        --logs 'kubectl logs --follow --tail=0 "$INSTANCE"'

  Answers are compared token by token with what the first prefill answers alone: the
  same weights and kernels on all instances, and batch-invariant ones, are needed.
"""
_NEEDED = ("aiohttp", "matplotlib", "psutil", "rich")
_DEFAULT_CYCLES = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the drill; returns the exit status."""
    args = parse_args(argv)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"nixl-drill needs {', '.join(missing)}:"
            " pip install 'vllm-nixl-heartbeat[lab]'",
            file=sys.stderr,
        )
        return 1
    from nixl_lab.drill_session import play

    return asyncio.run(play(args))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="nixl-drill",
        description=__doc__,
        epilog=_OWN_DEPLOYMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cycles",
        type=_count,
        default=_DEFAULT_CYCLES,
        metavar="N",
        help=f"how often the prefill is killed (default {_DEFAULT_CYCLES})",
    )
    parser.add_argument(
        "--interval",
        type=seconds,
        default=DEFAULT_INTERVAL,
        metavar="SECONDS",
        help="peer_heartbeat_interval: of servers started here, or what your own have"
        f" (default {DEFAULT_INTERVAL:g}, the connector's)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("nixl-drill"),
        metavar="DIR",
        help="takes drill.json, report.html and logs (default ./nixl-drill)",
    )
    parser.add_argument(
        "--compare",
        type=_record,
        metavar="FILE",
        help="drill.json of another drill, shown beside this one",
    )
    local = parser.add_argument_group("servers that are started here, on CPU")
    local.add_argument(
        "--stock",
        action="store_true",
        help="leave the plugin out: vLLM's own connector",
    )
    local.add_argument(
        "--cache", type=Path, metavar="DIR", help="where the tiny model is kept"
    )
    own = parser.add_argument_group("a deployment of your own, see below")
    for role in ("prefill", "decode"):
        own.add_argument(
            f"--{role}",
            type=_address,
            action="append",
            default=[],
            metavar="NAME=URL",
            help=f"a {role} instance; at least twice",
        )
    for name, what in (
        ("kill", "kills $INSTANCE without warning"),
        ("start", "starts $INSTANCE again"),
        ("logs", "follows the log of $INSTANCE from now on, such as tail -n 0 -F"),
    ):
        own.add_argument(f"--{name}", metavar="COMMAND", help=f"shell command: {what}")
    args = parser.parse_args(argv)
    if args.prefill or args.decode:
        _check_own_deployment(parser, args)
    elif args.kill or args.start or args.logs:
        parser.error("--kill, --start and --logs need --prefill and --decode")
    return args


def _check_own_deployment(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> None:
    for role in ("prefill", "decode"):
        if len(getattr(args, role)) < 2:
            parser.error(f"--{role} is needed at least twice")
    names = [name for name, _ in args.prefill + args.decode]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"--prefill, --decode: {', '.join(twice)} is named twice")
    for name in ("kill", "start", "logs"):
        if not getattr(args, name):
            parser.error(f"--{name} is needed with --prefill and --decode")
    if args.stock:
        parser.error("--stock is for servers that are started here")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value


def _address(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=URL with an http:// or https:// address"
        )
    return name, url.rstrip("/")


def _record(text: str) -> Record:
    try:
        return Record.read(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
