# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What CONTRIBUTING.md and the Makefile say is so."""

import re
import subprocess
from pathlib import Path

import pytest

from vllm_nixl_heartbeat.compatibility import TESTED_VLLM

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str:
    command = ["make", "--silent", *arguments]
    return subprocess.check_output(command, cwd=ROOT, text=True)


def test_every_make_target_that_is_named_exists_and_is_listed() -> None:
    named = set(
        re.findall(r"(?m)(?:`|^)make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    )
    listed = {line.split()[0] for line in make("help").splitlines()}
    assert {"unit", "lint", "test"} <= named <= listed


def test_the_makefile_takes_the_newest_release_from_the_one_list() -> None:
    newest = make("--eval", "newest: ; @echo $(NEWEST)", "newest").strip()
    assert newest == TESTED_VLLM[-1]


@pytest.mark.parametrize(
    "link", re.findall(r"\]\(([^):#]+)", (ROOT / "CONTRIBUTING.md").read_text())
)
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
