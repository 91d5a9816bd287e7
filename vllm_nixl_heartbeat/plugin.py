# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point that puts our NIXL connector in the place of vLLM's.

Every vLLM process of every user runs :func:`register`, so it imports nothing of
vLLM, not even the connector factory, which brings FastAPI and a second of imports
along. Our module is imported when a connector is asked for; where it does not
fit, the stock connector is returned instead.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.plugins.nixl_heartbeat")

_FACTORY_MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"
_CONNECTOR_MODULE = "vllm_nixl_heartbeat.nixl_connector"
_CONNECTOR_NAMES = ("NixlConnector", "NixlPullConnector")


class _ConnectorLoader:
    """Loads our connector class, or the stock one where ours does not fit."""

    def __init__(self, stock_loader: Any):
        self._stock_loader = stock_loader
        self._connector_cls: Any = None

    def __call__(self) -> Any:
        if self._connector_cls is None:
            self._connector_cls = self._load() or self._stock_loader()
        return self._connector_cls

    def _load(self) -> Any:
        try:
            module = importlib.import_module(_CONNECTOR_MODULE)
            reason = module.unfit_reason()
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
        if reason is not None:
            _stand_down(reason)
            return None
        if not module.is_tested_vllm():
            logger.warning(
                "NIXL peer heartbeat is not tested with this vLLM, only with %s",
                ", ".join(module.TESTED_VLLM),
            )
        return module.NixlConnector


class _FactoryFinder(importlib.abc.MetaPathFinder):
    """Takes the stock connector's place as soon as the factory is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the factory's own spec, with a loader that calls us back."""
        if fullname != _FACTORY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_take_over(module: ModuleType) -> None:
            exec_module(module)
            _take_over(module)

        spec.loader.exec_module = exec_and_take_over  # type: ignore[method-assign]
        return spec


def _stand_down(reason: str) -> None:
    logger.warning("NIXL peer heartbeat stands down: %s", reason)


def _take_over(factory_module: ModuleType) -> None:
    try:
        # The factory refuses to register a name twice, and has no way to take
        # one out, so its table is edited.
        registry = factory_module.KVConnectorFactory._registry
        for name in _CONNECTOR_NAMES:
            stock_loader = registry.get(name)
            if stock_loader is not None and not isinstance(
                stock_loader, _ConnectorLoader
            ):
                registry[name] = _ConnectorLoader(stock_loader)
    except Exception as e:
        _stand_down(f"{type(e).__name__}: {e}")


def register() -> None:
    """Register our connector under the names of vLLM's. Never raises."""
    factory_module = sys.modules.get(_FACTORY_MODULE)
    if factory_module is not None:
        _take_over(factory_module)
    elif not any(isinstance(finder, _FactoryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FactoryFinder())
