# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The comparison of vLLM's own suites, on made-up suites and a made-up vLLM."""

import io
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from nixl_lab import upstream
from nixl_lab.upstream import Comparison, Suites

UNIT = "tests/v1/kv_connector/unit"
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"

SUITE = """
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlConnector,
    NixlConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)

@pytest.mark.parametrize("cls", [NixlPullConnectorWorker, int])
def test_same_either_way(cls):
    assert cls is int or cls is NixlConnectorWorker

def test_worker_of_connector():
    assert NixlConnector().worker == NixlConnectorWorker.kind

def test_stock_only():
    assert NixlConnectorWorker.kind == "stock"

def test_fails_either_way():
    assert False

@pytest.mark.skip
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise RuntimeError

def test_error(broken):
    pass
"""


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.fixture
def suites(tmp_path: Path) -> Suites:
    """Return a suite beside a vLLM in which only the NIXL classes exist."""
    packages = [
        str(PurePosixPath(V1, "nixl", "__init__.py").parents[level] / "__init__.py")
        for level in range(1, 6)
    ]
    write(
        tmp_path,
        {
            **{f"wheel/{path}": "" for path in packages},
            f"wheel/{V1}/nixl/pull_worker.py": (
                "class NixlPullConnectorWorker:\n    kind = 'stock'\n"
            ),
            f"wheel/{V1}/nixl/connector.py": (
                "from .pull_worker import NixlPullConnectorWorker\n"
                "class NixlPullConnector:\n"
                "    worker = NixlPullConnectorWorker.kind\n"
                "NixlConnector = NixlPullConnector\n"
            ),
            f"wheel/{V1}/nixl/__init__.py": (
                "from .connector import NixlConnector, NixlPullConnector\n"
                "from .pull_worker import NixlPullConnectorWorker\n"
                "NixlConnectorWorker = NixlPullConnectorWorker\n"
            ),
            f"ours/{V1}/nixl_connector.py": (
                "from .nixl import NixlPullConnector, NixlPullConnectorWorker\n"
                "class NixlConnectorWorker(NixlPullConnectorWorker):\n"
                "    kind = 'ours'\n"
                "class NixlConnector(NixlPullConnector):\n"
                "    worker = 'ours'\n"
            ),
            f"suites/{UNIT}/test_nixl_made_up.py": SUITE,
        },
    )
    return Suites(
        release="1.0",
        folder=tmp_path / "suites",
        wheel=tmp_path / "wheel",
        hub=tmp_path / "hub",
        paths=[f"{UNIT}/test_nixl_made_up.py"],
        ours=tmp_path / "ours",
    )


def short(outcomes: dict[str, str]) -> dict[str, str]:
    return {nodeid.split("::")[1]: outcome for nodeid, outcome in outcomes.items()}


def test_both_runs_are_recorded_under_the_same_ids(suites: Suites) -> None:
    stock, ours = (suites.run(mode, suites.paths, "all") for mode in upstream.MODES)
    assert short(stock) == {
        "test_same_either_way[NixlPullConnectorWorker]": "passed",
        "test_same_either_way[int]": "passed",
        "test_worker_of_connector": "passed",
        "test_stock_only": "passed",
        "test_fails_either_way": "failed",
        "test_skipped": "skipped",
        "test_error": "error",
    }
    assert short(ours) == short(stock) | {"test_stock_only": "failed"}


def test_a_suite_that_keeps_a_stock_class_is_not_taken_for_ours(
    suites: Suites,
) -> None:
    kept = "from vllm_keeper import kept\n\ndef test_it():\n    pass\n"
    keeper = f"from {V1.replace('/', '.')}.nixl import NixlConnector as kept\n"
    write(
        suites.folder,
        {f"{UNIT}/test_nixl_kept.py": kept, "vllm_keeper.py": keeper},
    )
    # Imported before the plugin puts our classes in place.
    write(suites.folder, {"pytest.ini": "[pytest]\naddopts = -p vllm_keeper\n"})
    path = f"{UNIT}/test_nixl_kept.py"
    assert suites.run("stock", [path], "kept") == {f"{path}::test_it": "passed"}
    with pytest.raises(upstream.UpstreamError, match=r"uses the stock \['kept'\]"):
        suites.run("ours", [path], "kept")


