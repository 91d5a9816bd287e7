# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The connector as a series of patches for a fork of vLLM; standard library only.

python -m tools.fork.series patches            write the series, for `git am`
python -m tools.fork.series apply CHECKOUT     commit it, in place of an older one
python -m tools.fork.series remove CHECKOUT    revert its commits
"""

import argparse
import ast
import email.utils
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FIRST_FIT = "0.31.0"
_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_STOCK = f"{_V1}/nixl"
_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
CONNECTOR = f"{_V1}/nixl_connector.py"
TESTS = "tests/v1/kv_connector/unit/nixl_peers"
_GUIDE = "docs/features/nixl_connector_usage.md"
# A page of its own: a section in vLLM's page would conflict whenever that changes.
PAGE = "docs/features/nixl_connector_peers.md"
# A later vLLM that has it needs no series.
_FEATURE = "_release_unreachable_remote_engines"
# How later runs find the commits, whatever a fork has rebased them on.
_TRAILER = "Origin: vllm-nixl-heartbeat"
# In vLLM from 0.31 on, as is the guard that we need and that has no name of its own:
# before, a request that waits while its engine is released raises in the step.
_GUARD_SINCE_FIRST_FIT = "_engine_by_address"


class Refused(Exception):
    """The fork is left as it was; the message says why."""


class Part(NamedTuple):
    """One commit of the series: its message, and the files that it adds."""

    subject: str
    body: str
    files: tuple[str, ...]


# No "[KV Connector]" in front of the subjects: `git am` would cut it off.
PARTS = (
    Part(
        "Release the NIXL state of unreachable peers",
        """\
A decode instance keeps the NIXL state of a prefill instance that died until the
address is taken over, a read fails or a TTL of an hour is looked at. Where that
state maps the dead instance's GPU memory, its replacement cannot start.

Send each connected peer a periodic heartbeat, and release a peer's descriptor
lists, rkeys and agent metadata once a typed NIXL error says that it is
unreachable and no read from it is in flight.
""",
        (CONNECTOR, f"{_V1}/nixl_peers/*.py", f"{TESTS}/*.py"),
    ),
    Part(
        "Let operators list and release NIXL peers",
        """\
Add a worker extension with two collective RPCs, and the page of the guide on
peers: options, metrics, log lines, what to do by hand.
""",
        (f"{_V1}/nixl_peers/admin.py", f"{TESTS}/test_*admin*.py", PAGE),
    ),
)


def read(path: str) -> str:
    """Return what the fork gets at a path."""
    if path == PAGE:
        # The guide without what only the pip package has.
        marked = r"<!-- pip-form -->.*?<!-- /pip-form -->\n*"
        return re.sub(marked, "", (ROOT / _GUIDE).read_text(), flags=re.DOTALL)
    return (ROOT / path).read_text()


def files() -> list[list[str]]:
    """Return the paths that each part adds; a later part's pattern takes precedence."""
    taken: set[str] = set()
    parts = []
    for part in reversed(PARTS):
        paths = [path for pattern in part.files for path in ROOT.glob(pattern)]
        found = {str(path.relative_to(ROOT)) for path in paths}
        found |= {PAGE} & set(part.files)
        parts.append(sorted(found - taken))
        taken |= found
    return parts[::-1]


