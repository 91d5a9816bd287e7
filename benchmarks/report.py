# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The report: tables and plots of the kept results."""

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt  # noqa: E402

_INTRO = """# Benchmarks

What the connector costs and how fast it is. Written by `make bench`; all figures are
in [results.json](results.json). Every comparison is with vLLM's own connector, in the
same run on the same machine, turn by turn.

**Not measured here:** RDMA and NVLink. These machines have neither: NIXL's agents talk
over TCP and shared memory on one host. How long UCX takes to see a dead peer, and what
a release frees, differs there; `make gpu-check` measures the latter on one GPU.
"""
_MISSING = "Not run yet.\n"
# Distinct without colour, in print and for every eye.
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_STYLE: dict[str, Any] = {
    "figure.figsize": (6.4, 3.6),
    "axes.grid": True,
    "axes.prop_cycle": plt.cycler(color=["black"]),
    "grid.color": "0.85",
    "lines.linewidth": 1.2,
    "svg.hashsalt": "benchmarks",
    "font.size": 9,
    "savefig.bbox": "tight",
}


def write(results: dict[str, Any], folder: Path) -> None:
    """Write README.md and the plots."""
    sections: list[tuple[str, str, Callable[[dict[str, Any], Path], str]]] = [
        ("step_cost", "Step cost", step_cost),
        ("heartbeat_cost", "Heartbeat cost", heartbeat_cost),
        ("monitor_cost", "Monitor cost", monitor_cost),
        ("release_time", "From the kill to the release", release_time),
        ("throughput", "Throughput", throughput),
        ("fleet", "A fleet, simulated", fleet),
        ("memory", "Memory", memory),
    ]
    parts = [_INTRO]
    with plt.rc_context(cast(Any, _STYLE)):
        for name, title, section in sections:
            parts.append(f"## {title}\n")
            result = results.get(name)
            if result is None:
                parts.append(_MISSING)
                continue
            parts.append(section(result["data"], folder))
            parts.append(targets(result["targets"]))
    parts.append(machines(results))
    (folder / "README.md").write_text("\n".join(parts))


def targets(limits: list[dict[str, Any]]) -> str:
    """Return what was promised, and what became of it."""
    missed = [limit for limit in limits if not limit["met"]]
    if not missed:
        return f"Targets: all {len(limits)} met.\n"
    lines = [
        f"- {limit['what']}: {limit['value']:.3g} {limit['unit']},"
        f" at most {limit['at_most']:.3g}"
        for limit in missed
    ]
    return "\n".join([f"Targets: {len(missed)} of {len(limits)} missed:\n", *lines, ""])


