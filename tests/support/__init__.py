# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What tests and benchmarks share: real workers, agents, prefill processes."""
