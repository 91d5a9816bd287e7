# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each rule, on records that break it, and the report of a record."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nixl_lab.record import (
    DRILL_RULES,
    WRONG_TOKENS,
    Fault,
    Record,
    Request,
    flat,
    judge,
    spread,
)
from nixl_lab.report import write_report

PREFILLS = ["prefill-1", "prefill-2"]
DECODERS = ["decode-1", "decode-2"]
# Of the record's second cycle.
KILLED = 70.0


@pytest.fixture
def record() -> Record:
    """Two cycles of a minute: a kill at 10 s, replaced at 40 s; then the decoder."""
    record = Record({"connector": "the test's"}, 2.0, PREFILLS, DECODERS)
    for begin in (0.0, 60.0):
        at = begin + 10
        kill = Fault("kill", ["prefill-2"], at, f"engine-{begin}", at + 0.1, at + 30)
        kill.releases = {"decode-1": 1.0, "decode-2": 2.0}
        record.faults.append(kill)
        # Prefilled before the kill, decoded after it.
        record.requests.append(
            Request(at - 0.2, 0.5, "prefill-2", "decode-1", "HTTP 500: failed")
        )
        for second in range(int(begin), int(begin) + 60):
            for prefill, decode in itertools.product(PREFILLS, DECODERS):
                if prefill != "prefill-2" or not at <= second < at + 30:
                    record.requests.append(Request(second, 0.4, prefill, decode))
    record.faults.append(Fault("kill", ["decode-2"], 105, "", 105.1, 115))
    for prefill in PREFILLS:
        lost = Request(104, 2, prefill, "decode-2", "HTTP 502: it broke off")
        record.requests.append(lost)
    record.ended = 120
    return record


def failed(record: Record) -> list[str]:
    return [rule.text for rule in judge(record, DRILL_RULES) if not rule.passed]


def fails(start: float, prefill: str, error: str = "HTTP 500") -> Callable:
    request = Request(start, 1, prefill, prefill and "decode-1", error)
    return lambda record: record.requests.append(request)


def no_answer(record: Record) -> None:
    record.requests = [
        r
        for r in record.requests
        if (r.prefill, r.decode) != ("prefill-2", "decode-2") or r.start < KILLED
    ]


def releases(seconds: float | None) -> Callable[[Record], None]:
    return lambda record: record.faults[1].releases.update({"decode-2": seconds})


def not_restarted(record: Record) -> None:
    record.faults[-1].ready = None


def stopped(record: Record) -> None:
    record.stopped = "interrupted"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda record: None, []),
        (releases(5.1), ["Each decoder releases"]),
        (releases(None), ["Each decoder releases"]),
        (no_answer, ["Each replacement"]),
        (fails(KILLED, "prefill-1"), ["A request fails only"]),
        (fails(102, "prefill-2"), ["A request fails only"]),
        (fails(60, "prefill-2"), ["A request fails only"]),
        (fails(KILLED, ""), ["A request fails only"]),
        (
            fails(KILLED, "prefill-2", WRONG_TOKENS),
            ["A request fails only", "Every answer has"],
        ),
        (lambda record: record.exits.append("decode-1"), ["No instance exits"]),
        (lambda record: record.log_errors.append("CUDA"), ["No error in a decoder"]),
        (not_restarted, ["Everything planned"]),
        (stopped, ["Everything planned"]),
    ],
)
def test_each_rule_is_broken_by_its_own_fault_alone(
    record: Record, change: Callable[[Record], None], broken: list[str]
) -> None:
    change(record)
    texts = failed(record)
    assert len(texts) == len(broken)
    assert all(text.startswith(begin) for text, begin in zip(texts, broken))


def test_nothing_seen_passes_nothing() -> None:
    record = Record({}, 2.0, PREFILLS, DECODERS, stopped="no\nluck")
    assert len(failed(record)) == 5
    assert judge(record, DRILL_RULES)[0].detail.endswith("stopped: no")


def test_a_worker_that_grows_is_found(record: Record) -> None:
    record.usage = {"decode-1": [[500, 100], [510, 104]]}
    assert flat(record).passed
    record.usage["decode-1"][1] = [600, 104]
    assert not flat(record).passed
    record.usage["decode-1"][1] = [510, 140]
    assert "+10 MiB, +40 descriptors" in flat(record).detail
    assert not flat(record).passed


def test_failed_requests_are_counted_by_cause(record: Record) -> None:
    fails(60, "prefill-2")(record)
    assert record.causes() == {
        "kill of prefill-2": 2,
        "kill of decode-2": 2,
        "NO CAUSE: HTTP 500": 1,
    }


def test_a_record_is_read_as_it_was_written(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "record.json", judge(record, DRILL_RULES))
    assert Record.read(tmp_path / "record.json") == record


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rules": [], "no": 1}'])
def test_another_file_is_no_record(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.json is no record"):
        Record.read(path)


def test_spread() -> None:
    assert spread([]) == {}
    assert set(spread([2.0]).values()) == {2.0}
    figures = spread([float(n) for n in range(1, 13)])
    assert figures == {"min": 1, "median": 6.5, "p95": pytest.approx(11.45), "max": 12}


def test_the_report_is_a_short_page_and_a_picture_with_text(
    record: Record, tmp_path: Path
) -> None:
    record.faults[0].releases["decode-1"] = None
    write_report(record, judge(record, DRILL_RULES), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# Failed\n")
    assert "| NO | 3 of 4 in time, 1 never;" in page
    assert "decode-1: never, decode-2: 2.00 s" in page
    assert len(page.splitlines()) < 50
    # Every table has rows of one width.
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert len({line.count(" |") for line in table.splitlines()}) == 1, table
    picture = ElementTree.parse(tmp_path / "timeline.svg")
    texts = {"".join(text.itertext()) for text in picture.iterfind(".//{*}text")}
    assert {"prefill-2", "decode-1", "fault", "release"} <= texts


def test_the_report_of_nothing(tmp_path: Path) -> None:
    record = Record({}, 2.0, PREFILLS, DECODERS, stopped="no luck")
    write_report(record, judge(record, DRILL_RULES), tmp_path)
    assert "# Failed, incomplete" in (tmp_path / "README.md").read_text()
