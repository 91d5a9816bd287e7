# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point that puts our NIXL connectors in the place of vLLM's.

Every vLLM process of every user runs :func:`register`, so it imports nothing of vLLM,
not even the connector factory: where only arguments are parsed, that would cost a
second of imports. Our modules are imported when a connector is asked for; where they do
not fit, the stock connector is returned instead.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.plugins.nixl_heartbeat")

_FACTORY_MODULE = "vllm.distributed.kv_transfer.kv_connector.factory"
_STOCK_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


def register() -> None:
    """Register our connectors under the names of vLLM's. Never raises."""
    factory_module = sys.modules.get(_FACTORY_MODULE)
    if factory_module is not None:
        _take_over(factory_module)
    elif not any(isinstance(finder, _FactoryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FactoryFinder())


class _FactoryFinder(importlib.abc.MetaPathFinder):
    """Registers our connectors as soon as the factory is imported."""

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
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_take_over(module: ModuleType) -> None:
            exec_module(module)
            _take_over(module)

        spec.loader.exec_module = exec_and_take_over  # type: ignore[method-assign]
        return spec


def _take_over(factory_module: ModuleType) -> None:
    try:
        # The factory refuses to register a name twice, and has no way to take one
        # out, so its table is edited.
        registry = factory_module.KVConnectorFactory._registry
        for name in _CONNECTORS:
            loader = registry.get(name)
            if loader is not None and not isinstance(loader, _ConnectorLoader):
                registry[name] = _ConnectorLoader(name, loader)
    except Exception as e:
        _disabled(f"{type(e).__name__}: {e}")


class _ConnectorLoader:
    """Loads our connector class, or what was registered where ours does not fit."""

    def __init__(self, name: str, registered_loader: Any):
        self._name = name
        self._registered_loader = registered_loader
        self._connector_cls: Any = None

    def __call__(self) -> Any:
        if self._connector_cls is None:
            registered = self._registered_loader()
            self._connector_cls = self._load(registered) or registered
        return self._connector_cls

    def _load(self, registered: Any) -> Any:
        versions = ""
        try:
            import vllm

            from . import compatibility

            nixl = compatibility.installed_nixl()
            versions = f" ({compatibility.versions(vllm.__version__, nixl)})"
            if not registered.__module__.startswith(f"{_STOCK_PACKAGE}."):
                theirs = f"{registered.__module__}.{registered.__qualname__}"
                _disabled(
                    f"another plugin has registered it{versions}", self._name, theirs
                )
                return None
            reason = compatibility.unfit_version(vllm.__version__, nixl)
            reason = reason or self._unfit_structure()
            if reason is None:
                return getattr(_our_module(), self._name)
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
        _disabled(f"{reason}{versions}", self._name)
        return None

    def _unfit_structure(self) -> str | None:
        """Return why the connector cannot extend the stock one, or None."""
        from . import compatibility

        ours, stock = _our_module(), importlib.import_module(_STOCK_PACKAGE)
        if self._name == "NixlPushConnector":
            return compatibility.unfit_structure(
                stock.NixlPushConnectorWorker,
                ours.STOCK_PUSH_WORKER_METHODS,
                ours.STOCK_PUSH_WORKER_ATTRIBUTES,
            )
        return compatibility.unfit_structure(
            stock.NixlPullConnectorWorker,
            ours.STOCK_PULL_WORKER_METHODS,
            ours.STOCK_WORKER_ATTRIBUTES,
        )


def _our_module() -> Any:
    return importlib.import_module(f"{__package__}.nixl_connector")


def _disabled(
    reason: str, name: str = "all connectors", used: str = "the stock connector"
) -> None:
    logger.warning(
        "NIXL peer release disabled for %s, using %s: %s", name, used, reason
    )
