# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes one commit in a vLLM fork that adds this project's connector to it.

The commit carries our modules at their places, points the connector factory at
them and adds our section to the guide. It is put together in git's object store,
so a refusal or a failure leaves the checkout as it was.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BRANCH = "nixl-peer-release"
MESSAGE = """\
[KV Connector][NIXL] Release the state of unreachable peers

A decode instance keeps the NIXL state of a prefill instance that died until the
address is taken over, a read fails or a TTL of an hour is looked at. Where that
state maps the dead instance's GPU memory, its replacement cannot start.

Send each connected peer a periodic heartbeat, and release a peer's descriptor
lists, rkeys and agent metadata once it is known to be unreachable and no read
from it is in flight.
"""

ROOT = Path(__file__).resolve().parents[1]
_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_OUR_PATTERNS = ("nixl_connector.py", "nixl_peer_*.py")
_CONNECTOR = f"{_V1}/nixl_connector.py"
_MODULE = _CONNECTOR.removesuffix(".py").replace("/", ".")
_STOCK = f"{_V1}/nixl"
_STOCK_WORKER = "NixlPullConnectorWorker"
_FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
_REGISTRATIONS = ("NixlConnector", "NixlPullConnector")
_FEATURE = "_release_unreachable_remote_engines"
_REQUIRED = ("REQUIRED_WORKER_MEMBERS", "REQUIRED_WORKER_ATTRIBUTES")
_GUIDE = "docs/features/nixl_connector_usage.md"
_GUIDE_BEGIN = b"<!-- peer-release:begin -->"
_GUIDE_END = b"<!-- peer-release:end -->"


class CherryPickError(RuntimeError):
    """The commit cannot be made; the message says what does not fit."""


@dataclass(frozen=True)
class Checkout:
    """A git checkout, read at its ``HEAD`` and not in its working tree."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> "Checkout":
        """Return the checkout that holds a path.

        Raises:
            CherryPickError: the path is not in a git checkout with a commit.
        """
        if not path.is_dir():
            raise CherryPickError(f"{path} is not a directory")
        try:
            root = cls(path).git("rev-parse", "--show-toplevel").decode().strip()
        except CherryPickError as error:
            raise CherryPickError(f"{path} is not a git checkout: {error}") from error
        checkout = cls(Path(root))
        if not checkout.resolve("HEAD"):
            raise CherryPickError(f"{root} has no commit yet")
        return checkout

    def git(
        self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> bytes:
        """Run git in the checkout and return what it prints.

        Raises:
            CherryPickError: git failed; the message is git's own.
        """
        done = subprocess.run(
            ["git", "-C", str(self.root), *args],
            input=stdin,
            env=os.environ | (env or {}),
            capture_output=True,
        )
        if done.returncode:
            raise CherryPickError(done.stderr.decode(errors="replace").strip())
        return done.stdout

    def resolve(self, revision: str) -> str | None:
        """Return the object that a revision names, None when it names none."""
        try:
            name = self.git("rev-parse", "--verify", "--quiet", revision)
        except CherryPickError:
            return None
        return name.decode().strip()

    def files(self, path: str) -> dict[str, bytes]:
        """Return a file, or the files of a directory, by path."""
        listing = self.git("ls-tree", "-z", "--name-only", "HEAD", "--", path)
        names = [name for name in listing.decode().split("\0") if name]
        return {
            name: self.git("cat-file", "blob", f"HEAD:{name}")
            for name in names
            if self.git("cat-file", "-t", f"HEAD:{name}") == b"blob\n"
        }

    def file(self, path: str) -> bytes | None:
        """Return a file's content, None when there is no such file."""
        return self.files(path).get(path)

    def tree_with(self, changes: dict[str, bytes]) -> str:
        """Return the tree of ``HEAD`` with files changed or added."""
        with tempfile.TemporaryDirectory() as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self.git("read-tree", "HEAD", env=env)
            for path, content in changes.items():
                blob = self.git("hash-object", "-w", "--stdin", stdin=content)
                entry = b"100644 %s\t%s\n" % (blob.strip(), path.encode())
                self.git("update-index", "--index-info", stdin=entry, env=env)
            return self.git("write-tree", env=env).decode().strip()


