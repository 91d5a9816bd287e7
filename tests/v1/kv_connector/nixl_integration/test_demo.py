# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo's other scenarios: real vLLM servers, real faults (minutes each).

The demo itself fails when anything differs from what a scenario promises.
"""

import re
import subprocess
import sys

import pytest

from nixl_lab.scenarios import SCENARIOS


@pytest.mark.servers
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("idle", r"released in \d+\.\d s"),
        ("flap", r"answered again in .*"),
        ("push", r"released in \d+\.\d s"),
        ("own-id", "served 6 of 6 afterwards"),
        ("dark-replace", r"served (\d+) of \1 in the replacement's first 75 s"),
    ],
)
def test_the_demo_plays(scenario: str, says: str):
    if reason := SCENARIOS[scenario].skip_reason():
        pytest.skip(reason)
    demo = subprocess.run(
        [sys.executable, "-m", "nixl_lab.demo", "--scenario", scenario],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.returncode == 0, demo.stdout
    assert re.fullmatch(says, demo.stdout.splitlines()[-1])
