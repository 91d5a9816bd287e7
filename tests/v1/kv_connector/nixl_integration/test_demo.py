# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo's other scenarios: real vLLM servers, real faults (minutes each).

The demo itself fails when anything differs from what a scenario promises.
"""

import re
import subprocess
import sys

import pytest

from nixl_lab.faults import why_no_resets


def play(scenario: str) -> str:
    """Play a scenario; return its last line."""
    demo = subprocess.run(
        [sys.executable, "-m", "nixl_lab.demo", "--scenario", scenario],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.returncode == 0, demo.stdout
    return demo.stdout.splitlines()[-1]


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_an_idle_decoder_releases_its_only_prefill():
    assert re.fullmatch(r"released in \d+\.\d s", play("idle"))


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_broken_connection_to_a_live_prefill_heals():
    if reason := why_no_resets():
        pytest.skip(reason)
    assert play("flap").startswith("answered again in ")
