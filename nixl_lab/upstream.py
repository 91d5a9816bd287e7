# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Runs vLLM's own NIXL suites on the stock classes and on ours.

The suites come from the source distribution of each supported release and run
on that release's official wheel, once as they are and once with our connector
and worker in place of vLLM's. Every test has to end the same way in both runs.
"""

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nixl_lab import sdist

RELEASES = ("0.31.0", "0.32.0", "0.33.0")
MODES = ("stock", "ours")
# A test that differs is run so often again before it counts as differing.
RERUNS = 2
TEST_TIMEOUT_S = 300

_ROOT = Path(__file__).resolve().parents[1]
_UNIT = PurePosixPath("tests/v1/kv_connector/unit")
_SUITES = ("test_nixl_*.py", "test_bidirectional_kv_transfer.py")
# Any revision does: vLLM asks the cache for the one that "main" names.
_REVISION = "0" * 40

_GROUPED_HEADS = {"num_key_value_heads": 8, "head_dim": 128}
# What the suites ask the hub for: the published shapes, with no weights.
_MODEL_CONFIGS: dict[str, dict[str, object]] = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    },
    "facebook/opt-350m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": False,
        "torch_dtype": "float16",
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        **_GROUPED_HEADS,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "meta-llama/Meta-Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        **_GROUPED_HEADS,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    },
}

Outcomes = dict[str, str]


class UpstreamError(RuntimeError):
    """The suites could not be run."""


def write_hub_cache(hub: Path) -> None:
    """Write the model configurations where the hub's client looks for them."""
    for name, config in _MODEL_CONFIGS.items():
        folder = hub / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_REVISION)


def unpack_suites(archive: Path, root: Path) -> list[str]:
    """Unpack the NIXL suites and the part of the test tree that they import.

    Args:
        archive: vLLM's source distribution.
        root: directory that takes the ``tests`` tree.

    Returns:
        The suites' paths, relative to ``root``.
    """
    files = sdist.read(
        archive,
        lambda path: (
            path == PurePosixPath("pyproject.toml")
            or (path.parts[:1] == ("tests",) and path.suffix == ".py")
        ),
    )
    suites = sorted(
        path
        for path in files
        if path.parent == _UNIT and any(path.match(pattern) for pattern in _SUITES)
    )
    if not suites:
        raise UpstreamError(f"no NIXL suites in {archive.name}")
    needed = _with_imports(files, suites)
    # pytest takes the suites' markers from it.
    needed.add(PurePosixPath("pyproject.toml"))
    sdist.write({path: files[path] for path in needed}, root)
    return [str(path) for path in suites]


def _with_imports(
    files: dict[PurePosixPath, bytes], roots: Iterable[PurePosixPath]
) -> set[PurePosixPath]:
    needed: set[PurePosixPath] = set()
    pending = list(roots)
    while pending:
        path = pending.pop()
        if path in needed or path not in files:
            continue
        needed.add(path)
        for folder in path.parents:
            pending += [folder / "__init__.py", folder / "conftest.py"]
        for node in ast.walk(ast.parse(files[path])):
            if isinstance(node, ast.Import):
                modules = [PurePosixPath(*a.name.split(".")) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1] if node.level else PurePosixPath()
                module = base.joinpath(*(node.module or "").split("."))
                # "from package import name": the name may be a module.
                modules = [module, *(module / a.name for a in node.names)]
            else:
                continue
            pending += [m.with_name(f"{m.name}.py") for m in modules if m.name]
    return needed


@dataclass(frozen=True)
class Suites:
    """The unpacked suites of a release and what they run on.

    Attributes:
        release: vLLM's release.
        folder: root of the unpacked ``tests`` tree.
        wheel: directory with that release's ``vllm`` package.
        hub: the hub's local cache.
        paths: the suites, relative to ``folder``.
        ours: root of the tree that holds our connector.
    """

    release: str
    folder: Path
    wheel: Path
    hub: Path
    paths: list[str]
    ours: Path = _ROOT

    def run(self, mode: str, tests: list[str], name: str) -> Outcomes:
        """Run tests in a process of their own.

        Args:
            mode: ``stock`` or ``ours``.
            tests: paths or node ids, relative to the folder of the suites.
            name: names the record and the log of this run.

        Returns:
            Node id to outcome.

        Raises:
            UpstreamError: pytest did not get to the end of the run.
        """
        record = self.folder / f"{name}-{mode}.jsonl"
        log = record.with_suffix(".log")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        # With "=": pytest looks for its configuration before it knows the
        # plugin's options, and would take a value after a blank for a test path.
        command += ["-p", "nixl_lab.upstream_plugin", f"--nixl-record={record}"]
        if mode == "ours":
            command += [f"--nixl-swap={self.ours}"]
        command += [f"--timeout={TEST_TIMEOUT_S}", "--durations=20"]
        with log.open("w") as output:
            returncode = _run_group(
                [*command, *tests], self.folder, self._environment(), output
            )
        # 1: some tests failed, which may well be the same in both modes. A suite
        # that cannot be collected (2) would go missing from both without a word.
        if returncode not in (0, 1):
            tail = "\n".join(log.read_text().splitlines()[-20:])
            raise UpstreamError(f"{tail}\npytest ended with {returncode}, see {log}")
        return _read_record(record)

    def _environment(self) -> dict[str, str]:
        path = [str(self.wheel), str(self.folder), str(_ROOT)]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_TARGET_DEVICE": "cpu",
            # Else an installed plugin would put our connector into the stock run.
            "VLLM_PLUGINS": "",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_CACHE": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }


