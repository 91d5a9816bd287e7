# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which vLLM and NIXL the connectors fit; every difference is known here only."""

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from packaging.version import InvalidVersion, Version

TESTED_VLLM = ("0.31.0", "0.32.0", "0.33.0")
"""Releases that the tests run against: the one list of them in the repository."""
TESTED_NIXL = ("1.5.0", "1.5.1")

_OLDEST_VLLM = Version(TESTED_VLLM[0]).release[:2]
_NEWEST_VLLM = Version(TESTED_VLLM[-1]).release[:2]
_OLDEST_NIXL = Version(TESTED_NIXL[0])
# The package `nixl` only picks one of these, whatever its own version.
_NIXL_BUILDS = ("nixl-cu12", "nixl-cu13", "nixl-rocm")


def versions(vllm_version: str, nixl: Mapping[str, str]) -> str:
    """Return which versions were found and which fit, for people."""
    oldest, newest = (".".join(map(str, v)) for v in (_OLDEST_VLLM, _NEWEST_VLLM))
    found = [f"vLLM {vllm_version}", *map(" ".join, nixl.items())]
    return (
        f"found {', '.join(found)}; "
        f"supported: vLLM {oldest} to {newest} with NIXL {_OLDEST_NIXL} or newer"
    )


def installed_nixl() -> dict[str, str]:
    """Return the versions of the installed builds of NIXL, by name.

    Where one of several has been imported, the others do not count; where there is
    none, NIXL may have been built under its plain name.
    """
    loaded = [name for name in _NIXL_BUILDS if name.replace("-", "_") in sys.modules]
    return _installed(loaded or _NIXL_BUILDS) or _installed(["nixl"])


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def unfit_version(vllm_version: str, nixl: Mapping[str, str]) -> str | None:
    """Return why the connectors cannot be used with these versions, or None.

    Args:
        vllm_version: vLLM's ``__version__``; a development version counts as the
            release that it leads to.
        nixl: Versions of the installed NIXL distributions, by name.

    """
    try:
        found = Version(vllm_version).release[:2]
        if not _OLDEST_VLLM <= found <= _NEWEST_VLLM:
            return f"vLLM {vllm_version} is not supported"
        if not nixl:
            return "NIXL is not installed"
        for name, version in nixl.items():
            # In NIXL 1.4 a send to a dead peer can end the process.
            if Version(version) < _OLDEST_NIXL:
                return f"{name} {version} is too old"
    except InvalidVersion as e:
        return str(e)
    return None


def unfit_structure(
    worker_cls: type, methods: Iterable[str], attributes: Iterable[str]
) -> str | None:
    """Return why the connectors cannot extend a stock worker, or None.

    Args:
        worker_cls: The stock worker.
        methods: Names of the methods that it must have.
        attributes: Names of the attributes that its methods must set.

    """
    if hasattr(worker_cls, "_release_unreachable_remote_engines"):
        return "this vLLM releases unreachable peers itself"
    missing = [name for name in methods if not hasattr(worker_cls, name)]
    stored = set(_stored_attributes(worker_cls))
    missing += [name for name in attributes if name not in stored]
    if missing:
        return f"its {worker_cls.__name__} lacks {', '.join(missing)}"
    return None


def _stored_attributes(cls: type) -> Iterator[str]:
    """Yield the attributes that a class and its bases assign on ``self``."""
    for base in cls.__mro__[:-1]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                yield node.attr
