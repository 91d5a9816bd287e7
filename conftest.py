# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the installed vLLM find the checkout's modules at their places in its tree."""

from pathlib import Path

import vllm.distributed.kv_transfer.kv_connector.v1 as package

package.__path__.insert(
    0, str(Path(__file__).parent.joinpath(*package.__name__.split(".")))
)
