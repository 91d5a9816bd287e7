# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each alert fires in its fault and stays silent in every other, with any scrape.

A fault is what one decoder's metrics look like over an hour. promtool gets the
samples that a scrape every 15, 30 or 60 s takes of them, with one rank and with eight.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "docs" / "operations" / "nixl_alerts.yml"
# Where `make test` puts it, or wherever it is.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
LABELS = {"instance": "decode-0:8000", "engine": "0", "model_name": "m"}
MINUTES = 60
# From the first moment at which an alert may fire to the one at which it must: a
# scrape, an evaluation, and what `increase` needs to see a difference.
SLACK = 2

Minute = float
Value = Callable[[Minute], float]


def never(_: Minute) -> float:
    return 0


def steadily(start: Minute, end: Minute, per_minute: float) -> Value:
    """Return a counter that grows from one moment to another."""
    return lambda t: int(max(0, min(t, end) - start) * per_minute)


def at(*moments: Minute) -> Value:
    """Return a counter that grows by one at each of some moments."""
    return lambda t: sum(moment <= t for moment in moments)


def during(start: Minute, end: Minute = MINUTES) -> Value:
    """Return a gauge that is 1 from one moment to another."""
    return lambda t: float(start <= t < end)


@dataclass(frozen=True)
class Fault:
    """What a decoder counts, and the minutes in which each alert has to fire."""

    metrics: Mapping[str, Value] = field(default_factory=dict)
    fires: Mapping[str, tuple[Minute, Minute]] = field(default_factory=dict)


def gone(*moments: Minute) -> dict[str, Value]:
    """Return the metrics of peers that are found unreachable and are released."""
    return {
        "peer_heartbeats_failed_total": at(*moments),
        "peers_unreachable_total": at(*moments),
        "peers_released_total": at(*moments),
    }


UNREACHABLE = {"NixlPeerUnreachable": (10, 15)}
FAULTS = {
    "nothing_happens": Fault({"peer_heartbeats_sent_total": steadily(0, 60, 30)}),
    "an_idle_decoder_reports_nothing": Fault(),
    "a_decoder_restarts": Fault(
        {"peer_heartbeats_sent_total": lambda t: t % 20 * 30, **gone(-5)},
    ),
    "a_prefill_is_killed_and_taken_out_of_the_router": Fault(
        {**gone(10), "peer_requests_refused_total": steadily(10, 11, 100)},
        UNREACHABLE,
    ),
    "a_prefill_is_killed_while_the_decoder_idles_for_half_an_hour": Fault(
        gone(40), {"NixlPeerUnreachable": (40, 45)}
    ),
    "prefills_are_restarted_one_after_the_other": Fault(
        {
            **gone(10, 14, 18, 22),
            "peer_requests_refused_total": at(10, 14, 18, 22),
        },
        {"NixlPeerUnreachable": (10, 27)},
    ),
    "a_connection_breaks_once": Fault(
        {**gone(10), "peers_reconnected_total": at(10)}, UNREACHABLE
    ),
    "a_connection_breaks_every_three_minutes": Fault(
        {
            **gone(*range(10, 50, 3)),
            "peers_reconnected_total": at(*range(10, 50, 3)),
            "peer_requests_refused_total": at(*range(10, 50, 9)),
        },
        {"NixlPeerUnreachable": (10, 54), "NixlPeerFlapping": (30, 59)},
    ),
    "a_prefill_hangs_and_requests_go_on": Fault(
        {
            "peers_suspected_total": at(10),
            "suspect_peers": during(10, 40),
            "peer_requests_refused_total": steadily(10, 40, 30),
        },
        {"NixlPeerSuspect": (11, 40)},
    ),
    "a_prefill_hangs_for_less_than_a_minute_more": Fault(
        {"peers_suspected_total": at(10), "suspect_peers": during(10, 10.9)}
    ),
    "a_read_holds_a_release_for_ever_while_others_are_released": Fault(
        {
            **gone(10, 14),
            "peers_released_total": at(14),
            "peer_releases_deferred_total": at(10),
            "deferred_peer_releases": during(10),
            "peer_requests_refused_total": steadily(10, 60, 30),
        },
        {"NixlPeerUnreachable": (10, 19), "NixlReleaseDeferred": (15, MINUTES)},
    ),
    "a_read_holds_a_release_for_two_minutes": Fault(
        {
            **gone(10),
            "peers_released_total": at(12),
            "peer_releases_deferred_total": at(10),
            "deferred_peer_releases": during(10, 12),
        },
        UNREACHABLE,
    ),
    "half_a_request_a_second_names_a_dead_prefill": Fault(
        {**gone(10), "peer_requests_refused_total": steadily(10, 60, 30)},
        {**UNREACHABLE, "NixlRoutedToDead": (15, MINUTES)},
    ),
    "a_request_a_minute_names_a_dead_prefill": Fault(
        {**gone(10), "peer_requests_refused_total": at(*range(10, 60))},
        {**UNREACHABLE, "NixlRoutedToDead": (15, MINUTES)},
    ),
    "heartbeats_fail_with_an_error_that_proves_nothing": Fault(
        {"peer_heartbeats_failed_total": steadily(10, 60, 2)},
        {"NixlHeartbeatsFailing": (20, MINUTES)},
    ),
    "one_heartbeat_fails": Fault({"peer_heartbeats_failed_total": at(10)}),
}
METRICS = sorted({name for fault in FAULTS.values() for name in fault.metrics})


