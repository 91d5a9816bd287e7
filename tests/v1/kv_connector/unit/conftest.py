# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: a decoder on a fake NIXL agent whose rules hold in every test."""

from collections.abc import Iterator

import pytest
from decoder import Decoder, make_decoder


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """A decoder with the default interval of 2 s, connected to nobody."""
    decoder = make_decoder(monkeypatch)
    yield decoder
    assert decoder.nixl.violations == []
