# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Taking the stock connector's place, and standing down where we do not fit."""

import importlib.machinery
import logging
import sys
from typing import Any

import pytest
from worker_factory import make_vllm_config

import vllm.distributed.kv_transfer.kv_connector.v1.nixl as stock_package
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorRole,
    nixl_connector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlBaseConnectorWorker,
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector as StockConnector,
)
from vllm_nixl_heartbeat.plugin import register


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A connector registry in which the plugin is not registered."""
    stock = {
        "NixlConnector": lambda: StockConnector,
        "NixlPullConnector": lambda: StockConnector,
        "Other": lambda: object,
    }
    monkeypatch.setattr(KVConnectorFactory, "_registry", stock)
    return stock


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin warns of."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.plugins.nixl_heartbeat")
    monkeypatch.setattr(logger, "warning", lambda msg, *args: lines.append(msg % args))
    return lines


def load() -> type:
    return KVConnectorFactory.get_connector_class_by_name("NixlConnector")


def test_it_takes_the_stock_connectors_names_and_no_other(registry: dict[str, Any]):
    register()
    assert load() is nixl_connector.NixlConnector
    assert registry["NixlPullConnector"]() is nixl_connector.NixlConnector
    assert registry["Other"]() is object


def test_registering_twice_is_harmless(registry: dict[str, Any]):
    register()
    first = dict(registry)
    register()
    assert registry == first


def test_a_missing_name_is_not_invented(registry: dict[str, Any]):
    del registry["NixlPullConnector"]
    register()
    assert sorted(registry) == ["NixlConnector", "Other"]


def _has_the_feature(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        NixlPullConnectorWorker,
        "_release_unreachable_remote_engines",
        lambda self: None,
        raising=False,
    )
    return "releases unreachable peers itself"


def _lacks_a_method(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(NixlBaseConnectorWorker, "_pop_done_transfers")
    return "lacks _pop_done_transfers"


def _lacks_an_attribute(monkeypatch: pytest.MonkeyPatch) -> str:
    def init(self: Any) -> None:
        self._remote_agents = {}

    monkeypatch.setattr(NixlBaseConnectorWorker, "__init__", init)
    return "_engine_last_active"


def _lacks_a_class(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, nixl_connector.__name__)
    monkeypatch.delattr(stock_package, "NixlPullConnectorWorker")
    return "ImportError: cannot import name 'NixlPullConnectorWorker'"


@pytest.mark.parametrize(
    "doctor", [_has_the_feature, _lacks_a_method, _lacks_an_attribute, _lacks_a_class]
)
def test_it_stands_down_where_it_does_not_fit(
    doctor: Any, registry: dict[str, Any], warnings: list[str], monkeypatch: Any
):
    reason = doctor(monkeypatch)
    register()
    assert [load() for _ in range(3)] == [StockConnector] * 3
    (line,) = warnings
    assert line.startswith("NIXL peer heartbeat stands down: ") and reason in line


def test_picked_by_hand_it_says_why_it_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    reason = _lacks_a_method(monkeypatch)
    with pytest.raises(RuntimeError, match=reason):
        nixl_connector.NixlConnector(
            make_vllm_config("d"), KVConnectorRole.SCHEDULER, None
        )


def test_a_factory_of_another_shape_does_not_break_serving(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
):
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    register()
    (line,) = warnings
    assert "stands down: AttributeError" in line


FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def no_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which the factory has not been imported yet."""
    package = sys.modules[FACTORY.rpartition(".")[0]]
    monkeypatch.setattr(package, "factory", sys.modules[FACTORY])
    monkeypatch.delitem(sys.modules, FACTORY)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def test_the_factory_is_not_imported_but_waited_for(no_factory: None):
    before = list(sys.meta_path)
    register()
    register()
    assert FACTORY not in sys.modules and len(sys.meta_path) == len(before) + 1
    factory = importlib.import_module(FACTORY).KVConnectorFactory
    assert sys.meta_path == before
    loaded = factory.get_connector_class_by_name("NixlConnector")
    assert loaded is nixl_connector.NixlConnector
    push = factory.get_connector_class_by_name("NixlPushConnector")
    assert push is stock_package.NixlPushConnector


def test_a_vllm_without_a_factory_does_not_break_serving(
    no_factory: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *args: None)
    register()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(FACTORY)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.33.2rc1", True),
        ("0.34.0", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_which_releases_are_tested(version: str, tested: bool):
    assert nixl_connector.is_tested_vllm(version) is tested


def test_an_untested_vllm_works_and_is_named_once(
    registry: dict[str, Any], warnings: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nixl_connector, "is_tested_vllm", lambda: False)
    register()
    assert {load() for _ in range(3)} == {nixl_connector.NixlConnector}
    (line,) = warnings
    assert "is not tested with this vLLM" in line


def test_the_names_of_the_old_module_are_importable():
    for name in (
        "NixlAgentMetadata",
        "NixlConnector",
        "NixlConnectorMetadata",
        "NixlConnectorScheduler",
        "NixlConnectorWorker",
        "NixlKVConnectorStats",
    ):
        assert hasattr(nixl_connector, name)
    assert nixl_connector.NixlPullConnector is nixl_connector.NixlConnector


def test_subclasses_that_others_made_of_the_stock_connector_stay_theirs(
    registry: dict[str, Any],
):
    class Theirs(StockConnector):
        pass

    registry["Theirs"] = lambda: Theirs
    register()
    load()
    assert registry["Theirs"]() is Theirs
    assert not issubclass(Theirs, nixl_connector.NixlConnector)
