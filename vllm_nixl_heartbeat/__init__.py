# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The pip form of vLLM's NIXL peer release: plugin, compatibility check, connector.

The connector's files are links to their places in vLLM's tree; a wheel holds copies.
"""
