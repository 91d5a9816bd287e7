# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cherry-pick command on vLLM's own releases and on forks of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_lab import cherry_pick, sdist
from nixl_lab.cherry_pick import BRANCH, ROOT
from nixl_lab.upstream import RELEASES

KV_TRANSFER = "vllm/distributed/kv_transfer"
V1 = f"{KV_TRANSFER}/kv_connector/v1"
CONNECTOR = f"{V1}/nixl_connector.py"
BASE_WORKER = f"{V1}/nixl/base_worker.py"
PULL_WORKER = f"{V1}/nixl/pull_worker.py"
FACTORY = f"{KV_TRANSFER}/kv_connector/factory.py"
GUIDE = "docs/features/nixl_connector_usage.md"
NEWEST = RELEASES[-1]
OUR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector"
SECTION = "<!-- peer-release:begin -->\n## Dead peers\n<!-- peer-release:end -->"

Doctor = Callable[[Path], None]


def wheel(release: str) -> Path:
    """Return where tools/install.py puts the official wheel of a release."""
    return Path(sys.prefix, f"vllm-{release}")


# The newest is always there; the others once the version matrix has run.
INSTALLED = [each for each in RELEASES if each == NEWEST or wheel(each).is_dir()]


@pytest.fixture(autouse=True)
def _no_git_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def edit(root: Path, path: str, old: str, new: str) -> None:
    file = root / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def append(root: Path, path: str, text: str) -> None:
    with (root / path).open("a") as file:
        file.write(text)


@pytest.fixture(scope="session")
def sources() -> Callable[[str], dict]:
    """Return the part of a release's source that the command looks at."""
    kept: dict[str, dict] = {}

    def read(release: str) -> dict:
        if release not in kept:
            archive = sdist.fetch(release, ROOT / ".cache" / "upstream" / "sdist")
            kept[release] = sdist.read(
                archive,
                lambda path: str(path) == GUIDE or str(path).startswith(KV_TRANSFER),
            )
        return kept[release]

    return read


@pytest.fixture
def make_fork(tmp_path: Path, sources: Callable[[str], dict]) -> Callable[..., Path]:
    """Return a maker of checkouts of a release, with a fork's own changes."""

    def make(release: str = NEWEST, doctor: Doctor | None = None) -> Path:
        root = tmp_path / "fork"
        sdist.write(sources(release), root)
        if doctor is not None:
            doctor(root)
        git(root, "init", "--quiet", "--initial-branch=main")
        git(root, "config", "user.name", "A Fork")
        git(root, "config", "user.email", "fork@example.com")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message=base")
        return root

    return make


def apply(fork: Path, root: Path = ROOT) -> Path:
    """Run the command, which has to make the commit; return its patch file."""
    done, patch = cherry_pick.cherry_pick(fork, BRANCH, fork.parent / "patches", root)
    assert done.startswith("applied as")
    assert patch is not None
    return patch


