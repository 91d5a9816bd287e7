# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""pytest plugin that runs vLLM's own NIXL suites on our connector and worker.

`nixl_lab.upstream` passes it with ``-p``. It records each test's outcome, and
with ``--nixl-swap`` puts our classes in place of vLLM's before the suites import
them.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_STOCK_PACKAGE = f"{_V1}.nixl"
_OUR_MODULE = f"{_V1}.nixl_connector"

# Stock class name to the name of ours.
_REPLACED = {
    "NixlPullConnector": "NixlConnector",
    "NixlPullConnectorWorker": "NixlConnectorWorker",
}

_swapped = pytest.StashKey[dict[type, type]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options that `nixl_lab.upstream` passes."""
    group = parser.getgroup("nixl-upstream")
    group.addoption("--nixl-record", type=Path, required=True)
    group.addoption(
        "--nixl-swap",
        type=Path,
        help="root of the tree whose nixl_connector.py replaces the stock classes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the record and put our classes in place."""
    config.pluginmanager.register(_Recorder(config.getoption("--nixl-record")))
    root = config.getoption("--nixl-swap")
    config.stash[_swapped] = {} if root is None else _swap(root)


def _swap(root: Path) -> dict[type, type]:
    """Replace the stock classes wherever vLLM's NIXL package refers to them.

    Args:
        root: the directory that holds our part of the ``vllm`` tree.

    Returns:
        Stock class to the class that replaced it.
    """
    package = importlib.import_module(_V1)
    package.__path__.append(str(root.joinpath(*_V1.split("."))))
    stock = importlib.import_module(_STOCK_PACKAGE)
    ours = importlib.import_module(_OUR_MODULE)
    replaced = {
        getattr(stock, name): getattr(ours, our_name)
        for name, our_name in _REPLACED.items()
    }
    for module_name, module in list(sys.modules.items()):
        if module_name == _STOCK_PACKAGE or module_name.startswith(
            f"{_STOCK_PACKAGE}."
        ):
            for attribute in _attributes_holding(module, replaced):
                setattr(module, attribute, replaced[getattr(module, attribute)])
    return replaced


def _attributes_holding(module: ModuleType, classes: dict[type, type]) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value in classes
    ]


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """Give our classes the ids of the stock ones, so that runs can be compared."""
    for stock, ours in config.stash[_swapped].items():
        if val is ours:
            return stock.__name__
    return None


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Refuse to run suites that got hold of a stock class all the same."""
    for module in {item.getparent(pytest.Module) for item in items}:
        assert module is not None
        if left := _attributes_holding(module.obj, config.stash[_swapped]):
            raise pytest.UsageError(f"{module.nodeid} uses the stock {left}")


class _Recorder:
    """Appends the outcomes to the record, a line of JSON each.

    A line per phase rather than a file at the end: when a test brings the whole
    process down, what was seen before is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a test."""
        if report.passed:
            outcome = "passed"
        elif hasattr(report, "wasxfail"):
            outcome = "xfailed"
        elif report.skipped:
            outcome = "skipped"
        else:
            outcome = "failed" if report.when == "call" else "error"
        if report.when == "call" or outcome != "passed":
            self._add(report.nodeid, outcome)

    def _add(self, nodeid: str, outcome: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([nodeid, outcome]) + "\n")
