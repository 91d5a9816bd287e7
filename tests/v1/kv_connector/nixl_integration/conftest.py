# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: prefill processes and decoders that are gone when their test ends."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.support.fork_server import ForkServer
from tests.support.peers import Decoder, Prefill
from tests.support.prefill_group import PrefillGroup


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The process that forks prefills; started once, vLLM's import is slow."""
    with contextlib.closing(
        ForkServer(tmp_path_factory.mktemp("prefills"))
    ) as fork_server:
        yield fork_server


@pytest.fixture
def start_prefill(fork_server: ForkServer) -> Iterator[Callable[..., Prefill]]:
    """Starts a prefill: takes an engine id and the arguments of `Prefill`."""
    with contextlib.ExitStack() as stack:

        def start(engine_id: str, **arguments: object) -> Prefill:
            prefill = Prefill(fork_server, engine_id, **arguments)
            return stack.enter_context(contextlib.closing(prefill))

        yield start


@pytest.fixture
def start_group(fork_server: ForkServer) -> Iterator[Callable[..., PrefillGroup]]:
    """Starts prefills in one process: takes the arguments of `PrefillGroup`."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> PrefillGroup:
            group = PrefillGroup(fork_server, *arguments)
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
