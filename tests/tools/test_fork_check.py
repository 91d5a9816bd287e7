# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The checks of the series for forks, on made-up suites and a made-up vLLM."""

from pathlib import Path

import pytest

from tools.fork import check

UNIT = "tests/v1/kv_connector/unit"
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
SUITE = """
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlConnector,
    NixlConnectorWorker,
    NixlPushConnector,
    NixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)

@pytest.mark.parametrize("cls", [NixlPullConnectorWorker, int])
def test_same_either_way(cls):
    assert cls is int or cls is NixlConnectorWorker

def test_worker_of_connector():
    assert NixlConnector().worker == NixlConnectorWorker.kind

def test_push_worker_of_connector():
    assert NixlPushConnector().worker == NixlPushConnectorWorker.kind

def test_stock_only():
    assert NixlConnectorWorker.kind == "stock"

def test_no_pip_package():
    with pytest.raises(ImportError):
        import vllm_nixl_heartbeat

@pytest.mark.skip
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise RuntimeError

def test_error(broken):
    pass
"""
KEPT = "from keeper import kept\ndef test_it():\n    pass\n"
CONNECTOR = """
from .pull_worker import NixlPullConnectorWorker
class NixlPullConnector:
    worker = NixlPullConnectorWorker.kind
NixlConnector = NixlPullConnector
"""
PUSH = """
class NixlPushConnectorWorker:
    kind = "stock"
class NixlPushConnector:
    worker = NixlPushConnectorWorker.kind
"""
NIXL = """
from .connector import NixlConnector, NixlPullConnector
from .pull_worker import NixlPullConnectorWorker
from .push import NixlPushConnector, NixlPushConnectorWorker
NixlConnectorWorker = NixlPullConnectorWorker
"""
OURS = """
from .nixl import NixlPullConnector, NixlPullConnectorWorker
from .nixl import NixlPushConnector as StockPush
from .nixl import NixlPushConnectorWorker as StockPushWorker
class NixlConnectorWorker(NixlPullConnectorWorker):
    kind = "ours"
class NixlConnector(NixlPullConnector):
    worker = "ours"
class NixlPushConnectorWorker(StockPushWorker):
    kind = "ours"
class NixlPushConnector(StockPush):
    worker = "ours"
"""


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tree with one suite and the NIXL classes of a made-up vLLM."""
    monkeypatch.setattr(check, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(check, "wheel_of", lambda tree: tree)
    tree = tmp_path / "tree"
    packages = [Path(V1, "nixl").parents[level] for level in range(5)]
    write(tree, {f"{package}/__init__.py": "" for package in packages})
    pull_worker = "class NixlPullConnectorWorker:\n    kind = 'stock'\n"
    write(tree, {f"{V1}/nixl/pull_worker.py": pull_worker})
    write(tree, {f"{V1}/nixl/push.py": PUSH})
    write(tree, {f"{V1}/nixl/connector.py": CONNECTOR, f"{V1}/nixl/__init__.py": NIXL})
    write(tree, {f"{V1}/nixl_connector.py": OURS, f"{UNIT}/test_nixl_a.py": SUITE})
    return tree


def test_the_suites_run_on_the_stock_classes_or_on_ours(tree: Path) -> None:
    stock, ours = (
        {
            name.split("::")[1]: outcome
            for name, outcome in check.run_tests(tree, [UNIT], swap).items()
        }
        for swap in (False, True)
    )
    assert stock == {
        "test_same_either_way[NixlPullConnectorWorker]": "passed",
        "test_same_either_way[int]": "passed",
        "test_worker_of_connector": "passed",
        "test_push_worker_of_connector": "passed",
        "test_stock_only": "passed",
        "test_no_pip_package": "passed",
        "test_skipped": "skipped",
        "test_error": "error",
    }
    assert ours == stock | {"test_stock_only": "failure"}


def test_a_suite_that_keeps_a_stock_class_is_not_taken_for_ours(tree: Path) -> None:
    keeper = f"from {V1.replace('/', '.')}.nixl import NixlConnector as kept\n"
    write(tree, {"keeper.py": keeper, f"{UNIT}/test_nixl_a.py": KEPT})
    # Imported before our classes are in place.
    write(tree, {"pytest.ini": "[pytest]\naddopts = -p keeper\n"})
    with pytest.raises(check.CheckFailed, match=r"uses the stock \['kept'\]"):
        check.run_tests(tree, [UNIT], swap=True)


def test_a_suite_that_cannot_be_collected_is_an_error(tree: Path) -> None:
    write(tree, {f"{UNIT}/test_nixl_a.py": "import no_such_module"})
    with pytest.raises(check.CheckFailed, match="no_such_module"):
        check.run_tests(tree, [UNIT])


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (["passed"], "0 differ, 0 unstable"),
        (["failure", "passed"], "0 differ, 1 unstable"),
        (["failure", "failure", "passed"], "0 differ, 1 unstable"),
        (["failure"] * 3, "1 differ, 0 unstable"),
    ],
)
def test_a_test_differs_if_it_does_so_each_time(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ours: list[str],
    said: str,
) -> None:
    left = iter(ours)

    def run_tests(*_: object, swap: bool = False, **__: object) -> dict[str, str]:
        return {"test_nixl_a::test": next(left) if swap else "passed"}

    monkeypatch.setattr(check, "run_tests", run_tests)
    try:
        check.compare_suites(tree, tree)
    except check.CheckFailed as differing:
        assert str(differing) == "test_nixl_a::test: passed, ours failure"
        assert said.startswith("1 differ")
    assert said in capsys.readouterr().out
    assert list(left) == []


def test_the_stock_classes_run_once(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree, {f"{UNIT}/test_nixl_a.py": "def test_it(): pass"})
    check.compare_suites(tree, tree)
    write(tree, {f"{UNIT}/test_nixl_a.py": "def test_it(): pass\ndef test_new(): pass"})
    check.compare_suites(tree, tree)
    # Of the run before, then of both again.
    assert "passed 1 stock and 2 ours, 0 differ, 1 unstable" in capsys.readouterr().out


def test_a_test_that_ran_only_once_differs() -> None:
    assert check.differing({"a": "passed"}, {"b": "passed"}) == ["a", "b"]


def test_hooks_come_from_package_indexes() -> None:
    ruff = {"id": "ruff-check", "args": ["--fix"]}
    local = {"repo": "local", "hooks": [{"id": "theirs"}]}
    content, left_out = check.offline_hooks(
        {
            "repos": [
                {"repo": "https://a", "rev": "v0.14.0", "hooks": [ruff]},
                {"repo": "https://b", "rev": "1", "hooks": [{"id": "clang-format"}]},
                local,
            ]
        }
    )
    assert left_out == {"clang-format"}
    published, kept = content["repos"]
    assert kept == local
    assert published["repo"] == "local"
    (hook,) = published["hooks"]
    assert hook["args"] == ["--fix"]
    assert hook["additional_dependencies"] == ["ruff==0.14.0"]
