# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The connector as a series of patches for a fork of vLLM; standard library only.

python -m tools.fork.series patches            write the series, for `git am`
python -m tools.fork.series apply CHECKOUT     commit it, in place of an older one
python -m tools.fork.series remove CHECKOUT    revert its commits
"""

import argparse
import ast
import difflib
import email.utils
import itertools
import re
import subprocess
import sys
import tempfile
import tomllib
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
    """One commit of the series."""

    subject: str
    body: str
    files: tuple[str, ...]  # patterns; what a later part names is not in this one
    factory: str = ""  # its change of the connector factory


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
        "factory-pull.diff",
    ),
    Part(
        "Release the NIXL state of unreachable peers in push mode",
        """\
There the roles turn: a prefill instance writes into the decode instance's memory
and keeps its rkeys. Nothing but the TTL of an hour releases those of one that died.
""",
        (f"{TESTS}/test_push*.py",),
        "factory-push.diff",
    ),
    Part(
        "Document how NIXL peers are released",
        "Options, bounds, metrics, log lines, and listing and releasing manually.\n",
        (PAGE,),
    ),
)


def read(path: str) -> str:
    """Return what the fork gets at a path; the page is the guide without pip."""
    if path == PAGE:
        marked = r"<!-- pip-form -->.*?<!-- /pip-form -->\n"
        page = re.sub(marked, "", (ROOT / _GUIDE).read_text(), flags=re.DOTALL)
        return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"
    return (ROOT / path).read_text()


def without_push(source: str) -> str:
    """Return a module without the top-level statements that only push mode needs.

    Those named for it, and imports of nothing but what is not used without them.
    """
    body = ast.parse(source).body
    kept = [node for node in body if not _is_named_for_push(node)]
    used = {
        name
        for node in kept
        for child in ast.walk(node)
        # Annotations in quotes name types, too.
        for name in re.findall(
            r"\w+", str(getattr(child, "id", getattr(child, "value", "")))
        )
    }
    lines = source.splitlines(keepends=True)
    for node in reversed(body):
        if node in kept and not _imports_nothing_of(node, used):
            continue
        first = node.lineno - 1
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        while not is_import and not lines[first - 1].strip():
            first -= 1
        del lines[first : node.end_lineno]
    return "".join(lines)


def _is_named_for_push(node: ast.stmt) -> bool:
    named = "push" in ast.unparse(node).partition("\n")[0].lower()
    return named and not isinstance(node, ast.Expr)


def _imports_nothing_of(node: ast.stmt, used: set[str]) -> bool:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    return used.isdisjoint(alias.asname or alias.name for alias in node.names)


def states() -> list[dict[str, str]]:
    """Return what the series has put into a tree after each part, by path."""
    contents: list[dict[str, str]] = []
    later: set[str] = set()
    for part in reversed(PARTS):
        found = {PAGE} & set(part.files)
        for pattern in part.files:
            found |= {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
        contents.insert(0, {path: read(path) for path in sorted(found - later)})
        later |= found
    complete = contents[0][CONNECTOR]
    contents[0][CONNECTOR] = without_push(complete)
    contents[1][CONNECTOR] = complete
    return list(itertools.accumulate(contents, lambda before, new: before | new))


def write_patches(author: str, folder: Path) -> list[str]:
    """Write the series as ``git format-patch`` would; return the files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    before: dict[str, str] = {}
    for number, (part, after) in enumerate(zip(PARTS, states()), start=1):
        place = f"{number}/{len(PARTS)}"
        diffs = [_diff(path, before.get(path), text) for path, text in after.items()]
        if part.factory:
            diffs.append((Path(__file__).parent / part.factory).read_text())
        date = email.utils.formatdate(localtime=True)
        text = (
            # The first line's date is what marks a patch for `git am`.
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: {author}\nDate: {date}\n"
            f"Subject: [PATCH {place}] {part.subject}\n\n{part.body}\n"
            f"{_TRAILER} {version} {place}\n---\n\n{''.join(diffs)}-- \n{version}\n"
        )
        path = folder / f"{number:04}-{part.subject.replace(' ', '-')}.patch"
        path.write_text(text)
        written.append(str(path))
        before = after
    return written


def _diff(path: str, before: str | None, after: str) -> str:
    if before == after:
        return ""
    old = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(
        (before or "").splitlines(True), after.splitlines(True), old, f"b/{path}"
    )
    mode = "" if before is not None else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}" + "".join(lines)


class Fork:
    """A git checkout of a vLLM fork, judged by its ``HEAD``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A path in git's commands is one of the tree, wherever the command is run.
        self._path = Path(self.git("rev-parse", "--show-toplevel"))

    def git(self, *args: str) -> str:
        """Run git in the checkout and return what it prints."""
        command = ["git", "-C", str(self._path), *args]
        done = subprocess.run(command, capture_output=True, text=True)
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
        """Return whether there is something at a path."""
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
        log = ("log", "--format=%H")
        added = self.git(*log, "-1", "--diff-filter=A", "--", CONNECTOR)
        # By its subject: the commit that the first version of this tool made.
        marks = (f"--grep=^{_TRAILER}", "--grep=Release the state of unreachable peers")
        ours = self.git(*log, *marks, f"{added}^..HEAD").split()
        if added not in ours:
            raise Refused(f"{CONNECTOR} is there already, from commit {added[:12]}")
        return ours

    def is_current(self) -> bool:
        """Return whether the series of this version is there already."""
        return all(
            self.has(path) and self.git("show", f"HEAD:{path}") == text.strip("\n")
            for path, text in states()[-1].items()
        )

    def apply(self, author: str | None = None, signoff: bool = False) -> str:
        """Commit the series, after a revert of an older one; return what was done.

        Raises:
            Refused: the fork is not one that the series fits into, or git failed.
        """
        if reason := self.misfit():
            raise Refused(f"{reason}; the first vLLM that fits is {FIRST_FIT}")
        older = self.commits()
        if older and self.is_current():
            return f"it is there already, since commit {older[-1][:12]}"
        flags = ["--signoff"] if signoff else []
        commands = [["revert", "--no-edit", *flags, *older]] if older else []
        with tempfile.TemporaryDirectory() as folder:
            paths = write_patches(author or self.identity(), Path(folder))
            return self._add_commits(*commands, ["am", "--3way", *flags, *paths])

    def remove(self, signoff: bool = False) -> str:
        """Revert the commits of the series; return what was done.

        Raises:
            Refused: there are none, or they cannot be reverted.
        """
        if not (ours := self.commits()):
            raise Refused("the series is not there")
        flags = ["--signoff"] if signoff else []
        return self._add_commits(["revert", "--no-edit", *flags, *ours])

    def _add_commits(self, *commands: list[str]) -> str:
        head = self.git("rev-parse", "HEAD")
        # In a tree of its own: what fails half-way leaves nothing behind.
        with tempfile.TemporaryDirectory() as folder:
            self.git("worktree", "add", "--quiet", "--detach", folder, head)
            try:
                for command in commands:
                    Fork(Path(folder)).git(*command)
                new = Fork(Path(folder)).git("rev-parse", "HEAD")
            finally:
                self.git("worktree", "remove", "--force", folder)
        self.git("merge", "--quiet", "--ff-only", new)
        return self.git("log", "--oneline", "--reverse", f"{head}..")


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


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; 1 when refused."""
    parser = argparse.ArgumentParser(description=__doc__)
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
            print("\n".join(write_patches(author, args.output)))
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
