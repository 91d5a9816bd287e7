# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: prefill processes and decoders that are gone when their test ends."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.nursery import Nursery
from tests.support.peers import Decoder, Prefill
from tests.support.prefill_group import PrefillGroup


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The process that forks prefills; started once, vLLM's import is slow."""
    with contextlib.closing(Nursery(tmp_path_factory.mktemp("prefills"))) as nursery:
        yield nursery


@pytest.fixture
def start_prefill(nursery: Nursery) -> Iterator[Callable[..., Prefill]]:
    """Starts a prefill: takes an engine id and the arguments of `Prefill`."""
    with contextlib.ExitStack() as stack:

        def start(engine_id: str, **arguments: object) -> Prefill:
            prefill = Prefill(nursery, engine_id, **arguments)
            return stack.enter_context(contextlib.closing(prefill))

        yield start


@pytest.fixture
def start_group(nursery: Nursery) -> Iterator[Callable[..., PrefillGroup]]:
    """Starts prefills in one process: takes the arguments of `PrefillGroup`."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> PrefillGroup:
            group = PrefillGroup(nursery, *arguments)
            return stack.enter_context(contextlib.closing(group))

        yield start


@pytest.fixture
def make_decoder() -> Iterator[Callable[..., Decoder]]:
    """Builds a decoder: takes the arguments of `Decoder`."""
    with contextlib.ExitStack() as stack:

        def make(engine_id: str = "decoder", **arguments: object) -> Decoder:
            decoder = Decoder(engine_id, **arguments)
            return stack.enter_context(contextlib.closing(decoder))

        yield make
