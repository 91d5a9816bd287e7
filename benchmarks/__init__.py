# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the connector costs and how fast it is, against vLLM's own on one machine."""
