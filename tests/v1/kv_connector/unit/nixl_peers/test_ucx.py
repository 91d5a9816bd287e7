# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The start-up check of UCX's settings."""

from pathlib import Path

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.ucx import (
    ucx_setting_problems,
)

from .decoder import make_decoder

GOOD = {
    "UCX_CUDA_IPC_CACHE": "n",
    "UCX_RC_GDA_EP_ALLOC_MODE": "direct",
    "UCX_KEEPALIVE_INTERVAL": "2s",
    "UCX_UD_TIMEOUT": "5s",
}


def names(environ: dict[str, str]) -> list[str]:
    return [problem.split()[0] for problem in ucx_setting_problems(environ)]


def test_good_settings_are_not_mentioned():
    assert names(GOOD) == []
    assert names(GOOD | {"UCX_CUDA_IPC_CACHE": "No"}) == []
    assert names(GOOD | {"UCX_KEEPALIVE_INTERVAL": "500ms"}) == []
    assert names(GOOD | {"UCX_UD_TIMEOUT": "1.5"}) == []


def test_every_default_is_mentioned():
    assert names({}) == list(GOOD)
    assert ucx_setting_problems({})[0] == (
        "UCX_CUDA_IPC_CACHE is not set, should be 'n': unless this UCX ties memory "
        "keys to endpoints, mappings of a released peer stay cached and its GPU "
        "memory is not freed"
    )


@pytest.mark.parametrize(
    "name, value",
    [
        ("UCX_CUDA_IPC_CACHE", "y"),
        ("UCX_RC_GDA_EP_ALLOC_MODE", "auto"),
        ("UCX_KEEPALIVE_INTERVAL", "20s"),
        ("UCX_KEEPALIVE_INTERVAL", "1m"),
        ("UCX_KEEPALIVE_INTERVAL", "inf"),
        ("UCX_UD_TIMEOUT", "soon"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str):
    (problem,) = ucx_setting_problems(GOOD | {name: value})
    assert problem.startswith(f"{name} is {value!r}, should be {GOOD[name]!r}: ")


@pytest.mark.parametrize(
    "tls, cuda_ipc, rdma",
    [
        ("all", True, True),
        ("tcp,cuda_copy", False, False),
        ("cuda_ipc,cuda_copy,tcp", True, False),
        ("rc,cuda", True, True),
        ("rc_x, tcp", False, True),
        ("^cuda_ipc", False, True),
        ("^cuda", False, True),
        ("^ib", True, False),
        ("^tcp", True, True),
        ("^rc", True, True),
    ],
)
def test_only_transports_in_use_matter(tls: str, cuda_ipc: bool, rdma: bool):
    found = names({"UCX_TLS": tls})
    assert ("UCX_CUDA_IPC_CACHE" in found) == cuda_ipc
    assert ("UCX_KEEPALIVE_INTERVAL" in found) == rdma
    assert ("UCX_RC_GDA_EP_ALLOC_MODE" in found) == rdma


@pytest.mark.parametrize("value", ["y", "Yes", "1"])
def test_multi_node_nvlink_is_asked_for_where_there_is_a_channel(
    tmp_path: Path, value: str
):
    (tmp_path / "channel0").touch()
    bad = [
        ucx_setting_problems(GOOD | environ, tmp_path)
        for environ in ({}, {"UCX_CUDA_IPC_ENABLE_MNNVL": "try"})
    ]
    assert [problem[:25] for (problem,) in bad] == ["UCX_CUDA_IPC_ENABLE_MNNVL"] * 2
    good = GOOD | {"UCX_CUDA_IPC_ENABLE_MNNVL": value}
    assert ucx_setting_problems(good, tmp_path) == []
    assert ucx_setting_problems(GOOD | {"UCX_TLS": "rc,tcp"}, tmp_path) == []


def test_multi_node_nvlink_is_not_asked_for_elsewhere(tmp_path: Path):
    assert ucx_setting_problems(GOOD, tmp_path) == []
    assert ucx_setting_problems(GOOD, tmp_path / "missing") == []


@pytest.mark.parametrize("cuda, count", [(True, len(GOOD)), (False, 0)])
def test_a_worker_on_cuda_logs_them(
    monkeypatch: pytest.MonkeyPatch,
    cuda: bool,
    count: int,
):
    for name in (*GOOD, "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    logged: list[str] = []
    monkeypatch.setattr(
        worker.logger, "warning", lambda text, *args: logged.append(text % args)
    )

    class Platform:
        def is_cuda(self) -> bool:
            return cuda

        def __getattr__(self, name: str) -> object:
            return getattr(platform, name)

    platform = worker.current_platform
    monkeypatch.setattr(worker, "current_platform", Platform())
    make_decoder(monkeypatch)
    assert len(logged) == count
    assert all(line.startswith("NIXL peer release: UCX_") for line in logged)
