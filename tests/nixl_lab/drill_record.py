# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The record of a drill that went well, as the tests need it."""

import itertools

from nixl_lab.drill_rules import LogError, Outage, Record, Release, Request

PREFILLS = ["prefill-1", "prefill-2"]
DECODERS = ["decode-1", "decode-2"]
CYCLE_S = 60.0
RESTART_S = 30.0
DEATH_ERROR = "NIXL transfer failure: transfer_setup_failed"


def make_record(cycles: int = 6) -> Record:
    """Each cycle: kill at 10 s, released after 1 and 2 s, replaced at 40 s.

    The decoder is restarted in the last of them, from 45 to 55 s.
    """
    record = Record(
        {"connector": "the test's"}, 2.0, cycles, list(PREFILLS), list(DECODERS)
    )
    for cycle in range(1, cycles + 1):
        begin = (cycle - 1) * CYCLE_S
        killed = begin + 10
        engine = f"engine-{cycle}"
        record.outages.append(
            Outage("prefill-2", cycle, engine, killed, killed + 0.1, killed + RESTART_S)
        )
        for number, decoder in enumerate(DECODERS, 1):
            record.releases.append(Release(decoder, engine, killed + number))
        # Prefilled before the kill, decoded after it.
        record.requests.append(
            Request(killed - 0.2, 0.5, "prefill-2", "decode-1", "HTTP 500: failed")
        )
        record.errors.append(LogError("decode-1", DEATH_ERROR, killed + 0.3))
        for second in range(int(begin), int(begin + CYCLE_S)):
            down = killed <= second < killed + RESTART_S
            for prefill, decode in itertools.product(PREFILLS, DECODERS):
                if not (down and prefill == "prefill-2"):
                    record.requests.append(Request(second, 0.4, prefill, decode))
    record.outages.append(
        Outage("decode-2", 0, "", begin + 45, begin + 45.1, begin + 55)
    )
    for prefill in PREFILLS:
        lost = Request(begin + 44, 2, prefill, "decode-2", "HTTP 502: it broke off")
        record.requests.append(lost)
    record.ended = cycles * CYCLE_S
    return record
