# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a drill saw, and the rules that it is judged by: plain values, no clock.

All times are seconds since the drill began.
"""

import dataclasses
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

WRONG_TOKENS = "wrong tokens"
# A router notices a death by the first request that finds nobody, and a line of a log
# is seen a moment after what it tells of.
GRACE_S = 1.0


def release_limit(interval: float) -> float:
    """Seconds that a decoder may take to release a dead prefill."""
    return 2 * interval + 1


@dataclass
class Outage:
    """One kill by the drill, and the replacement.

    Attributes:
        instance: Who was killed.
        cycle: Number of the kill of a prefill, from 1; 0 for the decoder's restart.
        engine: The killed engine's id; empty for a decoder.
        killed: When the kill was asked for.
        down: When the instance was seen gone.
        ready: When the replacement was healthy.
    """

    instance: str
    cycle: int
    engine: str
    killed: float
    down: float | None = None
    ready: float | None = None


@dataclass(frozen=True)
class Release:
    """A decoder's log line that it has released an engine."""

    decoder: str
    engine: str
    at: float


@dataclass(frozen=True)
class LogError:
    """An error in a decoder's log; `kind` is its text without what varies."""

    decoder: str
    kind: str
    at: float


@dataclass(frozen=True)
class Exit:
    """An instance that was gone although the drill had not killed it."""

    instance: str
    at: float


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
    """Everything that a drill saw.

    Attributes:
        about: Date, versions, machine: for people.
        interval: The connector's `peer_heartbeat_interval`, in seconds.
        cycles: Number of kills that were planned.
        prefills: Names; the last one is the one that is killed.
        decoders: Names; the last one is the one that is restarted.
        ended: When the drill ended; None while it runs.
        stopped: Why it ended before its time; empty if it did not.
    """

    about: dict[str, str]
    interval: float
    cycles: int
    prefills: list[str]
    decoders: list[str]
    outages: list[Outage] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    errors: list[LogError] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    ended: float | None = None
    stopped: str = ""

    @property
    def release_limit(self) -> float:
        """Seconds that a decoder may take to release a dead prefill."""
        return release_limit(self.interval)

    @property
    def victim(self) -> str:
        return self.prefills[-1]

    @property
    def kills(self) -> list[Outage]:
        """The kills of prefills."""
        return [o for o in self.outages if o.cycle]

    def release_seconds(self, kill: Outage, decoder: str) -> float | None:
        """Seconds from a kill to a decoder's release; None if there was none.

        With several ranks each writes a line of its own: the last one counts.
        """
        times = [
            r.at - kill.killed
            for r in self.releases
            if (r.decoder, r.engine) == (decoder, kill.engine) and r.at >= kill.killed
        ]
        return max(times, default=None)

    def first_answer(self, kill: Outage, decoder: str) -> float | None:
        """Seconds from a replacement's readiness to its first answer via a decoder."""
        if kill.ready is None:
            return None
        times = (
            r.end - kill.ready
            for r in self.requests
            if (r.prefill, r.decode, r.error) == (kill.instance, decoder, "")
            and r.end >= kill.ready
        )
        later = [k.killed for k in self.kills if k.killed > kill.killed]
        horizon = min(later, default=float("inf")) - kill.ready
        return min((t for t in times if t <= horizon), default=None)

    def fault(self, request: Request) -> Outage | None:
        """The kill that a failed request is due to; None if it is due to none."""
        for outage in self.outages:
            if outage.instance not in (request.prefill, request.decode):
                continue
            gone = outage.killed if outage.down is None else outage.down
            if request.start <= gone + GRACE_S and request.end >= outage.killed:
                return outage
        return None

    def excused(self) -> list[bool]:
        """For each error, whether requests to a killed prefill had to cause it.

        It is of a kind that they cause, and came between the kill and the last trace
        of the dead prefill that is due in a decoder's log.
        """
        windows = []
        for kill in self.kills:
            ends = [r.end for r in self.failures() if self.fault(r) is kill]
            end = max([kill.killed + self.release_limit, *ends]) + GRACE_S
            windows.append((kill.killed, end))
        return [
            bool(re.search(_DEATH_ERRORS, error.kind))
            and any(begin <= error.at <= end for begin, end in windows)
            for error in self.errors
        ]

    def failures(self) -> list[Request]:
        return [r for r in self.requests if r.error]

    def causes(self) -> Counter[str]:
        """Failed requests by cause."""
        return Counter(map(self._cause, self.failures()))

    def _cause(self, request: Request) -> str:
        outage = self.fault(request)
        if outage is None or request.error == WRONG_TOKENS:
            # Up to the colon: the HTTP status, which kind_of would hide.
            status, colon, text = request.error.partition(":")
            return f"other: {status}{colon} {kind_of(text)}".rstrip()
        role = "prefill" if outage.cycle else "decoder"
        return f"under way to the {role} as it was killed"

    def kinds(self) -> Counter[tuple[str, bool]]:
        """Errors in decoder logs by kind and whether they are excused."""
        return Counter(
            (error.kind, excused) for error, excused in zip(self.errors, self.excused())
        )

    def write(self, path: Path) -> None:
        """Writes everything, and what the rules say of it, as JSON."""
        content = dataclasses.asdict(self)
        # A line each would be most of the file.
        content["requests"] = [
            [round(r.start, 3), round(r.seconds, 3), r.prefill, r.decode, r.error]
            for r in self.requests
        ]
        content["rules"] = [dataclasses.asdict(rule) for rule in judge(self)]
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            ValueError: it is not such a file.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            del content["rules"]
            for key, kind in _LISTS.items():
                content[key] = [kind(**each) for each in content[key]]
            content["requests"] = [Request(*each) for each in content["requests"]]
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no drill.json: {error!r}") from error