def our_files(root: Path = ROOT) -> dict[str, bytes]:
    """Return the modules that a fork takes, by their path in its tree.

    The plugin is not among them: a fork's factory names our connector itself.

    Args:
        root: a checkout of this project, or the directory it is installed in.

    Raises:
        CherryPickError: the modules are not there.
    """
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for pattern in _OUR_PATTERNS
        for path in sorted((root / _V1).glob(pattern))
    }
    if _CONNECTOR not in files:
        raise CherryPickError(
            f"{root / _CONNECTOR} is missing: this command works from a checkout "
            "of the project, or when it is installed beside vLLM"
        )
    return files


def our_guide(root: Path = ROOT) -> bytes | None:
    """Return our guide, which the wheel carries beside this module."""
    for path in (root / _GUIDE, root / "nixl_lab" / Path(_GUIDE).name):
        if path.is_file():
            return path.read_bytes()
    return None


def plan(fork: Checkout, root: Path = ROOT) -> dict[str, bytes]:
    """Return what the commit changes: new contents by path.

    Empty when all of it is there already.

    Args:
        fork: the checkout that takes the commit.
        root: where our files are.

    Raises:
        CherryPickError: the fork is not one that our code fits into.
    """
    ours = our_files(root)
    factory = fork.file(_FACTORY)
    stock = fork.files(f"{_STOCK}/")
    if factory is None or not stock:
        missing = _FACTORY if factory is None else f"{_STOCK}/"
        raise CherryPickError(f"{fork.root} is no vLLM tree we know: no {missing}")
    check_worker(stock, required_members(ours[_CONNECTOR]))
    changes = dict(ours)
    for path, content in ours.items():
        if fork.file(path) not in (None, content):
            raise CherryPickError(
                f"{path} is taken by another file; a commit with another version of "
                "ours has to be taken out first"
            )
    changes[_FACTORY] = point_factory_at_ours(factory)
    theirs, guide = fork.file(_GUIDE), our_guide(root)
    if theirs is not None and guide is not None:
        changes[_GUIDE] = with_our_section(theirs, guide)
    return {path: new for path, new in changes.items() if fork.file(path) != new}


def required_members(connector: bytes) -> set[str]:
    """Return what our connector module says it needs of vLLM's worker."""
    constants = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.parse(connector).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _REQUIRED
    }
    if missing := [name for name in _REQUIRED if name not in constants]:
        raise CherryPickError(f"{_CONNECTOR} does not define {', '.join(missing)}")
    return {member for names in constants.values() for member in names}


