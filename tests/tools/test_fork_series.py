# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series of patches on made-up forks; `make fork-check` takes vLLM's own trees."""

import os
import subprocess
from pathlib import Path

import pytest

from tools.fork import series
from vllm_nixl_heartbeat.compatibility import TESTED_VLLM

V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
WORKER = f"{V1}/nixl/pull_worker.py"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
SUBJECTS = [part.subject for part in series.PARTS]
REGISTRATION = """
KVConnectorFactory.register_connector(
    "{0}",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "{0}",
)
"""
NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MultiConnector")


def git(root: Path, *args: str) -> str:
    return subprocess.check_output(["git", "-C", str(root), *args], text=True).strip()


def edit(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new))
    git(root, "commit", "--quiet", "--all", f"--message=edit {path}")


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout with the little of vLLM that the series looks at."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "fork"
    (root / WORKER).parent.mkdir(parents=True)
    (root / WORKER).write_text("\n".join(series.required_names()))
    (root / FACTORY).write_text("".join(map(REGISTRATION.format, NAMES)))
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "A Fork")
    git(root, "config", "user.email", "fork@example.com")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=base")
    git(root, "tag", "base")
    return root


def log(fork: Path, form: str = "%s") -> list[str]:
    return git(fork, "log", "--reverse", f"--format={form}", "base..").splitlines()


def test_the_series_is_committed_with_its_subjects(fork: Path) -> None:
    (fork / "untracked").touch()
    series.Fork(fork / "vllm").apply()
    assert log(fork) == SUBJECTS
    assert git(fork, "status", "--porcelain") == "?? untracked"
    for path, text in series.states()[-1].items():
        assert (fork / path).read_text() == text == series.read(path)
    factory = (fork / FACTORY).read_text()
    assert (factory.count('v1.nixl_connector"'), factory.count('v1.nixl"')) == (3, 1)
    assert log(fork, "%an <%ae>") == ["A Fork <fork@example.com>"] * len(SUBJECTS)
    assert not any("Signed-off-by" in line for line in log(fork, "%b"))


def test_author_and_signoff_are_gits(fork: Path) -> None:
    series.Fork(fork).apply("Somebody Else <else@example.com>", signoff=True)
    assert set(log(fork, "%an <%ae>")) == {"Somebody Else <else@example.com>"}
    signed = "Signed-off-by: A Fork <fork@example.com>"
    assert log(fork, "%b").count(signed) == len(SUBJECTS)


def test_the_patches_apply_without_the_tool(
    fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    author = "Somebody Else <else@example.com>"
    arguments = ["patches", str(fork), "--output", str(tmp_path), "--author", author]
    assert series.main(arguments) == 0
    git(fork, "am", *capsys.readouterr().out.split())
    assert log(fork) == SUBJECTS
    assert set(log(fork, "%an <%ae>")) == {author}


def test_a_second_run_says_that_it_is_there(fork: Path) -> None:
    series.Fork(fork).apply()
    edit(fork, WORKER, "shutdown", "shutdown # a fork's own")
    head = git(fork, "rev-parse", "HEAD")
    assert series.Fork(fork).apply().startswith("it is there already")
    assert git(fork, "rev-parse", "HEAD") == head


def test_an_older_version_is_replaced_and_taken_out(
    fork: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = f"{V1}/nixl_peers/of_old.py"
    with monkeypatch.context() as older:
        files = {series.CONNECTOR: "# Older.\n", gone: "# Gone.\n"}
        states = [files | {name: "" for name in "ab"[:n]} for n in range(3)]
        older.setattr(series, "states", lambda: states)
        series.Fork(fork).apply()
    edit(fork, WORKER, "shutdown", "shutdown # a fork's own")
    assert "Revert" in series.Fork(fork).apply()
    assert not (fork / gone).exists()
    assert (fork / series.CONNECTOR).read_text() == series.read(series.CONNECTOR)
    series.Fork(fork).remove()
    assert git(fork, "diff", "--stat", "base").count("|") == 1  # its own edit


def test_what_a_fork_has_changed_in_an_older_version_is_not_lost(fork: Path) -> None:
    series.Fork(fork).apply()
    edit(fork, series.CONNECTOR, "import queue", "import queue  # a fork's own")
    refused(fork, "git revert")


FITS = f"; the first vLLM that fits is {TESTED_VLLM[0]}"


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (WORKER, "tp_rank", "", "has no tp_rank" + FITS),
        (WORKER, "_engine_by_address", "", "has no _engine_by_address" + FITS),
        (WORKER, "shutdown", "shutdown _release_unreachable_remote_engines", "itself"),
        (FACTORY, '"NixlPullConnector"', '"Pull"', "git am"),
    ],
)
def test_a_fork_that_does_not_fit_is_refused(
    fork: Path, path: str, old: str, new: str, message: str
) -> None:
    edit(fork, path, old, new)
    refused(fork, message)


def test_other_trees_are_refused(fork: Path) -> None:
    git(fork, "mv", f"{V1}/nixl", f"{V1}/nixl_old")
    git(fork, "commit", "--quiet", "--message=a single file, as up to 0.19")
    refused(fork, f"is not the package {V1}/nixl" + FITS)
    git(fork, "rm", "--quiet", FACTORY)
    git(fork, "commit", "--quiet", "--message=another project, as vllm-ascend")
    refused(fork, f"no tree of vLLM: it has no {FACTORY}" + FITS)


def test_a_connector_of_the_forks_own_is_not_touched(fork: Path) -> None:
    (fork / series.CONNECTOR).write_text("# The fork's own.\n")
    git(fork, "add", "--all")
    git(fork, "commit", "--quiet", "--message=own")
    refused(fork, f"{series.CONNECTOR} is there already, from commit")


def refused(fork: Path, message: str) -> None:
    head = git(fork, "rev-parse", "HEAD")
    with pytest.raises(series.Refused, match=message.replace(".", r"\.")):
        series.Fork(fork).apply()
    assert git(fork, "rev-parse", "HEAD") == head
    assert git(fork, "status", "--porcelain") == ""


def test_the_page_is_in_a_forks_words() -> None:
    page = series.read(series.PAGE)
    for word in ("pip install", "VLLM_PLUGINS", "pip-form", "vllm_nixl_heartbeat"):
        assert word not in page