def test_a_suite_that_cannot_be_collected_is_an_error(suites: Suites) -> None:
    write(suites.folder, {suites.paths[0]: "import no_such_module\n"})
    with pytest.raises(upstream.UpstreamError, match="no_such_module"):
        suites.run("stock", suites.paths, "all")


class Scripted(Suites):
    """Suites whose runs are written down beforehand."""

    runs: dict[str, list[dict[str, str]]]

    def run(self, mode: str, tests: list[str], name: str) -> dict[str, str]:
        return {
            test: outcome
            for test, outcome in self.runs[mode].pop(0).items()
            if name == "all" or test in tests
        }


def scripted(stock: list[dict[str, str]], ours: list[dict[str, str]]) -> Scripted:
    suites = Scripted("1.0", Path(), Path(), Path(), [])
    object.__setattr__(suites, "runs", {"stock": stock, "ours": ours})
    return suites


def test_no_repetition_when_nothing_differs() -> None:
    both = {"a": "passed", "b": "failed"}
    seen = upstream.compare(scripted([both], [both]))
    assert (seen.differing, seen.unstable) == ([], [])


def test_a_test_that_keeps_differing_is_reported() -> None:
    passed, failed = {"a": "passed"}, {"a": "failed"}
    seen = upstream.compare(scripted([passed] * 3, [failed] * 3))
    assert (seen.differing, seen.unstable) == (["a"], [])


def test_a_test_that_agrees_when_repeated_is_unstable() -> None:
    passed, failed = {"a": "passed", "b": "passed"}, {"a": "failed", "b": "passed"}
    seen = upstream.compare(scripted([passed] * 3, [failed, failed, passed]))
    assert (seen.differing, seen.unstable) == ([], ["a"])


def test_a_test_that_ran_only_once_differs() -> None:
    assert upstream.differing({"a": "passed"}, {}) == ["a"]
    assert upstream.differing({}, {"a": "skipped"}) == ["a"]


def test_report_names_every_test_that_differs() -> None:
    outcomes = {
        "stock": {"t::a": "passed", "t::b": "passed"},
        "ours": {"t::a": "failed", "t::b": "passed"},
    }
    lines = upstream.report([Comparison("0.33.0", outcomes, ["t::a"], [])]).splitlines()
    assert lines[1].split() == ["0.33.0", "2", "2", "1", "1", "0"]
    assert lines[2] == "differing: vllm 0.33.0 t::a: stock passed, ours failed"


def test_only_the_suites_and_what_they_import_are_unpacked(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": "",
        "tests/__init__.py": "",
        "tests/conftest.py": "from tests.helpers import deep\n",
        "tests/helpers/__init__.py": "",
        "tests/helpers/deep.py": "",
        "tests/helpers/unused.py": "",
        "tests/test_other.py": "",
        f"{UNIT}/utils.py": "def late():\n    from tests.late import x\n",
        "tests/late.py": "x = 1\n",
        f"{UNIT}/test_nixl_a.py": "from .utils import late\nimport os\n",
        f"{UNIT}/test_bidirectional_kv_transfer.py": "from . import utils\n",
        f"{UNIT}/test_unrelated.py": "",
        "vllm/__init__.py": "",
    }
    archive = tmp_path / "vllm-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(f"vllm-1.0/{path}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    root = tmp_path / "suites"
    assert upstream.unpack_suites(archive, root) == [
        f"{UNIT}/test_bidirectional_kv_transfer.py",
        f"{UNIT}/test_nixl_a.py",
    ]
    unpacked = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert unpacked == set(files) - {
        "tests/helpers/unused.py",
        "tests/test_other.py",
        f"{UNIT}/test_unrelated.py",
        "vllm/__init__.py",
    }


def test_a_release_without_its_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(upstream.UpstreamError, match=r"install.py --vllm 0\.33\.0"):
        upstream.prepare("0.33.0", tmp_path, tmp_path)
