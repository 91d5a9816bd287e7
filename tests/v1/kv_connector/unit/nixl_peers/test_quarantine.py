# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The quarantine alone: for how long which engine is refused through which address."""

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers.quarantine import (
    Quarantine,
)

T0 = 1000.0
WHERE = "host:1"
ELSEWHERE = "host:2"


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


def refusal(
    quarantine: Quarantine, now: float, running: bool = False, engine_id: str = "p"
) -> str | None:
    return quarantine.refusal(engine_id, WHERE, now, running=running)


def refused_for(quarantine: Quarantine, now: float) -> int:
    """Return for how many seconds a handshake is refused from now on."""
    seconds = 0
    while refusal(quarantine, now + seconds):
        seconds += 1
    return seconds


def test_an_engine_without_record_is_never_refused(quarantine: Quarantine):
    quarantine.handshake_failed("q", WHERE, T0)
    quarantine.answered("p")
    quarantine.recovered("p", WHERE)
    assert refusal(quarantine, T0, running=True) is None
    assert not quarantine.has_record("p", WHERE)
    assert not quarantine.was_released("p")


def test_the_first_handshake_after_a_release_is_free(quarantine: Quarantine):
    quarantine.released("p", WHERE, T0, failed=True)
    assert refusal(quarantine, T0) is None
    assert quarantine.has_record("p", WHERE) and quarantine.was_released("p")
    # And it is joined however long it takes.
    assert refusal(quarantine, T0 + 100, running=True) is None


def test_releases_back_off_from_the_second(quarantine: Quarantine):
    spans = []
    for _ in range(10):
        quarantine.released("p", WHERE, T0, failed=True)
        spans.append(refused_for(quarantine, T0))
    assert spans == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_releases_that_were_asked_for_count_against_nobody(quarantine: Quarantine):
    for _ in range(10):
        quarantine.released("p", WHERE, T0, failed=False)
        assert refusal(quarantine, T0) is None
    assert quarantine.was_released("p") and quarantine.has_record("p", WHERE)
    # Neither do they shorten what was there before.
    quarantine.handshake_failed("p", WHERE, T0)
    quarantine.released("p", WHERE, T0, failed=False)
    assert refused_for(quarantine, T0) == 1


def test_failed_handshakes_back_off_from_the_first(quarantine: Quarantine):
    spans = []
    for _ in range(9):
        seconds = quarantine.handshake_failed("p", WHERE, T0)
        assert seconds == refused_for(quarantine, T0)
        spans.append(seconds)
    assert spans == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not quarantine.was_released("p")


def test_a_failed_handshake_after_a_release_backs_off_for_a_second(
    quarantine: Quarantine,
):
    quarantine.released("p", WHERE, T0, failed=True)
    assert quarantine.handshake_failed("p", WHERE, T0) == 1


def test_the_back_off_survives_thousands_of_failures(quarantine: Quarantine):
    for i in range(5000):
        quarantine.handshake_failed("p", WHERE, T0 + 60 * i)
        quarantine.released("p", WHERE, T0 + 60 * i, failed=True)
    assert refused_for(quarantine, T0 + 60 * 4999) == 60


def test_a_refusal_says_for_how_long(quarantine: Quarantine):
    for _ in range(3):
        quarantine.handshake_failed("p", WHERE, T0)
    assert refusal(quarantine, T0 + 1) == "quarantined for another 3.0 s"
    assert refusal(quarantine, T0 + 4) is None


def test_another_address_of_the_engine_is_not_refused(quarantine: Quarantine):
    for _ in range(5):
        quarantine.handshake_failed("p", WHERE, T0)
    assert quarantine.refusal("p", ELSEWHERE, T0, running=False) is None
    assert not quarantine.has_record("p", ELSEWHERE)
    # It has a record of its own, which a read through the other one leaves alone.
    quarantine.released("p", ELSEWHERE, T0, failed=True)
    quarantine.recovered("p", ELSEWHERE)
    assert refused_for(quarantine, T0) == 16
    assert not quarantine.was_released("p")


def test_a_finished_read_clears_the_record(quarantine: Quarantine):
    for _ in range(4):
        quarantine.released("p", WHERE, T0, failed=True)
    quarantine.recovered("p", WHERE)
    assert not quarantine.has_record("p", WHERE) and not quarantine.was_released("p")
    assert len(quarantine) == 0
    quarantine.released("p", WHERE, T0, failed=True)
    assert refusal(quarantine, T0) is None


def test_records_of_engines_that_never_come_back_do_not_pile_up(
    quarantine: Quarantine,
):
    for i in range(10_000):
        quarantine.handshake_failed(f"p{i}", WHERE, T0 + i)
    # Those of the last ten minutes, and of the quarantine before them.
    assert len(quarantine) <= 602
    assert not quarantine.has_record("p0", WHERE)
    assert quarantine.has_record("p9999", WHERE)


def test_an_old_record_of_the_same_engine_is_forgotten_too(quarantine: Quarantine):
    for _ in range(5):
        quarantine.handshake_failed("p", WHERE, T0)
    assert quarantine.handshake_failed("p", WHERE, T0 + 1000) == 1


# -- Half-open attempts --------------------------------------------------------------


def test_only_requests_that_come_soon_join_an_attempt(quarantine: Quarantine):
    quarantine.handshake_failed("p", WHERE, T0)
    now = T0 + 2
    assert refusal(quarantine, now) is None
    assert refusal(quarantine, now + 0.5, running=True) is None
    late = refusal(quarantine, now + 0.6, running=True)
    assert late is not None and "half-open attempt" in late
    # The next attempt is a new one.
    assert refusal(quarantine, now + 10) is None
    assert refusal(quarantine, now + 10.1, running=True) is None


def test_all_join_an_attempt_that_the_peer_has_answered(quarantine: Quarantine):
    quarantine.handshake_failed("p", WHERE, T0)
    assert refusal(quarantine, T0 + 2) is None
    quarantine.answered("p")
    assert refusal(quarantine, T0 + 100, running=True) is None
    # An answer is good for that attempt alone.
    assert refusal(quarantine, T0 + 200) is None
    assert refusal(quarantine, T0 + 201, running=True) is not None


def test_an_attempt_that_fails_after_its_answer_is_a_failure(quarantine: Quarantine):
    quarantine.handshake_failed("p", WHERE, T0)
    quarantine.answered("p")
    assert quarantine.handshake_failed("p", WHERE, T0 + 2) == 2
    assert refusal(quarantine, T0 + 3, running=True) == (
        "quarantined for another 1.0 s"
    )