def rules() -> dict[str, dict]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def promtool(*args: str | Path) -> None:
    program = shutil.which("promtool", path=PATH)
    assert program, "no promtool: run tools/promtool.py"
    ran = subprocess.run([program, *args], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def samples(fault: Fault, seconds: int, ranks: int) -> list[dict]:
    """Return what Prometheus has scraped, in the form of promtool's input."""
    moments = [s / 60 for s in range(0, MINUTES * 60 + 1, seconds)]
    labels = ",".join(f"{k}={json.dumps(v)}" for k, v in LABELS.items())
    series = []
    for name in METRICS:
        value = fault.metrics.get(name, never)
        times = ranks if name.endswith("_total") else 1
        series.append(
            {
                "series": f"vllm:nixl_{name}{{{labels}}}",
                "values": " ".join(f"{value(t) * times:g}" for t in moments),
            }
        )
    return series


def expectations(fault: Fault) -> list[dict]:
    """Return what every alert has to be, every half minute."""
    expected = []
    for alert, rule in rules().items():
        first, last = fault.fires.get(alert, (MINUTES + 1, MINUTES + 1))
        firing = {
            "exp_labels": {**LABELS, **rule["labels"]},
            "exp_annotations": {
                name: text.replace("{{ $labels.instance }}", LABELS["instance"])
                for name, text in rule["annotations"].items()
            },
        }
        for minute in (n / 2 for n in range(2, 2 * MINUTES)):
            if first + SLACK <= minute <= last - SLACK:
                expected.append((alert, minute, [firing]))
            elif not first <= minute <= last + SLACK:
                expected.append((alert, minute, []))
    return [
        {"alertname": alert, "eval_time": f"{minute * 60:.0f}s", "exp_alerts": alerts}
        for alert, minute, alerts in expected
    ]


def test_the_rules_are_well_formed():
    promtool("check", "rules", RULES)


def test_every_alert_has_a_fault_in_which_it_fires():
    assert {alert for fault in FAULTS.values() for alert in fault.fires} == set(rules())


@pytest.mark.parametrize("seconds", [15, 30, 60])
@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_alerts_of_a_fault_fire(fault: str, seconds: int, tmp_path: Path):
    expected = expectations(FAULTS[fault])
    tests = tmp_path / "alerts_test.yml"
    tests.write_text(
        json.dumps(
            {
                "rule_files": [str(RULES)],
                "evaluation_interval": "30s",
                "tests": [
                    {
                        "name": f"{fault}, {ranks} rank(s), every {seconds} s",
                        "interval": f"{seconds}s",
                        "input_series": samples(FAULTS[fault], seconds, ranks),
                        "alert_rule_test": expected,
                    }
                    for ranks in (1, 8)
                ],
            }
        )
    )
    promtool("test", "rules", tests)
