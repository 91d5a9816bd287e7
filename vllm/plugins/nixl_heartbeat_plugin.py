# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point that puts our NIXL connector in the place of vLLM's.

Every vLLM process of every user runs :func:`register`, so it imports nothing
but the connector factory. Our module is imported when a connector is asked for;
where it does not fit, the stock connector is returned instead.
"""

import importlib
import logging
from typing import Any

logger = logging.getLogger("vllm.plugins.nixl_heartbeat")

_CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector"
_CONNECTOR_NAMES = ("NixlConnector", "NixlPullConnector")


class _Loader:
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
            logger.warning("NIXL peer heartbeat stands down: %s", reason)
            return None
        if not module.is_tested_vllm():
            logger.warning(
                "NIXL peer heartbeat is not tested with this vLLM, only with %s",
                ", ".join(module.TESTED_VLLM),
            )
        return module.NixlConnector


def register() -> None:
    """Register our connector under the names of vLLM's. Never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )

        # The factory refuses to register a name twice, and has no way to take
        # one out, so its table is edited.
        registry = KVConnectorFactory._registry
        for name in _CONNECTOR_NAMES:
            stock_loader = registry.get(name)
            if stock_loader is not None and not isinstance(stock_loader, _Loader):
                registry[name] = _Loader(stock_loader)
    except Exception as e:
        logger.warning("NIXL peer heartbeat stands down: %s: %s", type(e).__name__, e)
