# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""For makers of vLLM forks: the connector as patches, and the proof that they fit."""
