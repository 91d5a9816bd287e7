# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""pytest plugin of `tools.fork.check`: vLLM's own NIXL suites on our classes.

With ``NIXL_FORK_SWAP=1`` our connector and worker stand in for the stock ones
wherever vLLM's NIXL package has a name for them. Without, it only keeps the pip
package away, on which nothing in a fork may depend.
"""

import gc
import importlib
import os
import sys
from types import ModuleType

import pytest

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# Stock class to ours.
_SWAPPED: dict[type, type] = {}


def pytest_configure() -> None:
    """Put our classes in place before a suite imports the stock ones."""
    sys.modules["vllm_nixl_heartbeat"] = None  # type: ignore[assignment]
    if os.environ["NIXL_FORK_SWAP"] != "1":
        return
    stock = importlib.import_module(f"{_V1}.nixl")
    ours = importlib.import_module(f"{_V1}.nixl_connector")
    _SWAPPED.update(
        {
            stock.NixlPullConnector: ours.NixlConnector,
            stock.NixlPullConnectorWorker: ours.NixlConnectorWorker,
            stock.NixlPushConnector: ours.NixlPushConnector,
            stock.NixlPushConnectorWorker: ours.NixlPushConnectorWorker,
        }
    )
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{stock.__name__}."):
            for attribute in _stock_names(module):
                setattr(module, attribute, _SWAPPED[getattr(module, attribute)])


def _stock_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value in _SWAPPED
    ]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Give our classes the ids of the stock ones, so that runs can be compared."""
    return next((old.__name__ for old, new in _SWAPPED.items() if val is new), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to run a suite that got hold of a stock class all the same."""
    for module in {item.getparent(pytest.Module) for item in items}:
        if module is not None and (left := _stock_names(module.obj)):
            raise pytest.UsageError(f"{module.nodeid} uses the stock {left}")


def pytest_collection_finish() -> None:
    """Spare the collector what has been imported.

    vLLM's own clean-up runs it after every test, for a second each time: nine tenths of
    the suites' time.
    """
    gc.collect()
    gc.freeze()
    # vLLM's clean-up begins with it.
    gc.unfreeze = lambda: None