def _run_group(command: list[str], folder: Path, env: dict[str, str], output) -> int:
    """Run a command, and leave nothing behind of what it starts."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_record(record: Path) -> Outcomes:
    """Return each test's outcome, an error in its set-up or clean-up included."""
    outcomes: Outcomes = {}
    for line in record.read_text().splitlines():
        nodeid, outcome = json.loads(line)
        if nodeid in outcomes and outcome != outcomes[nodeid]:
            outcome = f"{outcomes[nodeid]}+{outcome}"
        outcomes[nodeid] = outcome
    return outcomes


def differing(stock: Outcomes, ours: Outcomes) -> list[str]:
    """Return the tests that did not end the same way, or ran only once."""
    return sorted(
        nodeid
        for nodeid in stock.keys() | ours.keys()
        if stock.get(nodeid) != ours.get(nodeid)
    )


@dataclass
class Comparison:
    """Both runs of one release.

    Attributes:
        release: vLLM's release.
        outcomes: mode to node id to outcome, in the first run.
        differing: tests that differ, in the first run and in each repetition.
        unstable: tests that differed first and agreed when repeated.
    """

    release: str
    outcomes: dict[str, Outcomes]
    differing: list[str]
    unstable: list[str]

    def count(self, mode: str, outcome: str) -> int:
        """Return how many tests ended with an outcome."""
        return sum(seen == outcome for seen in self.outcomes[mode].values())


def compare(suites: Suites) -> Comparison:
    """Run the suites in both modes, and again the tests that differ.

    A test that fails now and then on the stock classes as well must not be taken
    for a difference: one that ends the same way in both modes of a repetition
    is reported as unstable.
    """
    outcomes = {}
    for mode in MODES:
        begin = time.monotonic()
        outcomes[mode] = suites.run(mode, suites.paths, "all")
        passed = sum(outcome == "passed" for outcome in outcomes[mode].values())
        _say(
            f"vllm {suites.release} {mode}: {passed} of {len(outcomes[mode])} "
            f"passed in {time.monotonic() - begin:.0f} s"
        )
    first = left = differing(outcomes["stock"], outcomes["ours"])
    for attempt in range(RERUNS):
        if not left:
            break
        _say(f"vllm {suites.release}: {len(left)} differ, running them again")
        stock, ours = (suites.run(mode, left, f"again-{attempt + 1}") for mode in MODES)
        left = [nodeid for nodeid in left if stock.get(nodeid) != ours.get(nodeid)]
    unstable = [nodeid for nodeid in first if nodeid not in left]
    return Comparison(suites.release, outcomes, left, unstable)


def report(comparisons: list[Comparison]) -> str:
    """Return the table of all releases and every test that differs."""
    heading = ("vllm", "tests", "passed stock", "passed ours", "differing", "unstable")
    rows: list[tuple[object, ...]] = [heading]
    for each in comparisons:
        rows.append(
            (
                each.release,
                len(each.outcomes["stock"]),
                each.count("stock", "passed"),
                each.count("ours", "passed"),
                len(each.differing),
                len(each.unstable),
            )
        )
    lines = ["  ".join(f"{cell!s:>12}" for cell in row) for row in rows]
    for each in comparisons:
        for kind in ("differing", "unstable"):
            for nodeid in getattr(each, kind):
                seen = ", ".join(
                    f"{mode} {each.outcomes[mode].get(nodeid, 'not run')}"
                    for mode in MODES
                )
                lines.append(f"{kind}: vllm {each.release} {nodeid}: {seen}")
    return "\n".join(lines)


def prepare(release: str, cache: Path, environment: Path) -> Suites:
    """Unpack the suites of a release and check that its wheel is at hand.

    Args:
        release: vLLM's release.
        cache: scratch directory.
        environment: directory with the wheels as ``vllm-<release>``.
    """
    wheel = environment / f"vllm-{release}"
    if not (wheel / "vllm").is_dir():
        raise UpstreamError(
            f"no {wheel}: install it with tools/install.py --vllm {release}"
        )
    folder = cache / release
    hub = cache / "hub"
    write_hub_cache(hub)
    archive = sdist.fetch(release, cache / "sdist")
    return Suites(release, folder, wheel, hub, unpack_suites(archive, folder))


def _say(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Compare the releases; 1 when a test differs."""
    parser = argparse.ArgumentParser(
        prog="python -m nixl_lab.upstream", description=__doc__
    )
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="release")
    parser.add_argument(
        "--cache", type=Path, default=_ROOT / ".cache" / "upstream", metavar="DIR"
    )
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(sys.prefix),
        metavar="DIR",
        help="directory with the releases' wheels as vllm-<release>",
    )
    args = parser.parse_args(argv)
    comparisons = []
    try:
        for release in args.releases:
            suites = prepare(release, args.cache.resolve(), args.environment.resolve())
            comparisons.append(compare(suites))
    except (UpstreamError, sdist.SdistError) as error:
        print(error, file=sys.stderr)
        return 1
    _say(report(comparisons))
    return 1 if any(each.differing for each in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