_LISTS = {"outages": Outage, "releases": Release, "errors": LogError, "exits": Exit}


@dataclass(frozen=True)
class Rule:
    """A rule, whether it was kept, and the figures behind that."""

    text: str
    passed: bool
    detail: str


def judge(record: Record) -> list[Rule]:
    """The verdict on each rule; the drill passes when all of them do."""
    return [
        _complete(record),
        _releases(record),
        _replacements(record),
        _survivors(record),
        _others(record),
        _tokens(record),
        _exits(record),
        _logs(record),
    ]


def _complete(record: Record) -> Rule:
    done = sum(kill.ready is not None for kill in record.kills)
    restarted = any(not o.cycle and o.ready is not None for o in record.outages)
    detail = f"{done} of {record.cycles} replacements"
    detail += f", the decoder {'restarted' if restarted else 'not restarted'}"
    if record.stopped:
        detail += f"; stopped: {record.stopped.splitlines()[0]}"
    return Rule(
        "Every kill and replacement is carried out, and the decoder's restart.",
        done == record.cycles and restarted and not record.stopped,
        detail,
    )


def _releases(record: Record) -> Rule:
    seconds = release_times(record)
    in_time = [s for s in seconds if s is not None and s <= record.release_limit]
    never = seconds.count(None)
    detail = f"{len(in_time)} of {len(seconds)} in time"
    if len(in_time) + never < len(seconds):
        detail += f", {len(seconds) - len(in_time) - never} late"
    if never:
        detail += f", {never} never"
    return Rule(
        f"Each decoder releases the killed prefill within {record.release_limit:g} s"
        " (2 intervals + 1 s) in every cycle.",
        bool(seconds) and len(in_time) == len(seconds),
        detail,
    )


def _replacements(record: Record) -> Rule:
    seconds = [
        record.first_answer(kill, decoder)
        for kill in record.kills
        for decoder in record.decoders
    ]
    answered = [s for s in seconds if s is not None]
    detail = f"{len(answered)} of {len(seconds)}"
    if answered:
        detail += f", slowest {max(answered):.1f} s after it was ready"
    return Rule(
        "The replacement's first answer comes through each decoder.",
        bool(seconds) and len(answered) == len(seconds),
        detail,
    )


def _survivors(record: Record) -> Rule:
    mine = [r for r in record.requests if r.prefill not in ("", record.victim)]
    failed = [r for r in mine if r.error]
    # A request that the drill took the decoder from says nothing of its prefill.
    cut_off = [r for r in failed if record.fault(r) and r.error != WRONG_TOKENS]
    detail = f"{len(mine)} requests, {len(failed) - len(cut_off)} failed"
    if cut_off:
        detail += f", {len(cut_off)} more lost their decoder to its restart"
    return Rule(
        "No request to a surviving prefill fails.",
        bool(mine) and len(failed) == len(cut_off),
        detail,
    )


