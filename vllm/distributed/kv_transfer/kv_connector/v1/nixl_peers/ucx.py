# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""UCX settings that decide whether, and how soon, a dead peer's memory is freed.

Plain Python over an environment. What UCX reads from its configuration file is
not seen here.
"""

from collections.abc import Mapping
from pathlib import Path

import regex as re

# Has a file per channel where a container or host can map memory of other nodes.
_IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")

# Names and aliases in UCX_TLS that bring the transport in question.
_CUDA_IPC = frozenset({"all", "cuda", "cuda_ipc"})
_RDMA = frozenset({"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda"})
_RDMA |= {"dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5"}

_DURATION = re.compile(r"([\d.]+)(m|s|ms|us|ns|)")
_SECONDS = {"m": 60.0, "s": 1.0, "": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def ucx_setting_problems(
    environ: Mapping[str, str], imex_channels: Path = _IMEX_CHANNELS
) -> list[str]:
    """Return a line for each UCX setting that keeps releases from working well.

    Args:
        environ: Environment variables of a worker on CUDA with the UCX backend.
        imex_channels: Directory of the IMEX channels that the worker can use.

    Returns:
        Lines that name the variable, its value, the value it should have and what
        happens without. Empty if all is well. Settings of transports that
        ``UCX_TLS`` rules out are left alone.

    """
    problems = []

    def check(name: str, wanted: str, is_well: bool, consequence: str) -> None:
        if not is_well:
            value = environ.get(name)
            found = "is not set" if value is None else f"is {value!r}"
            problems.append(f"{name} {found}, should be {wanted!r}: {consequence}")

    tls = environ.get("UCX_TLS", "all")
    if _may_use(tls, _CUDA_IPC):
        check(
            "UCX_CUDA_IPC_CACHE",
            "n",
            environ.get("UCX_CUDA_IPC_CACHE", "y").lower() in ("n", "no", "off", "0"),
            "unless this UCX ties memory keys to endpoints, mappings of a released "
            "peer stay cached and its GPU memory is not freed",
        )
        # Elsewhere UCX would log an error about it.
        if imex_channels.is_dir() and any(imex_channels.iterdir()):
            check(
                "UCX_CUDA_IPC_ENABLE_MNNVL",
                "y",
                environ.get("UCX_CUDA_IPC_ENABLE_MNNVL", "try").lower()
                in ("y", "yes", "on", "1"),
                "where NVLink between nodes does not work, UCX uses RDMA or TCP "
                "without saying so",
            )
    if _may_use(tls, _RDMA):
        check(
            "UCX_RC_GDA_EP_ALLOC_MODE",
            "direct",
            environ.get("UCX_RC_GDA_EP_ALLOC_MODE") == "direct",
            "a reconnect to a released peer can fail with syndrome 0x5d668c",
        )
        for name, wanted, default in (
            ("UCX_KEEPALIVE_INTERVAL", "2s", 20.0),
            ("UCX_UD_TIMEOUT", "5s", 300.0),
        ):
            check(
                name,
                wanted,
                _seconds(environ.get(name), default) <= _seconds(wanted, default),
                "a dead peer is noticed after about 25 s instead of about 10 s",
            )
    return problems


def _may_use(tls: str, names: frozenset[str]) -> bool:
    """Return whether a value of ``UCX_TLS`` allows one of the transports."""
    listed = {name.strip().lstrip("\\") for name in tls.lstrip("^").split(",")}
    if tls.startswith("^"):
        # An alias rules out all that it stands for; "all" is none of them.
        aliases = {"cuda"} if "cuda_ipc" in names else {"ib"}
        specific = names - aliases - {"all"}
        return not (listed & aliases or specific <= listed)
    return bool(listed & names)


def _seconds(value: str | None, default: float) -> float:
    """Parse a UCX duration; what cannot be parsed is as good as the default."""
    match = _DURATION.fullmatch((value or "").strip().lower())
    return float(match[1]) * _SECONDS[match[2]] if match else default