def prose(text: str) -> str:
    """Return a paragraph."""
    return textwrap.fill(" ".join(text.split()), 88, break_on_hyphens=False) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; all but the first column to the right."""
    head = list(head)
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def spread(values: dict[str, float], digits: int = 2) -> str:
    """Return a median with its quartiles."""
    median, p25, p75 = (
        f"{values[name]:.{digits}f}" for name in ("median", "p25", "p75")
    )
    return f"{median} ({p25} to {p75})"


def save(figure: Any, folder: Path, name: str) -> str:
    """Write a plot; return the line that shows it."""
    # Without a date the file changes only when the plot does.
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    return f"![{name.replace('_', ' ')}]({name}.svg)\n"


def machines(results: dict[str, Any]) -> str:
    """Return where each part ran, and with which versions."""
    rows = []
    for name, result in results.items():
        where = result["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
        rows.append(
            (
                name,
                where["processor"],
                where["cores"],
                where["load_before"],
                f"{result['seconds']:.0f}",
                versions,
            )
        )
    head = ("part", "processor", "cores", "load before", "seconds", "versions")
    return "## Machine and versions\n\n" + table(head, rows)


def step_cost(data: dict[str, Any], folder: Path) -> str:
    """Show steps with nothing to do."""
    rows = data["rows"]
    figure, axes = plt.subplots()
    x = range(len(rows))
    for place, name in enumerate(("ours", "stock", "added")):
        axes.plot(
            x,
            [row["cpu_us"][name]["median"] for row in rows],
            _STYLES[place],
            marker=_MARKERS[place],
            label={"added": "ours - stock"}.get(name, name),
        )
    axes.set_xticks(list(x), [str(row["peers"]) for row in rows])
    axes.set(xlabel="connected peers", ylabel="CPU time of a step [us]")
    axes.legend()
    head = (
        "peers",
        "stock, us",
        "ours, us",
        "added, us",
        "ratio",
        "added, wall clock, us",
    )
    return "\n".join(
        [
            prose(
                """`start_load_kv` and `get_transfer_results` of the real workers with
                nothing to do and nothing due, on an agent that does nothing: CPU time
                of the thread, median (quartiles) of alternating batches. That a step
                takes longer with more peers is stock's part: it compares all its peers
                with all their addresses."""
            ),
            table(
                head,
                [
                    (
                        row["peers"],
                        spread(row["cpu_us"]["stock"]),
                        spread(row["cpu_us"]["ours"]),
                        spread(row["cpu_us"]["added"]),
                        f"{row['cpu_us']['ratio']:.2f}",
                        spread(row["wall_us"]["added"]),
                    )
                    for row in rows
                ],
            ),
            save(figure, folder, "step_cost"),
        ]
    )


def heartbeat_cost(data: dict[str, Any], folder: Path) -> str:
    """Show what a heartbeat takes."""
    burst = data["burst"]
    head = (
        "peers",
        "between steps",
        "heartbeats",
        "our part, us",
        "NIXL's send, us",
        "per peer and second, us",
    )
    longest = burst["longest_step_us"]
    return "\n".join(
        [
            prose(
                """Per heartbeat, on real NIXL agents over TCP, wall clock: median
                (quartiles). Steps follow each other at once, or after a millisecond in
                which the core is idle and the caches cool, for NIXL's code as for ours.
                The last column is both parts, at the default interval; the target is
                for steps that follow at once. A thousand heartbeats a second are sent,
                whatever the number of peers. The rarer they are, the more of their code
                has left the caches, or the memory: on the machine of these figures one
                every 10 ms took 11 us of ours and 30 of NIXL's, one every 100 ms 49 and
                114."""
            ),
            table(
                head,
                [
                    (
                        row["peers"],
                        f"{row['pause_s'] * 1e3:.0f} ms",
                        row["heartbeats"],
                        spread(row["own_us"], 1),
                        spread(row["send_notif_us"], 1),
                        f"{row['per_peer_and_second_us']:.1f}",
                    )
                    for row in data["rows"]
                ],
            ),
            prose(
                f"""A step begins no heartbeat once it has done {burst["bound_sends"]}
                sends (a peer takes as many as ranks of it are read from). With
                {burst["peers_due"]:,} peers of one rank due at once, no step did more
                than {burst["most_sends"]} sends, all were through after
                {burst["steps_until_all_sent"]:.0f} steps, and the longest step took
                {longest["median"] / 1e3:.2f} ms by the wall clock (median of
                {longest["count"]} times; {longest["max"] / 1e3:.2f} ms at most)."""
            ),
        ]
    )


def monitor_cost(data: dict[str, Any], folder: Path) -> str:
    """Show what an idle decoder's monitor takes."""
    awake, resting, machine = (data[k] for k in ("awake", "resting", "machine"))
    return "\n".join(
        [
            prose(
                f"""CPU time of the monitor's thread in a decoder that takes no step and
                has {data["peers"]} peers, each with a side channel of its own, at the
                default interval. It ticks once a second, and has most to do in the
                first {data["seconds"]} s without requests: the longer they last, the
                rarer heartbeats get. Awake: the same ticks follow each other within
                milliseconds, on a clock that is advanced by a second each time. The
                target is for these: what comes on top at the real pace is the
                machine's. Here a mere look at 100 small objects took
                {machine["after_rest_us"]:.0f} us after a second's rest and
                {machine["at_once_us"]:.0f} us at once; a host that takes idle memory
                away from its virtual machines makes this worse."""
            ),
            table(
                ("", "share of a core"),
                [
                    (
                        f"our part, awake, {awake['idle_s'] // 60} minutes",
                        f"{awake['own_share']:.3%}",
                    ),
                    (
                        f"our part, awake, first {data['seconds']} s",
                        f"{awake['own_share_at_first']:.3%}",
                    ),
                    (
                        f"our part, at the real pace, {data['seconds']} s",
                        f"{resting['own_share']:.3%}",
                    ),
                    (
                        f"with NIXL's part, at the real pace, {data['seconds']} s",
                        f"{resting['with_nixl_share']:.3%}",
                    ),
                ],
            ),
        ]
    )


