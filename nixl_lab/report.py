# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A report that readers can read: a page of tables and one picture beside it."""

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from nixl_lab.record import Record, Request, Rule

PAGE = "README.md"
PICTURE = "timeline.svg"
_PLOT: Any = {
    "font.family": "sans-serif",
    # Text stays text: smaller, searchable, and the reader's machine picks the font.
    "svg.fonttype": "none",
    # The same record makes the same file.
    "svg.hashsalt": "drill",
    "hatch.linewidth": 0.6,
}
_WIDTH_IN = 9.0
_ROW_IN = 0.35
_PAIR_IN = 0.9
_MAX_BINS = 120


def write_report(record: Record, verdict: Sequence[Rule], folder: Path) -> None:
    """Writes the page and its picture into a folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"clock": _clock, "seconds": _seconds, "cell": _cell}
    template = environment.get_template("report.md.j2")
    page = template.render(record=record, verdict=verdict, picture=PICTURE)
    (folder / PAGE).write_text(page)
    svg = io.StringIO()
    with matplotlib.rc_context(_PLOT):
        _figure(record).savefig(svg, format="svg", metadata={"Date": None})
    # One line a path, not one a point: the picture is kept under version control.
    lines = re.sub(r" ?\n(?=[MLCz] ?)", " ", svg.getvalue()).splitlines()
    (folder / PICTURE).write_text("".join(f"{line.rstrip()}\n" for line in lines))


def _figure(record: Record) -> Figure:
    """The time line of each instance, and below it the requests of each pair."""
    pairs = [
        pair
        for pair in itertools.product(record.prefills, record.decoders)
        if any((r.prefill, r.decode) == pair for r in record.requests)
    ]
    rows = record.prefills + record.decoders
    heights = [_ROW_IN * len(rows) + 0.3, *[_PAIR_IN] * len(pairs)]
    figure = Figure((_WIDTH_IN, sum(heights) + 0.8), layout="constrained")
    first, *others = figure.subplots(
        len(heights), sharex=True, height_ratios=heights, squeeze=False
    )[:, 0]
    begin, end = _span(record)
    _draw_timeline(first, record, rows, (begin, end))
    for axes, pair in zip(others, pairs):
        _draw_pair(axes, record, pair, (begin, end))
    first.set_xlim(begin, end)
    last = others[-1] if others else first
    # Whole minutes, ten or fewer.
    minutes = math.ceil((end - begin) / 600)
    last.xaxis.set_major_locator(MultipleLocator(60 * minutes))
    last.xaxis.set_major_formatter(FuncFormatter(lambda t, _: _clock(t)))
    last.set_xlabel("minutes since the beginning")
    return figure


def _draw_timeline(
    axes: Axes, record: Record, rows: list[str], span: tuple[float, float]
) -> None:
    places = {name: len(rows) - 1 - i for i, name in enumerate(rows)}
    bar: Any = {"edgecolor": "black", "lw": 0.5}
    down: Any = {**bar, "facecolor": "white", "hatch": "////"}
    for name, y in places.items():
        axes.broken_barh([(span[0], span[1] - span[0])], (y - 0.15, 0.3), color="0.75")
        outages = [
            (f.at, (span[1] if f.ready is None else f.ready) - f.at)
            for f in record.faults
            if name in f.instances
        ]
        axes.broken_barh(outages, (y - 0.15, 0.3), **down)
    # A bad request is a fault of no instance.
    faults = [
        (f.at, places[name])
        for f in record.faults
        for name in places.keys() & {*f.instances}
    ]
    releases = [
        (fault.at + seconds, places[decoder])
        for fault in record.kills
        for decoder, seconds in fault.releases.items()
        if seconds is not None
    ]
    for marks, marker, name in ((faults, "X", "fault"), (releases, "v", "release")):
        xs, ys = [x for x, _ in marks], [y for _, y in marks]
        axes.plot(
            xs, ys, marker=marker, ms=8, color="black", mec="white", ls="", label=name
        )
    axes.broken_barh([], (0, 0), label="not as before", **down)
    axes.set_yticks(list(places.values()), list(places))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)


def _draw_pair(
    axes: Axes, record: Record, pair: tuple[str, str], span: tuple[float, float]
) -> None:
    """Answers upwards in grey, failures downwards in black."""
    mine = [r for r in record.requests if (r.prefill, r.decode) == pair]
    width = math.ceil(span[1] / _MAX_BINS)
    edges = range(0, int(span[1]) + 2 * width, width)

    def counts(requests: Iterable[Request]) -> list[int]:
        bins = Counter(int(r.end) // width for r in requests)
        return [bins[edge // width] for edge in edges[:-1]]

    right = counts(r for r in mine if not r.error)
    wrong = counts(r for r in mine if r.error)
    axes.stairs(right, edges, fill=True, color="0.6")
    axes.stairs([-n for n in wrong], edges, fill=True, color="black")
    axes.axhline(0, color="black", lw=0.5)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{abs(y):.0f}"))
    axes.set_title(
        f"{' to '.join(pair)}: {sum(right)} answers, {sum(wrong)} failures"
        f" (per {width} s)",
        loc="left",
        fontsize="medium",
    )


def _span(record: Record) -> tuple[float, float]:
    begin = min((r.start for r in record.requests), default=0.0)
    times = [record.ended or 0.0, *(r.end for r in record.requests)]
    return begin, max(*times, begin + 1)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _cell(text: str) -> str:
    """Text that a cell of a markdown table can hold."""
    return " ".join(text.replace("|", "\\|").split())[:200]
