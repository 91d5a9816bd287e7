# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Taking the stock connectors' place, and leaving them there where we do not fit."""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

import vllm
import vllm.distributed.kv_transfer.kv_connector.v1.nixl as stock_package
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlBaseConnectorWorker,
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector as StockPull,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPushConnector as StockPush,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPushConnectorWorker as StockPushWorker,
)
from vllm_nixl_heartbeat import compatibility, nixl_connector
from vllm_nixl_heartbeat.plugin import register

Doctor = Callable[[pytest.MonkeyPatch], str]

NIXL = compatibility.installed_nixl()["nixl-cu12"]
FITS = "supported: vLLM 0.31 to 0.33 with NIXL 1.5.0 or newer"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A connector registry in which the plugin is not registered."""
    stock = {
        "NixlConnector": lambda: StockPull,
        "NixlPullConnector": lambda: StockPull,
        "NixlPushConnector": lambda: StockPush,
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


def load(name: str = "NixlConnector") -> type:
    return KVConnectorFactory.get_connector_class_by_name(name)


def test_it_takes_the_stock_connectors_names_and_no_other(
    registry: dict[str, Any], warnings: list[str]
):
    register()
    assert load() is load("NixlPullConnector") is nixl_connector.NixlConnector
    assert load("NixlPushConnector") is nixl_connector.NixlPushConnector
    assert registry["Other"]() is object
    assert warnings == []


def test_registering_twice_is_harmless(registry: dict[str, Any]):
    register()
    first = dict(registry)
    register()
    assert registry == first


def test_a_missing_name_is_not_invented(registry: dict[str, Any]):
    del registry["NixlPullConnector"]
    register()
    assert "NixlPullConnector" not in registry


def test_another_plugins_connector_stays(registry: dict[str, Any], warnings: list[str]):
    class Theirs(StockPull):
        pass

    registry["NixlConnector"] = lambda: Theirs
    register()
    assert load() is Theirs
    assert load("NixlPullConnector") is nixl_connector.NixlConnector
    (line,) = warnings
    assert line == (
        "NIXL peer release disabled for NixlConnector, using "
        f"{__name__}.{Theirs.__qualname__}: another plugin has registered it "
        f"(found vLLM {vllm.__version__}, nixl-cu12 {NIXL}; {FITS})"
    )


def test_subclasses_that_others_made_of_the_stock_connector_stay_theirs(
    registry: dict[str, Any],
):
    class Theirs(StockPull):
        pass

    registry["Theirs"] = lambda: Theirs
    register()
    load()
    assert registry["Theirs"]() is Theirs
    assert not issubclass(Theirs, nixl_connector.NixlConnector)


# -- Where it does not fit -------------------------------------------------------------


def _has_the_feature(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        NixlPullConnectorWorker,
        "_release_unreachable_remote_engines",
        lambda self: None,
        raising=False,
    )
    return "this vLLM releases unreachable peers itself"


def _lacks_a_method(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(NixlBaseConnectorWorker, "_handle_heartbeat")
    return "NixlPullConnectorWorker lacks _handle_heartbeat"


def _only_reads_an_attribute(monkeypatch: pytest.MonkeyPatch) -> str:
    attributes = (*nixl_connector.STOCK_WORKER_ATTRIBUTES, "vllm_config")
    monkeypatch.setattr(nixl_connector, "STOCK_WORKER_ATTRIBUTES", attributes)
    # A name that a method only loads is no attribute of the worker.
    monkeypatch.setattr(
        nixl_connector, "STOCK_WORKER_ATTRIBUTES", (*attributes, "perf_counter")
    )
    return "lacks perf_counter"


def _too_old(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    return f"vLLM 0.30.0 is not supported (found vLLM 0.30.0, nixl-cu12 {NIXL}; {FITS})"


def _too_new(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vllm, "__version__", "0.34.0.dev7+g1234567")
    return "vLLM 0.34.0.dev7+g1234567 is not supported (found vLLM 0.34.0.dev7"


def _no_version(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vllm, "__version__", "dev")
    return f"Invalid version: 'dev' (found vLLM dev, nixl-cu12 {NIXL}; {FITS})"


def _old_nixl(monkeypatch: pytest.MonkeyPatch) -> str:
    versions = {"nixl-cu12": "1.4.1"}
    monkeypatch.setattr(compatibility, "installed_nixl", lambda: versions)
    return "nixl-cu12 1.4.1 is too old (found vLLM "


def _no_nixl(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(compatibility, "installed_nixl", dict)
    return "NIXL is not installed"


def _lacks_a_class(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, nixl_connector.__name__)
    monkeypatch.delattr(stock_package, "NixlPullConnectorWorker")
    return "ImportError: cannot import name 'NixlPullConnectorWorker'"


@pytest.mark.parametrize(
    "doctor",
    [
        _has_the_feature,
        _lacks_a_method,
        _only_reads_an_attribute,
        _too_old,
        _too_new,
        _no_version,
        _old_nixl,
        _no_nixl,
        _lacks_a_class,
    ],
)
def test_the_stock_connector_stays_with_one_line_that_says_why(
    doctor: Doctor,
    registry: dict[str, Any],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    reason = doctor(monkeypatch)
    register()
    assert [load() for _ in range(3)] == [StockPull] * 3
    (line,) = warnings
    assert line.startswith(
        "NIXL peer release disabled for NixlConnector, using the stock connector: "
    )
    assert reason in line
    assert line.endswith(f"; {FITS})")


def test_where_only_the_push_worker_does_not_fit_only_push_stays_stock(
    registry: dict[str, Any], warnings: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(StockPushWorker, "_do_start_push_kv")
    register()
    assert load("NixlPushConnector") is StockPush
    assert load() is nixl_connector.NixlConnector
    (line,) = warnings
    assert "NixlPushConnectorWorker lacks _do_start_push_kv" in line


def test_a_factory_of_another_shape_does_not_break_serving(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
):
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    register()
    (line,) = warnings
    assert "disabled for all connectors" in line and "AttributeError" in line


def test_what_the_connectors_need_of_the_stock_workers_is_there():
    for worker, methods, attributes in (
        (
            NixlPullConnectorWorker,
            nixl_connector.STOCK_PULL_WORKER_METHODS,
            nixl_connector.STOCK_WORKER_ATTRIBUTES,
        ),
        (
            StockPushWorker,
            nixl_connector.STOCK_PUSH_WORKER_METHODS,
            nixl_connector.STOCK_PUSH_WORKER_ATTRIBUTES,
        ),
    ):
        assert compatibility.unfit_structure(worker, methods, attributes) is None


@pytest.mark.parametrize(
    ("installed", "loaded", "counts"),
    [
        (["nixl", "nixl-cu12", "nixl-cu13"], ["nixl_cu13"], ["nixl-cu13"]),
        (["nixl", "nixl-cu12", "nixl-cu13"], [], ["nixl-cu12", "nixl-cu13"]),
        (["nixl", "nixl-rocm"], [], ["nixl-rocm"]),
        (["nixl"], [], ["nixl"]),
        ([], [], []),
    ],
)
def test_which_build_of_nixl_counts(
    installed: list[str],
    loaded: list[str],
    counts: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def version(name: str) -> str:
        if name not in installed:
            raise compatibility.metadata.PackageNotFoundError(name)
        return "1.5.0"

    monkeypatch.setattr(compatibility.metadata, "version", version)
    for name in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, sys)
    assert list(compatibility.installed_nixl()) == counts


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.33.2rc1", True),
        ("0.33.1.dev5+g0123456", True),
        ("0.30.9", False),
        ("0.34.0", False),
        ("1.0.0", False),
    ],
)
def test_which_releases_fit(version: str, fits: bool):
    reason = compatibility.unfit_version(version, {"nixl": "1.5.0"})
    assert (reason is None) is fits


def test_a_release_that_is_added_to_the_list_fits():
    code = inspect.getsource(compatibility).replace(
        str(compatibility.TESTED_VLLM[-1]), '0.33.0", "0.34.0", "0.35.0'
    )
    module: dict[str, Any] = {}
    exec(code, module)
    assert module["unfit_version"]("0.35.1", {"nixl": "1.5.0"}) is None
    assert module["unfit_version"]("0.36.0", {"nixl": "1.5.0"}) is not None


# -- Before the factory is imported ----------------------------------------------------

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


def test_it_works_where_another_finder_finds_vllm(
    no_factory: None, monkeypatch: pytest.MonkeyPatch
):
    """An editable vLLM is found by a finder of its own."""
    find_spec = importlib.machinery.PathFinder.find_spec

    class Editable:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            return find_spec(name, path, target) if name == FACTORY else None

    def not_there(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name == FACTORY else find_spec(name, path, target)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", not_there)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    register()
    factory = importlib.import_module(FACTORY).KVConnectorFactory
    loaded = factory.get_connector_class_by_name("NixlConnector")
    assert loaded is nixl_connector.NixlConnector


def test_a_vllm_without_a_factory_does_not_break_serving(
    no_factory: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *args: None)
    register()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(FACTORY)
