# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fixtures: a decoder on a fake NIXL agent whose rules hold in every test."""

import logging
from collections.abc import Callable, Iterator

import pytest

from .decoder import Decoder, make_decoder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here for vLLM's CPU job."""
    for item in items:
        if __package__ in item.nodeid.replace("/", "."):
            item.add_marker(pytest.mark.cpu_test)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Keep the world of one: vLLM's clean-up after each test takes a second."""
    return False


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """A decoder with the default interval of 2 s, connected to nobody."""
    decoder = make_decoder(monkeypatch)
    yield decoder
    assert decoder.nixl.violations == []


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], list[str]]]:
    """Returns the lines of vLLM's loggers, once, whether or not they propagate."""
    vllm_logger = logging.getLogger("vllm")
    monkeypatch.setattr(vllm_logger, "propagate", False)
    vllm_logger.addHandler(caplog.handler)

    def start_with(start: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if message.startswith(start)]

    with caplog.at_level(logging.INFO, logger="vllm"):
        yield start_with
    vllm_logger.removeHandler(caplog.handler)
