# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Proves on each supported release that its makers could merge the series.

On the source tree of the release, as git has it: the series applies, and comes out
again; vLLM's own pre-commit hooks pass on every commit; the unit tests that it
carries pass on every commit; a rebase onto the next release meets no conflict; and
with ``--suites`` vLLM's own NIXL suites end the same way on the stock classes and
on ours. Releases that it does not fit are refused.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import yaml
from unearth import PackageFinder

from tools.fork import series
from vllm_nixl_heartbeat.compatibility import TESTED_VLLM

# One that lacks a guard we need, and one whose connector is a single file.
REFUSED = ("0.30.0", "0.19.1")
# A test that differs is run so often again before it counts as differing.
RERUNS = 2

CACHE = series.ROOT / ".cache" / "fork"
_SUITES = ("test_nixl_*.py", "test_bidirectional_kv_transfer.py")

# Hooks that pre-commit would clone from GitHub, from a package index instead:
# language, command, type of files.
_PUBLISHED = {
    "ruff-check": ("python", "ruff check --force-exclude", "python"),
    "ruff-format": ("python", "ruff format --force-exclude", "python"),
    "typos": ("python", "typos", "text"),
    "markdownlint-cli2": ("node", "markdownlint-cli2", "markdown"),
}

# What the suites ask the hub for, where it differs from transformers' defaults.
_MODELS: dict[str, dict[str, object]] = {
    "facebook/opt-125m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
    "facebook/opt-350m": {
        **{"model_type": "opt", "architectures": ["OPTForCausalLM"]},
        **{"hidden_size": 1024, "ffn_dim": 4096, "word_embed_proj_dim": 512},
        **{"num_hidden_layers": 24, "num_attention_heads": 16},
        "do_layer_norm_before": False,
    },
    "Qwen/Qwen3-0.6B": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
        **{"max_position_embeddings": 40960, "tie_word_embeddings": True},
    },
    "meta-llama/Meta-Llama-3-8B": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        **{"intermediate_size": 14336, "num_key_value_heads": 8},
        **{"vocab_size": 128256, "max_position_embeddings": 8192},
    },
    "google/gemma-3-1b-it": {
        **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
        **{"hidden_size": 1152, "intermediate_size": 6912, "sliding_window": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 1},
        **{"vocab_size": 262144, "max_position_embeddings": 32768},
    },
}

Outcomes = dict[str, str]


class CheckFailed(Exception):
    """A release's makers would not merge the series; the message says why."""


def git(tree: Path, *args: str) -> str:
    """Run git in a tree and return what it prints."""
    done = subprocess.run(
        ["git", "-C", str(tree), *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckFailed(f"git {' '.join(args)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def checkout(release: str, cache: Path = CACHE) -> Path:
    """Return a release's source distribution as a clean git tree, fetched once.

    The wheels have no tests and no pre-commit configuration. pip can only fetch a
    source distribution together with its build metadata, which vLLM's needs torch for.
    """
    tree = cache / release
    if not (tree / ".git").is_dir():
        shutil.rmtree(tree, ignore_errors=True)
        index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple/")
        finder = PackageFinder(index_urls=[index], no_binary=["vllm"])
        found = finder.find_best_match(f"vllm=={release}").best
        if found is None:
            raise CheckFailed(f"{index} has no source distribution of vllm {release}")
        finder.download_and_unpack(found.link, tree, cache)
        git(tree, "init", "--quiet")
        git(tree, "config", "user.name", "A Fork")
        git(tree, "config", "user.email", "fork@example.com")
        git(tree, "add", "--all")
        git(tree, "commit", "--quiet", f"--message=vLLM {release}")
        git(tree, "tag", f"v{release}")
    git(tree, "checkout", "--quiet", "--detach", "--force", f"v{release}")
    git(tree, "clean", "--quiet", "-d", "--force")
    return tree


def offline_hooks(content: dict) -> tuple[dict, set[str]]:
    """Return a pre-commit configuration without GitHub, and the ids it leaves out."""
    left_out = set()
    for repo in content["repos"]:
        if repo["repo"] == "local":
            continue
        version = repo.pop("rev").removeprefix("v")
        hooks = []
        for hook in repo["hooks"]:
            language, entry, kind = _PUBLISHED.get(hook["id"], ("", "", ""))
            if not language or (language == "node" and not shutil.which("npm")):
                left_out.add(hook["id"])
                continue
            package = entry.split()[0] + ("@" if language == "node" else "==")
            hook |= {"name": hook["id"], "language": language, "entry": entry}
            hook |= {"types": [kind], "additional_dependencies": [package + version]}
            hook["language_version"] = "system" if language == "node" else "default"
            hooks.append(hook)
        repo |= {"repo": "local", "hooks": hooks}
    content["repos"] = [repo for repo in content["repos"] if repo["hooks"]]
    return content, left_out


def run_hooks(tree: Path, base: str) -> None:
    """Run the tree's own hooks on the files of the commits from a base on."""
    config = yaml.safe_load((tree / ".pre-commit-config.yaml").read_text())
    offline, left_out = offline_hooks(config)
    path = tree.with_name(f"{tree.name}-hooks.yaml")
    path.write_text(yaml.safe_dump(offline))
    command = [sys.executable, "-m", "pre_commit", "run", f"--config={path}"]
    command += [f"--from-ref={base}", "--to-ref=HEAD", "--show-diff-on-failure"]
    # "manual" is what vLLM's CI runs: every stage, and every Python for mypy.
    command += ["--hook-stage=manual"]
    env = os.environ | {"PRE_COMMIT_HOME": str(CACHE / "pre-commit")}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"pre-commit in {tree}:\n{done.stdout}{done.stderr}")
    passed = done.stdout.count("Passed")
    skipped = done.stdout.count("Skipped")
    say(
        f"{passed} hooks passed, {skipped} have no file here; not run offline: "
        f"{', '.join(sorted(left_out))}"
    )


def write_hub_cache(hub: Path) -> None:
    """Write the model configurations where the hub's client looks for them."""
    # Any revision does: vLLM asks the cache for the one that "main" names.
    revision = "0" * 40
    for name, config in _MODELS.items():
        folder = hub / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"torch_dtype": "float16"} | config)
        (snapshot / "config.json").write_text(text)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)