def patches(author: str) -> Iterator[tuple[str, str]]:
    """Yield the series as ``git format-patch`` would write it: name and text."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for number, (part, paths) in enumerate(zip(PARTS, files()), start=1):
        place = f"{number}/{len(PARTS)}"
        diffs = [_new_file(path, read(path)) for path in paths]
        if CONNECTOR in paths:
            diffs.append((ROOT / "tools/fork/factory.diff").read_text())
        text = (
            # The date is what marks the file as a patch for `git am`.
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
            f"From: {author}\n"
            f"Date: {email.utils.formatdate(localtime=True)}\n"
            f"Subject: [PATCH {place}] {part.subject}\n\n"
            f"{part.body}\n{_TRAILER} {version} {place}\n---\n\n"
            + "".join(diffs)
            + "-- \nvllm-nixl-heartbeat\n"
        )
        yield f"{number:04}-{part.subject.replace(' ', '-')}.patch", text


def _new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
        + "".join(f"+{line}\n" for line in lines)
    )


class Fork:
    """A git checkout of a vLLM fork, judged by its ``HEAD``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A path in git's commands is one of the tree, wherever the command is run.
        self._path = Path(self.git("rev-parse", "--show-toplevel"))

    def git(self, *args: str) -> str:
        """Run git in the checkout and return what it prints."""
        done = subprocess.run(
            ["git", "-C", str(self._path), *args], capture_output=True, text=True
        )
        if done.returncode:
            raise Refused(f"git {args[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout.strip("\n")

    def identity(self) -> str:
        """Return git's own author, without the time."""
        return self.git("var", "GIT_AUTHOR_IDENT").rsplit(" ", 2)[0]

    def can(self, *args: str) -> bool:
        """Return whether a git command succeeds."""
        try:
            self.git(*args)
        except Refused:
            return False
        return True

    def has(self, path: str) -> bool:
        """Return whether there is a file or folder at a path."""
        return self.can("cat-file", "-e", f"HEAD:{path}")

    def misfit(self) -> str | None:
        """Return why the series does not fit, None when it does."""
        if not self.has(_FACTORY):
            return f"this is no tree of vLLM: it has no {_FACTORY}"
        if not self.has(_STOCK):
            return f"its NIXL connector is not the package {_STOCK}"
        find = ("grep", "--quiet", "--word-regexp")
        names = [*required_names(), _FEATURE]
        found = [n for n in names if self.can(*find, n, "HEAD", "--", _STOCK)]
        if _FEATURE in found:
            return "its NIXL connector releases unreachable peers itself"
        if missing := [n for n in names if n not in (*found, _FEATURE)]:
            return f"its NIXL connector has no {', '.join(missing)}"
        return None

    def commits(self) -> list[str]:
        """Return the commits of the series that are in effect, newest first."""
        if not self.has(CONNECTOR):
            return []
        added = self.git(
            *("log", "-1", "--diff-filter=A", "--format=%H", "--", CONNECTOR)
        )
        # By its subject: the commit that the first version of this tool made.
        marks = (f"--grep=^{_TRAILER}", "--grep=Release the state of unreachable peers")
        ours = self.git("log", "--format=%H", *marks, f"{added}^..HEAD").split()
        if added not in ours:
            raise Refused(f"{CONNECTOR} is there already, from commit {added[:12]}")
        return ours

    def is_current(self) -> bool:
        """Return whether the series of this version is there already."""
        return all(
            self.has(path)
            and self.git("show", f"HEAD:{path}") == read(path).strip("\n")
            for part in files()
            for path in part
        )

    def apply(self, author: str | None = None, signoff: bool = False) -> str:
        """Commit the series with ``git am``, after a revert of an older one.

        Returns:
            What was done.

        Raises:
            Refused: the fork is not one that the series fits into, or git failed.
        """
        if reason := self.misfit():
            raise Refused(f"{reason}; the first vLLM that fits is {FIRST_FIT}")
        older = self.commits()
        if older and self.is_current():
            return f"it is there already, since commit {older[-1][:12]}"
        author = author or self.identity()
        flags = ["--signoff"] if signoff else []
        head = self.git("rev-parse", "HEAD")
        with tempfile.TemporaryDirectory() as folder:
            paths = _write(patches(author), Path(folder))
            try:
                if older:
                    self.git("revert", "--no-edit", *flags, *older)
                self.git("am", "--3way", *flags, *paths)
            except Refused:
                for command in ("am", "revert"):
                    self.can(command, "--abort")
                self.git("reset", "--keep", head)
                raise
        done = self.git("log", "--oneline", f"{head}..HEAD")
        return f"replaced:\n{done}" if older else f"applied:\n{done}"

    def remove(self, signoff: bool = False) -> str:
        """Revert the commits of the series.

        Raises:
            Refused: there are none, or they cannot be reverted.
        """
        ours = self.commits()
        if not ours:
            raise Refused("the series is not there")
        try:
            self.git("revert", "--no-edit", *(["--signoff"] if signoff else []), *ours)
        except Refused:
            self.can("revert", "--abort")
            raise
        return f"reverted {len(ours)} commits"


def required_names() -> list[str]:
    """Return the names in vLLM's worker that the connector says it builds on."""
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse((ROOT / CONNECTOR).read_text()).body
        if isinstance(node, ast.Assign)
    }
    lists = ("STOCK_WORKER_METHODS", "STOCK_WORKER_ATTRIBUTES")
    names = [name for key in lists for name in ast.literal_eval(constants[key])]
    return [*names, _GUARD_SINCE_FIRST_FIT]


def _write(series: Iterator[tuple[str, str]], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in series:
        (folder / name).write_text(text)
        written.append(str(folder / name))
    return written


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; 1 when refused."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("action", choices=("patches", "apply", "remove"))
    parser.add_argument("checkout", type=Path, nargs="?", default=Path())
    parser.add_argument("--author", help="'Name <address>' (git's own identity)")
    parser.add_argument("--signoff", action="store_true", help="passed to git")
    parser.add_argument("--output", type=Path, default=Path("dist"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        fork = Fork(args.checkout)
        if args.action == "apply":
            print(fork.apply(args.author, args.signoff))
        elif args.action == "remove":
            print(fork.remove(args.signoff))
        else:
            author = args.author or fork.identity()
            print("\n".join(_write(patches(author), args.output)))
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