def check_worker(stock: dict[str, bytes], required: set[str]) -> None:
    """Check that a fork's worker has what ours builds on, and not our feature.

    Args:
        stock: the modules of the fork's NIXL package.
        required: names of methods and attributes.

    Raises:
        CherryPickError: the worker does not fit.
    """
    classes = {
        node.name: node
        for path, source in stock.items()
        if path.endswith(".py")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    if _STOCK_WORKER not in classes:
        raise CherryPickError(f"{_STOCK}/ has no class {_STOCK_WORKER}")
    members = _members(_STOCK_WORKER, classes)
    if _FEATURE in members:
        raise CherryPickError(
            f"{_STOCK_WORKER} has {_FEATURE} already: the fork needs no cherry-pick"
        )
    if missing := sorted(required - members):
        raise CherryPickError(f"{_STOCK_WORKER} lacks {', '.join(missing)}")


def _members(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the methods and attributes of a class and of the bases we can see."""
    members: set[str] = set()
    pending, seen = [name], set()
    while pending:
        current = pending.pop()
        if current in seen or current not in classes:
            continue
        seen.add(current)
        node = classes[current]
        pending += [ast.unparse(base).split(".")[-1] for base in node.bases]
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                members.add(child.name)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                members |= {
                    target.id
                    for target in ast.walk(child)
                    if isinstance(target, ast.Name)
                    and isinstance(target.ctx, ast.Store)
                }
        members |= {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
    return members


def point_factory_at_ours(factory: bytes) -> bytes:
    """Return the factory's source with our module in the two registrations.

    Only the module's string is replaced, wherever in the file the call is.

    Raises:
        CherryPickError: a registration is missing or not what we know.
    """
    edits = []
    for name in _REGISTRATIONS:
        calls = [
            arguments
            for node in ast.walk(ast.parse(factory))
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] == "register_connector"
            and (arguments := _arguments(node)).get("name", (None,))[0] == name
        ]
        if len(calls) != 1:
            raise CherryPickError(
                f"{_FACTORY} registers {name} {len(calls)} times, expected once"
            )
        if calls[0].get("class_name", (None,))[0] != name:
            raise CherryPickError(f"{_FACTORY} registers {name} as another class")
        if "module_path" not in calls[0]:
            raise CherryPickError(f"{_FACTORY} registers {name} without a plain module")
        edits.append(calls[0]["module_path"][1])
    starts = [0]
    for line in factory.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    # From the end, so that the positions of what is still to do stay right.
    for node in sorted(edits, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        factory = factory[:begin] + f'"{_MODULE}"'.encode() + factory[end:]
    return factory


def _arguments(call: ast.Call) -> dict[str, tuple[object, ast.Constant]]:
    """Return the constant arguments of a registration: value and place."""
    named = dict(zip(("name", "module_path", "class_name"), call.args, strict=False))
    named |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {
        name: (node.value, node)
        for name, node in named.items()
        if isinstance(node, ast.Constant)
    }


def with_our_section(theirs: bytes, ours: bytes) -> bytes:
    """Return a fork's guide with our section in its place, else at its end.

    Raises:
        CherryPickError: one of the guides does not delimit the section.
    """
    section = _section(ours)
    if section is None:
        raise CherryPickError(f"our {_GUIDE} does not delimit the section")
    present = _section(theirs)
    if present is None:
        return theirs.rstrip(b"\n") + b"\n\n" + section + b"\n"
    return theirs.replace(present, section)


def _section(guide: bytes) -> bytes | None:
    """Return a guide's section with its delimiters, None when it has none."""
    counts = (guide.count(_GUIDE_BEGIN), guide.count(_GUIDE_END))
    begin, end = guide.find(_GUIDE_BEGIN), guide.find(_GUIDE_END)
    if counts == (0, 0):
        return None
    if counts != (1, 1) or end < begin:
        raise CherryPickError(f"{_GUIDE} delimits the section in a way we don't know")
    return guide[begin : end + len(_GUIDE_END)]


def cherry_pick(
    path: Path, branch: str, output: Path, root: Path = ROOT
) -> tuple[str, Path | None]:
    """Make the commit and its patch file, unless it is there already.

    Args:
        path: the fork's checkout.
        branch: name of the branch to make.
        output: directory for the patch file.
        root: where our files are.

    Returns:
        What was done, and the patch file if one was made.

    Raises:
        CherryPickError: the fork is not one that our code fits into, or git
            failed.
    """
    fork = Checkout.at(path)
    changes = plan(fork, root)
    if not changes:
        return f"already applied at {fork.resolve('HEAD')}", None
    if dirty := fork.git("status", "--porcelain").decode().splitlines():
        raise CherryPickError(
            f"{fork.root} has uncommitted changes: {dirty[0].strip()}"
            + (f" and {len(dirty) - 1} more" if len(dirty) > 1 else "")
        )
    tree = fork.tree_with(changes)
    if fork.resolve(f"refs/heads/{branch}"):
        same_base = fork.resolve(f"{branch}^") == fork.resolve("HEAD")
        if same_base and fork.resolve(f"{branch}^{{tree}}") == tree:
            return f"already applied on branch {branch}", None
        raise CherryPickError(f"branch {branch} exists and is not this commit")
    commit = fork.git("commit-tree", tree, "-p", "HEAD", stdin=MESSAGE.encode())
    name = commit.decode().strip()
    output.mkdir(parents=True, exist_ok=True)
    # The prefixes: a user's diff.noprefix would make a patch that "git am" refuses.
    patch = fork.git(
        *("format-patch", "-1", "--src-prefix=a/", "--dst-prefix=b/"),
        *("--output-directory", str(output.resolve()), name),
    )
    fork.git("checkout", "--quiet", "-b", branch, name)
    done = [f"applied as {name} on branch {branch}:", *sorted(changes)]
    return "\n  ".join(done), Path(patch.decode().strip())


def main(argv: list[str] | None = None) -> int:
    """Make the commit from the command line; 1 when refused."""
    parser = argparse.ArgumentParser(prog="nixl-cherry-pick", description=__doc__)
    parser.add_argument("checkout", type=Path, help="clean git checkout of the fork")
    parser.add_argument("--branch", default=BRANCH, help="branch to make (%(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory for the patch file (the current one)",
    )
    args = parser.parse_args(argv)
    try:
        done, patch = cherry_pick(args.checkout, args.branch, args.output)
    except CherryPickError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    print(done)
    if patch is not None:
        print(f"patch: {patch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
