# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the repository says of versions is what `compatibility` says."""

import sys
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_nixl_heartbeat.compatibility import TESTED_NIXL, TESTED_VLLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import install  # noqa: E402


def next_minor(version: str) -> str:
    major, minor, *_ = Version(version).release
    return f"{major}.{minor + 1}.0"


def test_the_extras_name_the_versions_that_fit():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (vllm,), (nixl,) = (
        project["optional-dependencies"][name] for name in ("vllm", "nixl")
    )
    fits = SpecifierSet(vllm.removeprefix("vllm"))
    assert all(fits.contains(version) for version in TESTED_VLLM)
    assert not fits.contains("0.30.9") and not fits.contains(
        next_minor(TESTED_VLLM[-1])
    )
    fits = SpecifierSet(nixl.removeprefix("nixl"))
    assert fits.contains(TESTED_NIXL[0]) and not fits.contains("1.4.9")


def test_the_installer_installs_tested_versions():
    assert install.VLLM.partition("==")[2] in TESTED_VLLM
    assert {each.partition("==")[2] for each in install.NIXL} == {TESTED_NIXL[-1]}