def _others(record: Record) -> Rule:
    failed = [r for r in record.failures() if r.prefill in ("", record.victim)]
    expected = sum(record.fault(r) is not None for r in failed)
    return Rule(
        "Other requests fail only if they were under way to an instance as it was"
        " killed.",
        len(failed) == expected,
        f"{expected} under way, {len(failed) - expected} others",
    )


def _tokens(record: Record) -> Rule:
    right = sum(not r.error for r in record.requests)
    wrong = sum(r.error == WRONG_TOKENS for r in record.requests)
    return Rule(
        "Every answer has the reference's tokens.",
        right > 0 and wrong == 0,
        f"{right} right, {wrong} wrong",
    )


def _exits(record: Record) -> Rule:
    exits = [e for e in record.exits if e.instance in record.decoders]
    detail = ", ".join(f"{e.instance} at {e.at:.0f} s" for e in exits)
    return Rule("No decoder process exits.", not exits, detail or "none did")


def _logs(record: Record) -> Rule:
    excused = sum(record.excused())
    unexpected = len(record.errors) - excused
    return Rule(
        "No unexpected error in a decoder's log: only those of requests that were"
        " under way to the killed prefill.",
        unexpected == 0,
        f"{unexpected} unexpected, {excused} expected",
    )


def release_times(record: Record) -> list[float | None]:
    """The release times, cycle by cycle, each decoder's."""
    return [
        record.release_seconds(kill, decoder)
        for kill in record.kills
        for decoder in record.decoders
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, 95th percentile and maximum; empty without values."""
    if not values:
        return {}
    p95 = values[0]
    if len(values) > 1:
        p95 = statistics.quantiles(values, n=20, method="inclusive")[-1]
    return {
        "min": min(values),
        "median": statistics.median(values),
        "p95": p95,
        "max": max(values),
    }


# What a read from a dead prefill leaves in a decoder's log: the connector's line, the
# line that NIXL itself prints, and what the scheduler and the API server make of it.
_DEATH_ERRORS = "|".join(
    (
        r"^NIXL transfer failure: ",
        r"^nixl_agent\.cpp: .*(?i:disconnect)",
        r"^Failing # request\(s\) due to KV load failure",
        r"^Request # failed with an internal error",
    )
)
_PREFIX = re.compile(r"^(?:\([^)]*\) )?(ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?")
_NIXL_LINE = re.compile(r"^(?:\([^)]*\) )?E\d{4} \S+\s+\d+ (\S+?):\d+\] (.*)")
_UCX_LINE = re.compile(r".*\s(UCX)\s+ERROR\s+(.*)")
_RAW_TRACEBACK = re.compile(r"^(?:\([^)]*\) )?Traceback \(most recent call last\)")
_CHAINED = ("Traceback (", "The above exception was", "During handling of the above")
_VARYING = re.compile(r"\b(?:cmpl-)?[0-9a-f]*\d[0-9a-f]*(?:-[0-9a-f]+)*\b")
_KIND_LENGTH = 160


class ErrorReader:
    """Finds the errors in the lines of one log; a traceback belongs to its error."""

    def __init__(self) -> None:
        self._prefix = ""
        self._in_traceback = False

    def feed(self, line: str) -> str | None:
        """Takes the next line; returns the kind of error that begins there."""
        if match := _NIXL_LINE.match(line) or _UCX_LINE.match(line):
            return kind_of(f"{match[1]}: {match[2]}")
        match = _PREFIX.match(line)
        if match is None:
            return "Traceback" if _RAW_TRACEBACK.match(line) else None
        message = line[match.end() :]
        # An empty line may have lost the blank after its prefix.
        prefix = match[0].rstrip()
        if prefix == self._prefix and self._continues(message):
            return None
        self._prefix = prefix
        self._in_traceback = False
        return kind_of(message)

    def _continues(self, message: str) -> bool:
        if message.startswith(_CHAINED):
            self._in_traceback = True
        elif self._in_traceback and message and not message[0].isspace():
            # The exception itself ends it.
            self._in_traceback = False
            return True
        return self._in_traceback or not message.strip()


def kind_of(message: str) -> str:
    """A message without what varies: ids, numbers, context."""
    text = re.split(r" \| Context|\. Deferring |\. Request IDs|\n", message)[0]
    return _VARYING.sub("#", text.strip())[:_KIND_LENGTH]
