# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each rule of the drill, on records that break it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from drill_record import DEATH_ERROR, make_record

from nixl_lab.drill_rules import (
    WRONG_TOKENS,
    ErrorReader,
    Exit,
    LogError,
    Record,
    Release,
    Request,
    judge,
    kind_of,
    release_times,
    spread,
)

# Of the record's second cycle.
KILLED = 70.0


def failed(record: Record) -> list[str]:
    return [rule.text for rule in judge(record) if not rule.passed]


def test_a_good_drill_keeps_every_rule() -> None:
    record = make_record()
    assert failed(record) == []
    assert release_times(record) == [1.0, 2.0] * 6


def late(record: Record) -> None:
    record.releases[3] = Release("decode-2", "engine-2", KILLED + 5.1)


def never(record: Record) -> None:
    del record.releases[3]


def a_rank_late(record: Record) -> None:
    record.releases.append(Release("decode-2", "engine-2", KILLED + 5.1))


def other_engine(record: Record) -> None:
    record.releases[3] = Release("decode-2", "engine-1", KILLED + 2)


def no_answer(record: Record) -> None:
    record.requests = [
        r
        for r in record.requests
        if not (
            (r.prefill, r.decode) == ("prefill-2", "decode-2")
            and KILLED < r.start < KILLED + 60
        )
    ]


def survivor_fails(record: Record) -> None:
    record.requests.append(Request(KILLED, 1, "prefill-1", "decode-1", "HTTP 500"))


def fails_long_after(record: Record) -> None:
    record.requests.append(Request(115, 1, "prefill-2", "decode-1", "HTTP 500"))


def fails_before(record: Record) -> None:
    record.requests.append(Request(60, 1, "prefill-2", "decode-1", "HTTP 500"))


def no_instance(record: Record) -> None:
    record.requests.append(Request(KILLED, 1, "", "", "HTTP 503: none"))


def wrong_tokens(record: Record) -> None:
    record.requests.append(Request(50, 1, "prefill-2", "decode-1", WRONG_TOKENS))


def decoder_exits(record: Record) -> None:
    record.exits.append(Exit("decode-2", 100))


def unrelated_error(record: Record) -> None:
    record.errors.append(LogError("decode-1", "CUDA error #", KILLED + 1))


def error_out_of_the_window(record: Record) -> None:
    record.errors.append(LogError("decode-1", DEATH_ERROR, KILLED + 30))


def no_restart(record: Record) -> None:
    record.outages[-1].ready = None


def interrupted(record: Record) -> None:
    record.stopped = "interrupted"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (late, "Each decoder releases"),
        (never, "Each decoder releases"),
        (a_rank_late, "Each decoder releases"),
        (other_engine, "Each decoder releases"),
        (no_answer, "The replacement's first answer"),
        (survivor_fails, "No request to a surviving"),
        (fails_long_after, "Other requests"),
        (fails_before, "Other requests"),
        (no_instance, "Other requests"),
        (decoder_exits, "No decoder process"),
        (unrelated_error, "No unexpected error"),
        (error_out_of_the_window, "No unexpected error"),
        (no_restart, "Every kill"),
        (interrupted, "Every kill"),
    ],
)
def test_a_broken_rule_is_the_only_one(
    change: Callable[[Record], None], broken: str
) -> None:
    record = make_record()
    change(record)
    (text,) = failed(record)
    assert text.startswith(broken)


def test_wrong_tokens_are_never_excused() -> None:
    record = make_record()
    wrong_tokens(record)
    assert failed(record) == [
        "Other requests fail only if they were under way to an instance as it was"
        " killed.",
        "Every answer has the reference's tokens.",
    ]
    assert record.causes()["other: wrong tokens"] == 1


def test_a_restarted_decoder_takes_its_requests_along() -> None:
    record = make_record()
    assert record.causes() == {
        "under way to the prefill as it was killed": 6,
        "under way to the decoder as it was killed": 2,
    }
    assert "1 more lost their decoder" in judge(record)[3].detail


def test_errors_of_a_slow_request_are_expected_until_it_ends() -> None:
    record = make_record()
    record.errors.append(LogError("decode-2", DEATH_ERROR, KILLED + 20))
    assert len(failed(record)) == 1
    slow = Request(KILLED - 1, 21, "prefill-2", "decode-2", "HTTP 500: failed")
    record.requests.append(slow)
    assert failed(record) == []


def test_a_drill_that_never_began_fails() -> None:
    record = Record({}, 2.0, 6, ["p1", "p2"], ["d1", "d2"], stopped="no\nluck")
    assert failed(record)
    assert judge(record)[0].detail.endswith("not restarted; stopped: no")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = make_record()
    decoder_exits(record)
    record.write(tmp_path / "drill.json")
    assert Record.read(tmp_path / "drill.json") == record


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rules": [], "no": 1}'])
def test_another_file_is_no_record(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="other.json is no drill.json"):
        Record.read(path)


def test_spread() -> None:
    assert spread([]) == {}
    assert set(spread([2.0]).values()) == {2.0}
    figures = spread([float(n) for n in range(1, 13)])
    assert figures == {"min": 1, "median": 6.5, "p95": pytest.approx(11.45), "max": 12}


LOG = """\
(APIServer pid=7) WARNING 11-30 02:32:25 [cpu.py:224] Triton is not installed.
E1130 02:37:30.458987   22969 nixl_agent.cpp:1198] postXferReq: remote agent \
'c34afc58-86e8-4312-8562-405074d8f709' was disconnected
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] NIXL transfer failure: \
handshake_failed | Context: {'request_id': '97777ca291eba72b'}
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] Traceback (most recent call last):
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373]   File "worker.py", line 9, in read
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] OSError: first
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373]
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] The above exception was the cause
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373]
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] Traceback (most recent call last):
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373]   File "worker.py", line 10, in go
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] nixlRemoteDisconnectError: gone
(Worker pid=8) ERROR 11-30 02:37:30 [base.py:373] NIXL transfer failure: \
handshake_failed
(EngineCore pid=9) ERROR 11-30 02:37:31 [scheduler.py:3] Failing 2 request(s) due to \
KV load failure (failure_policy=fail, 200 tokens affected). Request IDs: {'cmpl-1'}
(APIServer pid=7) ERROR 11-30 02:37:31 [serving.py:203] Request cmpl-b059aef2c85ecf4c \
failed with an internal error during generation
[1732934250.1] [host:42 :0] sock.c:3 UCX  ERROR recv failed: 104
Traceback (most recent call last):
  File "core.py", line 1, in <module>
"""


def test_errors_are_found_in_a_log() -> None:
    reader = ErrorReader()
    assert [kind for line in LOG.splitlines() if (kind := reader.feed(line))] == [
        "nixl_agent.cpp: postXferReq: remote agent '#' was disconnected",
        "NIXL transfer failure: handshake_failed",
        "NIXL transfer failure: handshake_failed",
        "Failing # request(s) due to KV load failure"
        " (failure_policy=fail, # tokens affected)",
        "Request # failed with an internal error during generation",
        "UCX: recv failed: #",
        "Traceback",
    ]


def test_kind_of_leaves_words_alone() -> None:
    text = "bad face of a decade, 3 of 4 beef"
    assert kind_of(text) == "bad face of a decade, # of # beef"
