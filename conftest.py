# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Puts the repository's files before the installed copies of the same modules.

Nothing under ``vllm/`` is a regular package here, so the installed vLLM wins on
import and tests would see the last installed version of our files.
"""

import importlib
from pathlib import Path

_ROOT = Path(__file__).parent

for _package in ("vllm.plugins", "vllm.distributed.kv_transfer.kv_connector.v1"):
    _module = importlib.import_module(_package)
    _module.__path__.insert(0, str(_ROOT.joinpath(*_package.split("."))))
