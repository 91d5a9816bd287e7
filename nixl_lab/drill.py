# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prefill-replacement drill.

Two or more prefill and two or more decode instances serve continuous traffic. The last
prefill is killed and replaced again and again, the last decoder is restarted after the
third time, and rules decide whether the decoders released it and everything else kept
working. Writes record.json, README.md and a picture; the exit status is 0 when all
rules hold.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from nixl_lab.experiment import Experiment
from nixl_lab.instances import CommandInstance, Commands
from nixl_lab.progress import Steps
from nixl_lab.record import DRILL_RULES, ROUTER_RULES, Record
from nixl_lab.router import ROUTERS
from nixl_lab.scenarios import drill
from nixl_lab.session import (
    add_server_arguments,
    ask_version,
    count,
    local_experiment,
    new_record,
    numbered,
    run,
)

_OWN_DEPLOYMENT = """\
a deployment of your own:
  With --prefill and --decode nothing is started here: the drill brings its own proxy
  and clients, and kills and starts instances with the commands you give. The shell
  finds INSTANCE (the name), ROLE (prefill or decode) and URL in its environment. The
  start command has to return; the drill then waits for /health. If the instance comes
  back under another address, let the command print that as its last line. The servers'
  API key is taken from VLLM_API_KEY. For example, in a checkout of this repository:

    python -m nixl_lab.drill \\
        --prefill p1=http://10.0.0.1:8000 --prefill p2=http://10.0.0.2:8000 \\
        --decode d1=http://10.0.0.3:8000 --decode d2=http://10.0.0.4:8000 \\
        --kill 'kubectl delete pod "$INSTANCE" --grace-period=0 --force' \\
        --start 'kubectl apply -f "$INSTANCE.yaml"' \\
        --logs 'kubectl logs --follow --tail=0 "$INSTANCE"'

  Releases are read off GET /v1/nixl/peers of the decoders; where they have no such
  path, as with the stock connector, off their --logs. A log is read from now on, and
  what a command prints twice counts twice.

  Answers are compared token by token with what the first prefill answers alone: the
  same weights and kernels on all instances, and batch-invariant ones, are needed.
"""
_DEFAULT_CYCLES = 6
_DECODER_RESTART_AFTER = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the drill; returns the exit status."""
    return asyncio.run(play(parse_args(argv)))


async def play(args: argparse.Namespace) -> int:
    """Runs the drill; returns the exit status."""
    record = new_record(
        args,
        [name for name, _ in args.prefill] or numbered("prefill", 2),
        [name for name, _ in args.decode] or numbered("decode", 2),
    )
    record.about |= {"cycles": str(args.cycles), "router": args.router or "the lab's"}
    output = args.output.resolve()

    async def played() -> str:
        if args.prefill:
            started = _own_deployment(args, record, output)
        else:
            started = local_experiment(args, record, output, router=args.router)
        async with started as experiment:
            await drill(
                experiment, args.cycles, min(_DECODER_RESTART_AFTER, args.cycles)
            )
        failed = len(record.failures)
        return f"{len(record.requests)} requests, {failed} failed"

    # Which instances served a request is known of the lab's own proxy only.
    rules = ROUTER_RULES if args.router else DRILL_RULES
    return await run(played, record, rules, output)


@contextlib.asynccontextmanager
async def _own_deployment(
    args: argparse.Namespace, record: Record, output: Path
) -> AsyncIterator[Experiment]:
    commands = Commands(args.kill, args.start, args.logs, output / "commands.log")
    prefills = [CommandInstance(n, "prefill", u, commands) for n, u in args.prefill]
    decoders = [CommandInstance(n, "decode", u, commands) for n, u in args.decode]
    record.about["connector"] = "as deployed"
    record.about["machine"] += " (runs the drill; the servers are elsewhere)"
    await ask_version(record, decoders[-1].url)
    experiment = Experiment(prefills, decoders, record, Steps())
    async with experiment.running():
        yield experiment


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m nixl_lab.drill",
        description=__doc__,
        epilog=_OWN_DEPLOYMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cycles",
        type=count,
        default=_DEFAULT_CYCLES,
        metavar="N",
        help=f"how often the prefill is killed (default {_DEFAULT_CYCLES})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build", "drill"),
        metavar="DIR",
        help="takes record.json, README.md and logs (default build/drill)",
    )
    parser.add_argument(
        "--router", choices=ROUTERS, default="", help="instead of the lab's own proxy"
    )
    add_server_arguments(parser)
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
        ("start", "starts $INSTANCE again; may print its new URL last"),
        ("logs", "follows the log of $INSTANCE from now on (optional)"),
    ):
        own.add_argument(f"--{name}", metavar="COMMAND", default="", help=what)
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
    for name in ("kill", "start"):
        if not getattr(args, name):
            parser.error(f"--{name} is needed with --prefill and --decode")
    if args.stock or args.vllm or args.router:
        parser.error("--stock, --vllm, --router are for servers that are started here")


def _address(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=URL with an http:// or https:// address"
        )
    return name, url.rstrip("/")


if __name__ == "__main__":
    sys.exit(main())
