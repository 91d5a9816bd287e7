# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The report: a page from a template, and its plots."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt  # noqa: E402

_TEMPLATE = Path(__file__).with_name("page.md.jinja")
# Distinct without colour, in print and for every eye.
_LINES = (("-", "o"), ("--", "s"), (":", "^"))
_STYLE: dict[str, Any] = {
    "figure.figsize": (6.4, 3.6),
    "axes.grid": True,
    "axes.prop_cycle": plt.cycler(color=["black"]),
    "grid.color": "0.85",
    "lines.linewidth": 1.2,
    "font.size": 9,
    "savefig.bbox": "tight",
    # Text that can be searched and read aloud, not its outlines.
    "svg.fonttype": "none",
    # The same figures give the same file.
    "svg.hashsalt": "benchmarks",
}


def write(results: dict[str, Any], folder: Path, parts: tuple[str, ...]) -> None:
    """Write README.md and the plots.

    Args:
        results: Results by part.
        folder: Where to write them.
        parts: Every part there is, in the order of the page.

    """
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"spread": spread, "short": "{:.3g}".format}

    def plot(name: str) -> str:
        with plt.rc_context(_STYLE):
            figure, axes = plt.subplots()
            PLOTS[name](results[name]["figures"], axes)
            axes.legend()
            # Without a date the file changes only when the plot does.
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
        return f"![{name.replace('_', ' ')}]({name}.svg)"

    page = environment.from_string(_TEMPLATE.read_text()).render(
        parts={name: results.get(name) for name in parts}, plot=plot
    )
    # Where a condition or a loop begins or ends there is an empty line too many.
    (folder / "README.md").write_text(re.sub(r"\n{3,}", "\n\n", page).strip() + "\n")


def spread(values: dict[str, float], digits: int = 2) -> str:
    """Return a median with its quartiles."""
    median, p25, p75 = (
        f"{values[name]:.{digits}f}" for name in ("median", "p25", "p75")
    )
    return f"{median} ({p25} to {p75})"


def _step_cost(figures: dict[str, Any], axes: Any) -> None:
    rows = figures["rows"]
    for (line, marker), name in zip(_LINES, ("ours", "stock", "added"), strict=True):
        axes.plot(
            range(len(rows)),
            [row["cpu_us"][name]["median"] for row in rows],
            line,
            marker=marker,
            label={"added": "ours - stock"}.get(name, name),
        )
    axes.set_xticks(range(len(rows)), [str(row["peers"]) for row in rows])
    axes.set(xlabel="connected peers", ylabel="CPU time of a step [us]")


def _release_time(figures: dict[str, Any], axes: Any) -> None:
    for place, row in enumerate(figures["rows"]):
        times = row["ours_s"]
        axes.step(
            [0, *times],
            [number / row["kills"] for number in range(len(times) + 1)],
            _LINES[place // 2][0],
            where="post",
            color="black" if row["busy"] else "0.55",
            label=f"{row['interval_s']:g} s, {'busy' if row['busy'] else 'idle'}",
        )
    axes.axhline(0, color="black", linewidth=3, label="stock: none")
    axes.set(
        xlabel="seconds since SIGKILL", ylabel="share released", ylim=(-0.02, 1.02)
    )


def _throughput(figures: dict[str, Any], axes: Any) -> None:
    for (line, marker), name in zip(_LINES, ("ours", "stock"), strict=False):
        runs = figures["tokens_per_s"]["runs"][name]
        axes.plot(range(1, len(runs) + 1), runs, line, marker=marker, label=name)
    axes.set(xlabel="run", ylabel="tokens per second", ylim=(0, None))


def _fleet(figures: dict[str, Any], axes: Any) -> None:
    quantiles = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
    quantiles["max"] = 1
    crashes = [row for row in figures["rows"] if row["release_s"]][::2]
    for (line, marker), row in zip(_LINES, crashes, strict=False):
        axes.plot(
            [row["release_s"][name] for name in quantiles],
            list(quantiles.values()),
            line,
            marker=marker,
            label=f"{row['fleet']}, {row['scenario']}",
        )
    axes.set(xlabel="seconds since a prefill's crash", ylabel="share released")


def _memory(figures: dict[str, Any], axes: Any) -> None:
    for (line, marker), name in zip(_LINES, ("ours", "stock"), strict=False):
        samples = figures[name]["samples"]
        axes.plot(
            [sample["cycle"] for sample in samples],
            [(sample["rss"] - samples[0]["rss"]) / 1e6 for sample in samples],
            line,
            marker=marker,
            label=name,
        )
    axes.set(xlabel="kills and replacements", ylabel="resident memory, grown by [MB]")


PLOTS: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "step_cost": _step_cost,
    "release_time": _release_time,
    "throughput": _throughput,
    "fleet": _fleet,
    "memory": _memory,
}