def state(fork: Path) -> tuple[str, ...]:
    """Return what a refusal has to leave as it was."""
    return (
        git(fork, "rev-parse", "HEAD"),
        git(fork, "for-each-ref"),
        git(fork, "status", "--porcelain", "--branch"),
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of our files, with a guide of the test's own."""
    root = tmp_path / "project"
    for path, content in cherry_pick.our_files().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    (root / GUIDE).parent.mkdir(parents=True)
    (root / GUIDE).write_text(f"# Our guide\n\n{SECTION}\n\nMore.\n")
    return root


@pytest.mark.parametrize("release", RELEASES)
def test_makes_one_commit_on_a_branch(make_fork, release: str) -> None:
    fork = make_fork(release)
    base = git(fork, "rev-parse", "HEAD")
    apply(fork)
    assert git(fork, "branch", "--show-current") == BRANCH
    assert git(fork, "rev-parse", "HEAD^") == git(fork, "rev-parse", "main") == base
    assert git(fork, "status", "--porcelain") == ""
    assert "A Fork <fork@example.com>" in git(fork, "log", "-1", "--format=%an <%ae>")

    ours = cherry_pick.our_files()
    changed = set(git(fork, "diff", "--name-only", "HEAD^").splitlines())
    assert changed - {GUIDE} == {*ours, FACTORY}
    assert CONNECTOR in ours
    assert not any("plugin" in path for path in ours)
    for path, content in ours.items():
        assert (fork / path).read_bytes() == content
    # Two strings in the factory and nothing else.
    assert git(fork, "diff", "--numstat", "HEAD^", "--", FACTORY).split()[:2] == [
        "2",
        "2",
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_patch_applies_to_the_same_base(
    make_fork, release: str, tmp_path: Path
) -> None:
    fork = make_fork(release)
    # A user's setting that would make a patch without prefixes.
    git(fork, "config", "diff.noprefix", "true")
    patch = apply(fork)
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", "--branch=main", str(fork), str(other))
    git(other, "config", "user.name", "Another")
    git(other, "config", "user.email", "another@example.com")
    git(other, "am", "--quiet", str(patch))
    assert git(other, "rev-parse", "HEAD^{tree}") == git(
        fork, "rev-parse", f"{BRANCH}^{{tree}}"
    )


def test_second_run_changes_nothing(make_fork) -> None:
    fork = make_fork()
    apply(fork)
    before = state(fork)
    done, patch = cherry_pick.cherry_pick(fork, BRANCH, fork.parent)
    assert done.startswith("already applied at")
    assert patch is None
    assert state(fork) == before

    git(fork, "checkout", "--quiet", "main")
    before = state(fork)
    done, patch = cherry_pick.cherry_pick(fork, BRANCH, fork.parent)
    assert done == f"already applied on branch {BRANCH}"
    assert patch is None
    assert state(fork) == before


def test_applies_from_a_subdirectory_and_to_a_named_branch(make_fork) -> None:
    fork = make_fork()
    cherry_pick.cherry_pick(fork / "docs", "mine", fork.parent)
    assert git(fork, "branch", "--show-current") == "mine"


# -- Forks that it has to cope with --------------------------------------------


def with_extra_methods(root: Path) -> None:
    append(root, BASE_WORKER, "\n    def a_fork_method(self):\n        return 1\n")
    append(
        root, PULL_WORKER, "\n    def another_fork_method(self):\n        return 2\n"
    )


def with_members_moved_to_a_mixin(root: Path) -> None:
    edit(root, BASE_WORKER, "def _log_failure(", "def _log_failure_of_old(")
    edit(
        root,
        PULL_WORKER,
        "class NixlPullConnectorWorker(",
        "class NixlPullConnectorWorker(FailureLog, ",
    )
    edit(
        root,
        PULL_WORKER,
        "\nclass NixlPullConnectorWorker(",
        "\nfrom .failure_log import FailureLog\n\n\nclass NixlPullConnectorWorker(",
    )
    (root / V1 / "nixl" / "failure_log.py").write_text(
        "class FailureLog:\n    def _log_failure(self, *args):\n        pass\n"
    )


def with_registrations_moved(root: Path) -> None:
    old = """KVConnectorFactory.register_connector(
    "NixlPullConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "NixlPullConnector",
)
"""
    edit(root, FACTORY, old, "")
    append(
        root,
        FACTORY,
        """

def _register_nixl():
    # Ω: a character of several bytes in front of what is edited.
    KVConnectorFactory.register_connector(name="NixlPullConnector", module_path=(
        "vllm.distributed.kv_transfer"
        ".kv_connector.v1.nixl"), class_name="NixlPullConnector")


_register_nixl()
""",
    )


@pytest.mark.parametrize(
    "doctor",
    [with_extra_methods, with_members_moved_to_a_mixin, with_registrations_moved],
)
def test_applies_to_a_fork_with_its_own_changes(make_fork, doctor: Doctor) -> None:
    fork = make_fork(doctor=doctor)
    apply(fork)
    diff = git(fork, "diff", "HEAD^", "--", FACTORY)
    added = [line for line in diff.splitlines() if line.startswith("+ ")]
    assert len(added) == 2
    assert all(f'"{OUR_MODULE}"' in line for line in added)
    compile((fork / FACTORY).read_bytes(), FACTORY, "exec")


# -- Forks that it has to refuse -----------------------------------------------


def with_a_file_at_our_path(root: Path) -> None:
    (root / CONNECTOR).write_text("# The fork's own.\n")


def with_the_feature(root: Path) -> None:
    append(
        root,
        PULL_WORKER,
        "\n    def _release_unreachable_remote_engines(self):\n        pass\n",
    )


def without_a_method(root: Path) -> None:
    edit(root, BASE_WORKER, "def _cleanup_remote_engine(", "def _drop_engine(")


def without_an_attribute(root: Path) -> None:
    for path in (BASE_WORKER, PULL_WORKER):
        text = (root / path).read_text()
        (root / path).write_text(text.replace("_engine_last_active", "_last_seen"))


def without_the_pull_worker(root: Path) -> None:
    edit(root, PULL_WORKER, "class NixlPullConnectorWorker(", "class PullWorker(")


def without_a_registration(root: Path) -> None:
    edit(root, FACTORY, '    "NixlPullConnector",\n    "vllm', '    "Pull",\n    "vllm')


def with_a_registration_twice(root: Path) -> None:
    call = 'KVConnectorFactory.register_connector("NixlConnector", "a", "b")'
    append(root, FACTORY, f"\n{call}\n")


def with_a_class_of_its_own(root: Path) -> None:
    edit(root, FACTORY, 'nixl",\n    "NixlConnector",', 'nixl",\n    "ForkConnector",')


def with_a_computed_module(root: Path) -> None:
    edit(
        root,
        FACTORY,
        '"NixlConnector",\n    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",',
        '"NixlConnector",\n    NIXL_MODULE,',
    )


def without_the_factory(root: Path) -> None:
    (root / FACTORY).unlink()


@pytest.mark.parametrize(
    ("doctor", "message"),
    [
        (with_a_file_at_our_path, f"{CONNECTOR} is taken by another file"),
        (with_the_feature, "has _release_unreachable_remote_engines already"),
        (without_a_method, "NixlPullConnectorWorker lacks _cleanup_remote_engine"),
        (without_an_attribute, "NixlPullConnectorWorker lacks _engine_last_active"),
        (without_the_pull_worker, "has no class NixlPullConnectorWorker"),
        (without_a_registration, "registers NixlPullConnector 0 times"),
        (with_a_registration_twice, "registers NixlConnector 2 times"),
        (with_a_class_of_its_own, "registers NixlConnector as another class"),
        (with_a_computed_module, "registers NixlConnector without a plain module"),
        (without_the_factory, f"no vLLM tree we know: no {FACTORY}"),
    ],
)
def test_refuses_a_fork_that_does_not_fit(
    make_fork, doctor: Doctor, message: str
) -> None:
    assert_refused(make_fork(doctor=doctor), message)


def assert_refused(fork: Path, message: str) -> None:
    before = state(fork)
    with pytest.raises(cherry_pick.CherryPickError) as refusal:
        cherry_pick.cherry_pick(fork, BRANCH, fork.parent / "patches")
    assert message in str(refusal.value)
    assert state(fork) == before
    assert not (fork.parent / "patches").exists()


def test_refuses_a_dirty_tree(make_fork) -> None:
    fork = make_fork()
    append(fork, GUIDE, "changed\n")
    assert_refused(fork, f"has uncommitted changes: M {GUIDE}")
    git(fork, "checkout", "--quiet", GUIDE)
    (fork / "new").touch()
    assert_refused(fork, "has uncommitted changes: ?? new")


def test_refuses_a_branch_with_other_content(make_fork) -> None:
    fork = make_fork()
    git(fork, "branch", BRANCH)
    assert_refused(fork, f"branch {BRANCH} exists and is not this commit")


def test_refuses_without_an_identity(make_fork) -> None:
    fork = make_fork()
    git(fork, "config", "user.useConfigOnly", "true")
    git(fork, "config", "--unset", "user.email")
    assert_refused(fork, "user.email")


def test_refuses_what_is_no_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cherry_pick.main([str(tmp_path / "nowhere")]) == 1
    assert "is not a directory" in capsys.readouterr().err
    assert cherry_pick.main([str(tmp_path)]) == 1
    assert "is not a git checkout" in capsys.readouterr().err
    git(tmp_path, "init", "--quiet")
    assert cherry_pick.main([str(tmp_path)]) == 1
    assert "has no commit yet" in capsys.readouterr().err


def test_refuses_without_our_files(make_fork, tmp_path: Path) -> None:
    with pytest.raises(cherry_pick.CherryPickError, match="works from a checkout"):
        apply(make_fork(), root=tmp_path)


# -- The guide -----------------------------------------------------------------


def test_guide_gets_our_section(make_fork, project: Path) -> None:
    fork = make_fork()
    before = (fork / GUIDE).read_text()
    apply(fork, project)
    assert (fork / GUIDE).read_text() == f"{before.rstrip()}\n\n{SECTION}\n"


def test_guide_gets_our_section_in_the_place_of_an_older_one(
    make_fork, project: Path
) -> None:
    def doctor(root: Path) -> None:
        older = SECTION.replace("Dead", "Late")
        (root / GUIDE).write_text(f"# Guide\n\n{older}\n\n## Last\n")

    fork = make_fork(doctor=doctor)
    apply(fork, project)
    assert (fork / GUIDE).read_text() == f"# Guide\n\n{SECTION}\n\n## Last\n"


def test_guide_of_an_installed_command(make_fork, project: Path) -> None:
    (project / "nixl_lab").mkdir()
    (project / GUIDE).rename(project / "nixl_lab" / Path(GUIDE).name)
    fork = make_fork()
    apply(fork, project)
    assert (fork / GUIDE).read_text().endswith(f"{SECTION}\n")


def test_fork_without_a_guide(make_fork, project: Path) -> None:
    fork = make_fork(doctor=lambda root: (root / GUIDE).unlink())
    apply(fork, project)
    assert not (fork / GUIDE).exists()


# -- What the fork is worth afterwards -----------------------------------------


def run_in_fork(fork: Path, release: str, code: str) -> str:
    """Run code on a release's wheel with the fork's part in its place."""
    official = wheel(release)
    assert official.is_dir(), (
        f"no {official}: install it with tools/install.py --vllm {release}"
    )
    merged = fork.parent / "merged"
    merged.mkdir()
    for folder, replaced in (
        ("vllm", "distributed"),
        ("vllm/distributed", "kv_transfer"),
    ):
        (merged / folder).mkdir(parents=True)
        for child in (official / folder).iterdir():
            if child.name != replaced:
                (merged / folder / child.name).symlink_to(child)
    (merged / KV_TRANSFER).symlink_to(fork / KV_TRANSFER)
    env = os.environ | {
        "PYTHONPATH": f"{merged}{os.pathsep}{official}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        # The fork has no need of the plugin.
        "VLLM_PLUGINS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=fork.parent,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("release", INSTALLED)
def test_factory_of_the_fork_gives_our_connector(make_fork, release: str) -> None:
    fork = make_fork(release)
    apply(fork)
    code = """
import sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

found = [
    KVConnectorFactory.get_connector_class_by_name(name)
    for name in ("NixlConnector", "NixlPullConnector")
]
assert found[0] is found[1]
print(found[0].__module__, sys.modules[found[0].__module__].__file__)
"""
    module, file = run_in_fork(fork, release, code).split()
    assert module == OUR_MODULE
    assert Path(file).resolve() == fork / CONNECTOR


def test_a_forks_own_cleanup_runs_before_our_release(make_fork) -> None:
    def doctor(root: Path) -> None:
        edit(
            root,
            BASE_WORKER,
            "        self._cleanup_remote_engines()\n        return ",
            "        self._cleanup_remote_engines()\n"
            "        self._cleanup_replaced_remote_engines()\n"
            "        return ",
        )
        append(
            root,
            BASE_WORKER,
            "\n    def _cleanup_replaced_remote_engines(self):\n        pass\n",
        )

    fork = make_fork(doctor=doctor)
    apply(fork)
    # A step of a worker in which every other part does nothing.
    code = """
import queue
from unittest.mock import MagicMock
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector

worker = object.__new__(nixl_connector.NixlConnectorWorker)
calls = MagicMock()
calls._get_new_notifs.return_value = set()
calls._pop_done_transfers.return_value = (set(), set())
for name in (
    "_get_new_notifs",
    "_pop_done_transfers",
    "_sync_device_after_direct_recv",
    "_reap_expired_send_leases",
    "_cleanup_remote_engines",
    "_cleanup_replaced_remote_engines",
    "_release_unreachable_remote_engines",
):
    setattr(worker, name, getattr(calls, name))
worker.tp_rank = 0
worker.transfer_topo = MagicMock()
worker._failed_recv_reqs = queue.Queue()
worker._recv_failures = set()
worker._recving_transfers = {}
worker._replicated_pcp_done_sending = set()
worker._remote_agents = {"dead": {}}
worker._engine_last_active = {}
worker._peers.lost["dead"] = MagicMock()
worker.get_transfer_results()
print(*(call[0] for call in calls.mock_calls[-3:]))
"""
    assert run_in_fork(fork, NEWEST, code).split() == [
        "_cleanup_remote_engines",
        "_cleanup_replaced_remote_engines",
        "_release_unreachable_remote_engines",
    ]


def test_command_line(make_fork, capsys: pytest.CaptureFixture[str]) -> None:
    fork = make_fork()
    assert cherry_pick.main([str(fork), "--output", str(fork.parent)]) == 0
    output = capsys.readouterr().out
    assert f"on branch {BRANCH}:\n" in output
    assert f"\n  {CONNECTOR}\n" in output
    patch = Path(output.split("patch: ")[1].strip())
    assert patch.parent == fork.parent
    assert patch.is_file()