def release_time(data: dict[str, Any], folder: Path) -> str:
    """Show the distributions from the kill to the release."""
    figure, axes = plt.subplots()
    for place, row in enumerate(data["rows"]):
        times = row["ours_s"]
        shares = [(number + 1) / row["kills"] for number in range(len(times))]
        axes.step(
            [0, *times],
            [0, *shares],
            _STYLES[place // 2],
            where="post",
            color="black" if row["busy"] else "0.55",
            label=f"{row['interval_s']:g} s, {'busy' if row['busy'] else 'idle'}",
        )
    watched = max(row["stock_watched_s"] for row in data["rows"])
    axes.axhline(0, color="black", linewidth=3, label="stock: none")
    axes.set(
        xlabel="seconds since SIGKILL", ylabel="share released", ylim=(-0.02, 1.02)
    )
    axes.legend()
    kills = sum(row["kills"] for row in data["rows"])
    stock = sum(row["stock_released"] for row in data["rows"])
    head = (
        "interval",
        "decoder",
        "kills",
        "median, s",
        "p95, s",
        "slowest, s",
        "stock",
    )
    return "\n".join(
        [
            prose(
                """Prefills in processes of their own, killed with SIGKILL at random
                moments of the beat. Busy: the decoder steps and reads from another
                prefill. Idle: it takes no step."""
            ),
            table(
                head,
                [
                    (
                        f"{row['interval_s']:g} s",
                        "busy" if row["busy"] else "idle",
                        row["kills"],
                        *(f"{row['ours'][q]:.2f}" for q in ("median", "p95", "max")),
                        f"{row['stock_released']} of {row['kills']}",
                    )
                    for row in data["rows"]
                ],
            ),
            save(figure, folder, "release_time"),
            prose(
                f"""The stock decoder, connected to the same prefills, released {stock}
                of {kills}; it was watched for up to {watched:.0f} s, and drops such a
                peer after an hour, when another engine connects."""
            ),
            prose(
                """Two things these figures leave out. A decoder that has just gone idle
                is looked after an interval later, so a kill at that moment takes up to
                two. And a peer without requests for t seconds is sent a heartbeat every
                t / 10 only, at most every 30 s: the simulation below shows what that
                means in a fleet."""
            ),
        ]
    )


def throughput(data: dict[str, Any], folder: Path) -> str:
    """Show tokens per second and time to first token."""
    rows = []
    for field, title, digits in (
        ("tokens_per_s", "tokens per second", 1),
        ("ttft_s", "median time to first token, s", 3),
    ):
        part = data[field]
        low, high = part["ratio_95"]
        rows.append(
            (
                title,
                spread(part["stock"], digits),
                spread(part["ours"], digits),
                f"{part['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
            )
        )
    figure, axes = plt.subplots()
    runs = data["tokens_per_s"]["runs"]
    for place, name in enumerate(("ours", "stock")):
        axes.plot(
            range(1, len(runs[name]) + 1),
            runs[name],
            _STYLES[place],
            marker=_MARKERS[place],
            label=name,
        )
    axes.set(xlabel="run", ylabel="tokens per second", ylim=(0, None))
    axes.legend()
    head = ("", "stock", "ours", "ours / stock", "95 % interval")
    return "\n".join(
        [
            prose(
                f"""A prefill and a decode server on CPU behind a proxy, twice: they
                serve in turn, {len(runs["ours"])} runs each of {data["requests"]}
                requests by {data["clients"]} clients. Median (quartiles) of the runs,
                and of the ratios of runs that follow each other."""
            ),
            table(head, rows),
            save(figure, folder, "throughput"),
        ]
    )


def fleet(data: dict[str, Any], folder: Path) -> str:
    """Show what the simulation says."""
    parts = [
        prose(
            f"""The policy's real code on simulated time, default interval,
            {data["requests_per_decoder_and_s"]:g} requests per second and decoder, to
            random prefills; a killed prefill is back after {data["restart_s"]:.0f} s,
            routers name it for 2 s more. Per prefill rank (as one rank of each decoder
            talks to it), of a sample of decoders, scaled; an average prefill's worst
            second."""
        )
    ]
    names = list(dict.fromkeys(row["fleet"]["name"] for row in data["rows"]))
    figure, axes = plt.subplots()
    for name in names:
        rows = [row for row in data["rows"] if row["fleet"]["name"] == name]
        sample, bound = (
            rows[0]["fleet"]["sample"],
            rows[0]["most_heartbeats_per_prefill_rank_and_s"],
        )
        parts.append(
            prose(
                f"""**{name}** of {rows[0]["fleet"]["ranks"]} ranks ({sample} decoders
                simulated; {bound:,.0f} heartbeats a second would be one per interval
                from each decoder):"""
            )
        )
        parts.append(table(_FLEET_HEAD, map(_fleet_row, rows)))
        row = next(row for row in rows if row["release_s"])
        quantiles = ("min", "p25", "median", "p75", "p95", "max")
        axes.plot(
            [row["release_s"][q] for q in quantiles],
            (0, 0.25, 0.5, 0.75, 0.95, 1),
            _STYLES[names.index(name)],
            marker=_MARKERS[names.index(name)],
            label=name,
        )
    axes.set(
        xlabel="seconds since a prefill's crash",
        ylabel="share of decoders that let go",
    )
    axes.legend()
    parts.append(save(figure, folder, "fleet"))
    parts.append(
        prose(
            """Handshakes do not come as a herd: nothing in the policy starts one, each
            waits for a request, so they are spread as the requests are, and a decoder
            never has more of them in a second than requests."""
        )
    )
    return "\n".join(parts)


_FLEET_HEAD = (
    "what happens",
    "heartbeats/s, mean",
    "worst s",
    "handshakes/min, worst",
    "worst s",
    "release, median s",
    "p95 s",
    "last s",
    "failed requests",
)


def _fleet_row(row: dict[str, Any]) -> Iterable[object]:
    beats = row["heartbeats_per_prefill_rank_and_s"]
    hands = row["handshakes_per_prefill_rank"]
    release = row["release_s"]
    return (
        row["scenario"],
        f"{beats['mean_per_s']:.0f}",
        f"{beats['worst_second']:.0f}",
        f"{hands['worst_minute']:.0f}",
        f"{hands['worst_second']:.0f}",
        *(f"{release[q]:.1f}" if release else "" for q in ("median", "p95", "max")),
        f"{row['failed_requests_share']:.1%}",
    )


def memory(data: dict[str, Any], folder: Path) -> str:
    """Show what is kept."""
    figure, axes = plt.subplots()
    for place, name in enumerate(("ours", "stock")):
        samples = data[name]["samples"]
        axes.plot(
            [sample["cycle"] for sample in samples],
            [(sample["rss"] - samples[0]["rss"]) / 1e6 for sample in samples],
            _STYLES[place],
            marker=_MARKERS[place],
            label=name,
        )
    axes.set(xlabel="kills and replacements", ylabel="resident memory, grown by [MB]")
    axes.legend()
    cycles = data["ours"]["samples"][-1]["cycle"]
    return "\n".join(
        [
            prose(
                f"""{data["peer_bytes"]:.0f} bytes per connected peer (what the table of
                peers adds to Python's heap). {cycles} prefills killed and replaced at
                their address, real NIXL; growth once warm:"""
            ),
            table(
                ("", "kB per cycle", "file descriptors per cycle"),
                [
                    (
                        name,
                        f"{data[name]['kb_per_cycle']:.1f}",
                        f"{data[name]['fds_per_cycle']:.2f}",
                    )
                    for name in ("stock", "ours")
                ],
            ),
            save(figure, folder, "memory"),
        ]
    )
