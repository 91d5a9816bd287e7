# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The drill's report: one HTML file that needs nothing else, not even colours."""

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from nixl_lab.drill_rules import Record, judge, release_times, spread

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.45 system-ui, sans-serif; color: #000; background: #fff;
  max-width: 60rem; margin: 0 auto; padding: 0 1rem 2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
.wide svg { display: block; width: 100%; min-width: 40rem; height: auto; }
table { border-collapse: collapse; }
th, td { border: 1px solid #777; padding: .25rem .5rem; text-align: left;
  vertical-align: top; overflow-wrap: break-word; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { background: #eee; }
pre { overflow-x: auto; border: 1px solid #777; padding: .5rem; }
@media print { body { max-width: none; } .wide svg { min-width: 0; } }
"""
_PLOT: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    # Text stays text: smaller, searchable, and the browser picks the font.
    "svg.fonttype": "none",
    # The same record makes the same file.
    "svg.hashsalt": "drill",
    "hatch.linewidth": 0.6,
}
_WIDTH_IN = 9.0
_ROW_IN = 0.5
_PAIR_IN = 1.0
_DOWN_HATCH = "////"


def write_report(record: Record, path: Path, other: Record | None = None) -> None:
    """Writes the report.

    Args:
        record: What the drill saw.
        path: The HTML file.
        other: Another drill, to be shown beside this one.
    """
    path.write_text(_page(record, other), encoding="utf-8")


def _page(record: Record, other: Record | None) -> str:
    rules = judge(record)
    passed = all(rule.passed for rule in rules)
    verdict = "Passed" if passed else "Failed"
    if record.stopped:
        verdict += ", incomplete"
    title = f"Prefill replacement drill: {verdict.lower()}"
    parts = [
        f"<h1>{title}</h1>",
        _table((), record.about.items()),
        "<h2>Rules</h2>",
        _table(
            ("", "rule", "seen"),
            [("pass" if r.passed else "FAIL", r.text, r.detail) for r in rules],
        ),
    ]
    if record.stopped:
        parts += [
            "<h2>Stopped before its time</h2>",
            f"<pre>{escape(record.stopped)}</pre>",
        ]
    parts += [
        "<h2>Time line</h2>",
        "<p>Below it, for each pair and second: right answers upwards in grey, failures"
        " downwards in black with a cross.</p>",
        f'<div class="wide" id="timeline">{_figure(record)}</div>',
        "<h2>Release times</h2>",
        _release_table(record),
        "<h2>Failed requests by cause</h2>",
        _count_table("cause", record.causes()),
        "<h2>Errors in the decoders' logs by kind</h2>",
        _error_table(record),
    ]
    parts.append("<h2>Beside another drill</h2>")
    if other is None:
        parts.append("<p>None was given (<code>--compare</code>).</p>")
    else:
        parts.append(_comparison(record, other))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _table(
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: int = 0,
    name: str = "",
) -> str:
    """A table; the last columns, `numbers` of them, hold numbers."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = [
            f"<td{' class=n' if len(row) - i <= numbers else ''}>{escape(cell)}</td>"
            for i, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    marked = f' id="{name}"' if name else ""
    return (
        f'<div class="wide"><table{marked}>\n' + "\n".join(lines) + "\n</table></div>"
    )


def _release_table(record: Record) -> str:
    rows = [
        (
            f"cycle {kill.cycle}, killed at {_clock(kill.killed)}",
            *(_seconds(record.release_seconds(kill, d)) for d in record.decoders),
        )
        for kill in record.kills
    ]
    count = len(record.decoders)
    times = _table(("", *record.decoders), rows, count, "releases")
    known = [s for s in release_times(record) if s is not None]
    figures = spread(known)
    summary = _table(
        ("releases", *figures),
        [
            (
                f"{len(known)} of {len(release_times(record))}",
                *map(_seconds, figures.values()),
            )
        ],
        len(figures),
        "release-summary",
    )
    return (
        f"{summary}\n<p>Seconds from each kill to the decoder's log line:</p>\n{times}"
    )


def _count_table(heading: str, counts: Counter[str]) -> str:
    if not counts:
        return "<p>None.</p>"
    rows = [(key, str(count)) for key, count in counts.most_common()]
    return _table((heading, "number"), rows, 1)


def _error_table(record: Record) -> str:
    kinds = record.kinds()
    if not kinds:
        return "<p>None.</p>"
    rows = [
        (kind, "yes" if excused else "NO", str(count))
        for (kind, excused), count in kinds.most_common()
    ]
    return _table(("kind", "expected", "number"), rows, 1)


def _comparison(record: Record, other: Record) -> str:
    columns = [_summary(each) for each in (record, other)]
    rows = [(key, *(column.get(key, "-") for column in columns)) for key in columns[0]]
    return _table(("", "this drill", "the other"), rows, name="comparison")


def _summary(record: Record) -> dict[str, str]:
    """A drill in one column."""
    times = release_times(record)
    known = [s for s in times if s is not None]
    in_time = sum(s <= record.release_limit for s in known)
    figures = spread(known)
    summary = dict(record.about)
    summary["releases in time"] = f"{in_time} of {len(times)}"
    summary["release times"] = (
        ", ".join(f"{name} {_seconds(value)}" for name, value in figures.items())
        or "none"
    )
    summary["requests"] = f"{len(record.requests)}, {len(record.failures())} failed"
    for rule in judge(record):
        # The limit's value is in the text and may differ.
        key = rule.text.split(" within ")[0]
        summary[key] = f"{'pass' if rule.passed else 'FAIL'}: {rule.detail}"
    return summary


def _figure(record: Record) -> str:
    """The time line, and the requests of each pair below it, as SVG."""
    pairs = list(itertools.product(record.prefills, record.decoders))
    rows = record.prefills + record.decoders
    heights = [_ROW_IN * len(rows) + 0.4, *[_PAIR_IN] * len(pairs)]
    with matplotlib.rc_context(_PLOT):
        figure = Figure((_WIDTH_IN, sum(heights) + 0.8), layout="constrained")
        first, *others = figure.subplots(
            len(heights), sharex=True, height_ratios=heights
        )
        _draw_timeline(first, record, rows)
        for axes, (prefill, decode) in zip(others, pairs):
            _draw_pair(axes, record, prefill, decode)
        last = others[-1]
        last.set_xlim(_begin(record), _end(record))
        # Whole minutes, ten or fewer.
        minutes = math.ceil((_end(record) - _begin(record)) / 600)
        last.xaxis.set_major_locator(MultipleLocator(60 * minutes))
        last.xaxis.set_major_formatter(FuncFormatter(lambda t, _: _clock(t)))
        last.set_xlabel("minutes since the drill began")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    label = "Time line of each instance and requests of each pair"
    return svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{label}"', 1
    )


def _draw_timeline(axes: Axes, record: Record, rows: list[str]) -> None:
    places = {name: len(rows) - 1 - i for i, name in enumerate(rows)}
    begin, end = _begin(record), _end(record)
    for name, y in places.items():
        up, down = [], []
        since = begin
        for outage in record.outages:
            if outage.instance == name:
                ready = end if outage.ready is None else outage.ready
                up.append((since, outage.killed - since))
                down.append((outage.killed, ready - outage.killed))
                since = ready
        up.append((since, end - since))
        axes.broken_barh(up, (y - 0.15, 0.3), color="0.75", edgecolor="black", lw=0.5)
        axes.broken_barh(
            down,
            (y - 0.15, 0.3),
            facecolor="white",
            edgecolor="black",
            hatch=_DOWN_HATCH,
            lw=0.5,
        )
    kills = [(o.killed, places[o.instance]) for o in record.outages]
    restarts = [
        (o.ready, places[o.instance]) for o in record.outages if o.ready is not None
    ]
    engines = {kill.engine for kill in record.kills}
    releases = [
        (r.at, places[r.decoder]) for r in record.releases if r.engine in engines
    ]
    for marks, marker, face, name in (
        (kills, "X", "black", "kill"),
        (restarts, "^", "white", "restarted"),
        (releases, "v", "black", "release"),
    ):
        for number, (x, y) in enumerate(marks):
            axes.plot(
                [x],
                [y],
                marker=marker,
                markersize=10,
                markerfacecolor=face,
                markeredgecolor="black" if face == "white" else "white",
                linestyle="none",
                label=name if number == 0 else None,
                gid=f"{name}-{number + 1}",
                zorder=3,
            )
    axes.broken_barh(
        [],
        (0, 0),
        facecolor="white",
        edgecolor="black",
        hatch=_DOWN_HATCH,
        label="down",
    )
    axes.set_yticks(list(places.values()), list(places))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _draw_pair(axes: Axes, record: Record, prefill: str, decode: str) -> None:
    """Answers upwards in grey, failures downwards in black, per second."""
    mine = [r for r in record.requests if (r.prefill, r.decode) == (prefill, decode)]
    right = Counter(int(r.end) for r in mine if not r.error)
    wrong = Counter(int(r.end) for r in mine if r.error)
    seconds = range(int(_begin(record)), int(_end(record)) + 2)
    axes.stairs(
        [right[s] for s in seconds[:-1]],
        seconds,
        fill=True,
        color="0.6",
        gid=f"answers-{prefill}-{decode}",
    )
    axes.stairs(
        [-wrong[s] for s in seconds[:-1]],
        seconds,
        fill=True,
        color="black",
        gid=f"failures-{prefill}-{decode}",
    )
    axes.plot(
        list(wrong),
        [-n for n in wrong.values()],
        marker="x",
        color="black",
        linestyle="none",
    )
    axes.axhline(0, color="black", lw=0.5)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{abs(y):.0f}"))
    axes.set_ylim(-max([*wrong.values(), 1]) * 1.3, max([*right.values(), 3]) * 1.2)
    axes.set_title(
        f"{prefill} \N{RIGHTWARDS ARROW} {decode}: {sum(right.values())} answers,"
        f" {sum(wrong.values())} failures",
        loc="left",
        fontsize="medium",
    )


def _begin(record: Record) -> float:
    return min((r.start for r in record.requests), default=0.0)


def _end(record: Record) -> float:
    times = [record.ended or 0.0, *(r.end for r in record.requests)]
    return max(*times, _begin(record) + 1)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