def wheel_of(tree: Path) -> Path:
    """Return where the wheel of a tree's release is unpacked.

    Raises:
        CheckFailed: it is not there.
    """
    release = git(tree, "describe", "--tags", "--abbrev=0").removeprefix("v")
    wheel = Path(sys.prefix, f"vllm-{release}")
    if not wheel.is_dir():
        raise CheckFailed(f"no {wheel}: tools/install.py --vllm {release}")
    return wheel


def run_tests(
    tree: Path, tests: list[str], swap: bool = False, report: Path | None = None
) -> Outcomes:
    """Run tests of a tree, on its own Python code, without any plugin of ours.

    Args:
        tree: the fork's tree; the wheel of its release gives the package's metadata.
        tests: paths or node ids in it.
        swap: put our classes in place of the stock ones.
        report: where pytest writes its report; beside the tree by default.

    Raises:
        CheckFailed: pytest did not get to the end of the run.
    """
    hub = CACHE / "hub"
    write_hub_cache(hub)
    report = report or tree.with_name(f"{tree.name}-report.xml")
    path = [str(tree), str(wheel_of(tree)), str(Path(__file__).parent)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "NIXL_FORK_SWAP": str(int(swap)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_swap", "--timeout=300", f"--junit-xml={report}"]
    done = subprocess.run(
        [*command, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # 1: some tests failed. A suite that cannot be collected (2) would otherwise go
    # missing from both runs without a word.
    if done.returncode not in (0, 1):
        raise CheckFailed(f"{done.stdout[-5000:]}\npytest ended with {done.returncode}")
    return read_report(report)


def read_report(report: Path) -> Outcomes:
    """Return each test's outcome from a JUnit report."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = "+".join(sorted(tags)) or "passed"
    return outcomes


def differing(stock: Outcomes, ours: Outcomes) -> list[str]:
    """Return the tests that did not end the same way, or ran only once."""
    names = stock.keys() | ours.keys()
    return sorted(name for name in names if stock.get(name) != ours.get(name))


def compare_suites(stock: Path, ours: Path) -> None:
    """Run vLLM's NIXL suites in both trees, and again those that differ.

    A test that also fails now and then on the stock classes must not be taken for
    a difference: one that ends the same way in both trees once is only unstable.
    """
    unit = (stock / series.TESTS).parent
    tests = sorted(
        str(path.relative_to(stock))
        for pattern in _SUITES
        for path in unit.glob(pattern)
    )
    # Stock does not change: what differs from an earlier run of it is run again.
    kept = stock.with_name(f"{stock.name}.xml")
    before = (
        read_report(kept) if kept.exists() else run_tests(stock, tests, report=kept)
    )
    after = run_tests(ours, tests, swap=True)
    left = first = differing(before, after)
    for _ in range(RERUNS):
        if not left:
            break
        files = [test for test in tests if any(Path(test).stem in n for n in left)]
        again = differing(run_tests(stock, files), run_tests(ours, files, swap=True))
        left = [name for name in left if name in again]
    passed = [sum(v == "passed" for v in each.values()) for each in (before, after)]
    say(
        f"vLLM's NIXL suites: {len(before)} tests, passed {passed[0]} stock and "
        f"{passed[1]} ours, {len(left)} differ, {len(first) - len(left)} unstable"
    )
    if left:
        raise CheckFailed(
            "\n".join(f"{n}: {before.get(n)}, ours {after.get(n)}" for n in left)
        )


def check_release(release: str, suites: bool) -> None:
    """Prove it on one release.

    Raises:
        CheckFailed: what its makers would object to.
        series.Refused: the series does not apply.
    """
    tree, base = checkout(release), f"v{release}"
    fork = series.Fork(tree)
    (tree / "untracked").touch()
    fork.apply(signoff=True)
    (tree / "untracked").unlink()
    head = git(tree, "rev-parse", "HEAD")
    if not fork.apply().startswith("it is there already"):
        raise CheckFailed("a second run does not see the first")
    fork.remove()
    git(tree, "diff", "--exit-code", base)
    say("applies with untracked files about, is seen by a second run, comes out again")
    commits = git(tree, "rev-list", "--reverse", f"{base}..{head}").split()
    for number, commit in enumerate(commits, start=1):
        git(tree, "checkout", "--quiet", "--detach", commit)
        say(f"commit {number}/{len(commits)}: {git(tree, 'log', '-1', '--format=%s')}")
        run_hooks(tree, base)
        if ".py" not in git(tree, "show", "--name-only", "--format=", commit):
            continue
        outcomes = run_tests(tree, [series.TESTS])
        bad = [n for n, seen in outcomes.items() if seen not in ("passed", "skipped")]
        if bad or not outcomes:
            raise CheckFailed(f"of {len(outcomes)} carried unit tests failed: {bad}")
        passed = sum(seen == "passed" for seen in outcomes.values())
        say(f"of {len(outcomes)} carried unit tests {passed} passed, none failed")
    if suites:
        stock = tree.with_name(f"{release}-stock")
        if not stock.is_dir():
            git(tree, "worktree", "add", "--quiet", str(stock), base)
        compare_suites(stock, tree)


def check_rebase(old: str, new: str) -> None:
    """Move the series from one release's tree onto the next one's."""
    trees = [checkout(release) for release in (old, new)]
    applied = []
    for tree in trees:
        series.Fork(tree).apply()
        applied.append(git(tree, "rev-parse", "HEAD^{tree}"))
    git(trees[1], "fetch", "--quiet", "--no-tags", str(trees[0]), "HEAD")
    onto, upstream = f"v{new}", git(trees[0], "rev-parse", f"v{old}")
    git(trees[1], "rebase", "--quiet", "--onto", onto, upstream, "FETCH_HEAD")
    if git(trees[1], "rev-parse", "HEAD^{tree}") != applied[1]:
        raise CheckFailed(f"rebased onto {new}, it is not as applied there")
    say("rebased without a conflict, and the tree is the same as applied there")


def check_refused(release: str) -> None:
    """See that a release that does not fit is refused and left alone."""
    fork = series.Fork(checkout(release))
    try:
        fork.apply()
    except series.Refused as reason:
        say(f"refused: {reason}")
    else:
        raise CheckFailed("it was not refused")


def say(line: str) -> None:
    """Print a line at once."""
    print(f"  {line}", flush=True)


def checks(
    releases: list[str], suites: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every check with its title."""
    for release in releases:
        yield f"vLLM {release}", partial(check_release, release, suites)
    for old, new in zip(releases, releases[1:]):
        yield f"vLLM {old} to {new}", partial(check_rebase, old, new)
    for release in REFUSED:
        yield f"vLLM {release}", partial(check_refused, release)


def main(argv: list[str] | None = None) -> int:
    """Check the releases; 1 when one's makers would not merge the series."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(TESTED_VLLM))
    parser.add_argument("--suites", action="store_true", help="vLLM's own NIXL suites")
    args = parser.parse_args(argv)
    failed = 0
    for title, check in checks(args.releases, args.suites):
        print(title, flush=True)
        try:
            check()
        except (CheckFailed, series.Refused) as error:
            say(f"FAILED: {error}")
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
