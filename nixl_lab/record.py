# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an experiment saw, and the rules that it is judged by: plain values, no clock.

All times are seconds since the experiment began.
"""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

WRONG_TOKENS = "wrong tokens"
# A router notices a death by the first request that finds nobody.
GRACE_S = 1.0


def release_limit(interval: float) -> float:
    """Seconds that an instance may take to release a dead peer.

    The first heartbeat after a kill may still be taken without an error.
    """
    return 2 * interval + 1


@dataclass
class Fault:
    """Something that was done to an instance.

    Attributes:
        kind: What was done: "kill", "reset" and so on.
        instances: Who it was done to.
        at: When it was asked for.
        engine: Id of the engine that it ended and that others hold; may be empty.
        over: When it could no longer fail a new request: the instance was seen gone,
            and routers leave it out, or it was as before. None while it lasts.
        ready: When the instance served again, or its replacement did.
        releases: Seconds until each instance that held the engine had released it;
            None for one that had not when the experiment ended.
    """

    kind: str
    instances: list[str]
    at: float
    engine: str = ""
    over: float | None = None
    ready: float | None = None
    releases: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One request; `error` is empty when the answer had the right tokens."""

    start: float
    seconds: float
    prefill: str
    decode: str
    error: str = ""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass
class Record:
    """Everything that an experiment saw.

    Attributes:
        about: Date, versions, machine: for people.
        interval: The connector's `peer_heartbeat_interval`, in seconds.
        faults: What was done, in order.
        requests: All requests of its traffic.
        exits: Instances that were gone although nobody had killed them.
        log_errors: Errors in the decoders' logs that no fault explains, by kind.
        usage: Memory in MiB and file descriptors of each instance's workers, soon after
            its last start and at the end: {instance: [[MiB, descriptors], [...]]}.
        ended: When it ended; None while it runs.
        stopped: Why it ended before its time; empty if it did not.
    """

    about: dict[str, str]
    interval: float
    prefills: list[str]
    decoders: list[str]
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    log_errors: list[str] = field(default_factory=list)
    usage: dict[str, list[list[float]]] = field(default_factory=dict)
    ended: float | None = None
    stopped: str = ""

    @property
    def release_limit(self) -> float:
        return release_limit(self.interval)

    @property
    def kills(self) -> list[Fault]:
        """The faults that ended a prefill."""
        return [fault for fault in self.faults if fault.engine]

    @property
    def failures(self) -> list[Request]:
        return [r for r in self.requests if r.error]

    def release_times(self) -> list[float | None]:
        """Each decoder's time for each dead prefill."""
        return [seconds for kill in self.kills for seconds in kill.releases.values()]

    def first_answer(self, fault: Fault, decoder: str) -> float | None:
        """Seconds from a replacement's readiness to its first answer via a decoder."""
        if fault.ready is None:
            return None
        (name,) = fault.instances
        later = [f.at for f in self.faults if f.at > fault.ready and f.engine]
        return min(
            (
                r.end - fault.ready
                for r in self.requests
                if (r.prefill, r.decode, r.error) == (name, decoder, "")
                and fault.ready <= r.end <= min(later, default=r.end)
            ),
            default=None,
        )

    def cause(self, request: Request) -> str:
        """The fault that a failed request is due to; empty if it is due to none."""
        if request.error == WRONG_TOKENS:
            return ""
        for fault in self.faults:
            over = float("inf") if fault.over is None else fault.over + GRACE_S
            if (
                {request.prefill, request.decode} & {*fault.instances}
                and request.start <= over
                and request.end >= fault.at
            ):
                return f"{fault.kind} of {' and '.join(fault.instances)}"
        return ""

    def causes(self) -> Counter[str]:
        """Failed requests by cause; by their error where there is none."""
        return Counter(self.cause(r) or f"NO CAUSE: {r.error}" for r in self.failures)

    def write(self, path: Path, rules: Sequence["Rule"]) -> None:
        """Writes everything, and what the rules say of it, as JSON."""
        content = dataclasses.asdict(self)
        # A line each would be most of the file.
        content["requests"] = [
            [round(r.start, 3), round(r.seconds, 3), r.prefill, r.decode, r.error]
            for r in self.requests
        ]
        content["rules"] = [dataclasses.asdict(rule) for rule in rules]
        path.write_text(json.dumps(content) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            del content["rules"]
            content["faults"] = [Fault(**each) for each in content["faults"]]
            content["requests"] = [Request(*each) for each in content["requests"]]
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record: {error!r}") from error


@dataclass(frozen=True)
class Rule:
    """A rule, whether it was kept, and the figures behind that."""

    text: str
    passed: bool
    detail: str


def judge(record: Record, rules: Sequence[Callable[[Record], Rule]]) -> list[Rule]:
    """The verdict on each rule; the experiment passes when all of them do."""
    return [rule(record) for rule in rules]


def complete(record: Record) -> Rule:
    done = sum(fault.ready is not None for fault in record.faults)
    detail = f"{done} of {len(record.faults)} faults over"
    if record.stopped:
        detail += f"; stopped: {record.stopped.splitlines()[0]}"
    return Rule(
        "Everything planned is carried out, and every instance serves again.",
        0 < done == len(record.faults) and not record.stopped,
        detail,
    )


def released(record: Record) -> Rule:
    times = record.release_times()
    in_time = sum(s is not None and s <= record.release_limit for s in times)
    never = times.count(None)
    detail = f"{in_time} of {len(times)} in time"
    if late := len(times) - in_time - never:
        detail += f", {late} late"
    if never:
        detail += f", {never} never"
    if figures := spread([s for s in times if s is not None]):
        detail += "; " + ", ".join(f"{k} {v:.2f} s" for k, v in figures.items())
    return Rule(
        f"Each decoder releases a dead prefill within {record.release_limit:g} s"
        " (2 intervals + 1 s).",
        bool(times) and in_time == len(times),
        detail,
    )


def replaced(record: Record) -> Rule:
    seconds = [record.first_answer(k, d) for k in record.kills for d in record.decoders]
    answered = [s for s in seconds if s is not None]
    detail = f"{len(answered)} of {len(seconds)}"
    if answered:
        detail += f", slowest {max(answered):.1f} s after it was ready"
    return Rule(
        "Each replacement answers through each decoder.",
        0 < len(answered) == len(seconds),
        detail,
    )


def explained(record: Record) -> Rule:
    failures = record.failures
    unexplained = [r for r in failures if not record.cause(r)]
    detail = f"{len(record.requests)} requests, {len(failures)} failed"
    return Rule(
        "A request fails only if it was under way to an instance as that was hit.",
        bool(record.requests) and not unexplained,
        f"{detail}, {len(unexplained)} of them without a cause",
    )


def right_tokens(record: Record) -> Rule:
    right = sum(not r.error for r in record.requests)
    wrong = sum(r.error == WRONG_TOKENS for r in record.requests)
    return Rule(
        "Every answer has the reference's tokens.",
        right > 0 and wrong == 0,
        f"{right} right, {wrong} wrong",
    )


def no_exits(record: Record) -> Rule:
    detail = ", ".join(record.exits) or "none did"
    return Rule("No instance exits that nobody killed.", not record.exits, detail)


def quiet_logs(record: Record) -> Rule:
    kinds = Counter(record.log_errors).most_common(5)
    detail = "; ".join(f"{count} x {kind}" for kind, count in kinds) or "none"
    return Rule(
        "No error in a decoder's log but those of reads from a dead prefill.",
        not kinds,
        detail,
    )


# Growth that is no leak: what a worker allocates on its first occasions.
_MEMORY_MIB = 64
_DESCRIPTORS = 32


def flat(record: Record) -> Rule:
    grown = [
        f"{name}: {last[0] - first[0]:+.0f} MiB, {last[1] - first[1]:+.0f} descriptors"
        for name, (first, last) in record.usage.items()
    ]
    return Rule(
        f"No worker grows by over {_MEMORY_MIB} MiB or {_DESCRIPTORS} descriptors.",
        all(
            last[0] - first[0] <= _MEMORY_MIB and last[1] - first[1] <= _DESCRIPTORS
            for first, last in record.usage.values()
        ),
        "; ".join(grown) or "not measured",
    )


SCENARIO_RULES = (explained, right_tokens, no_exits)
DRILL_RULES = (
    complete,
    released,
    replaced,
    explained,
    right_tokens,
    no_exits,
    quiet_logs,
)
ROUTER_RULES = (complete, released, right_tokens, no_exits)
SOAK_RULES = (complete, released, explained, right_tokens, no_exits, flat)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, 95th percentile and maximum; empty without values."""
    if not values:
        return {}
    return {
        "min": min(values),
        "median": statistics.median(values),
        "p95": p95(values),
        "max": max(values),
    }


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
