# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The drill's report, as a browser shows it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from drill_record import make_record

from nixl_lab.drill_report import write_report
from nixl_lab.drill_rules import Record, Release

DESKTOP, PHONE = 1280, 390
# Run in the page; --dump-dom then shows what it found.
MEASURE = """
<script>
addEventListener("load", () => {
  const box = (element) => {
    const { width, height } = element.getBoundingClientRect();
    return [width, height];
  };
  const marks = {};
  for (const mark of document.querySelectorAll("#timeline g[id]"))
    marks[mark.id] = box(mark);
  const texts = [...document.querySelectorAll("#timeline text")];
  const cells = [...document.querySelectorAll("#releases td.n")];
  parent.document.getElementById("measured").textContent = JSON.stringify({
    viewport: innerWidth,
    page: document.documentElement.scrollWidth,
    timeline: box(document.querySelector("#timeline svg")),
    marks,
    text_height: Math.min(...texts.map((text) => box(text)[1])),
    releases: cells.map((cell) => [cell.textContent, ...box(cell)]),
    font_px: parseFloat(getComputedStyle(document.body).fontSize),
  });
});
</script>
"""


def show(page: Path, *arguments: str) -> str:
    """Opens a page in headless Chromium; returns what that prints."""
    chromium = shutil.which("chromium")
    assert chromium, "no chromium on PATH: tools/install.py --browser"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--window-size={DESKTOP + 100},900", "--hide-scrollbars", *arguments]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measure(page: Path, width: int) -> dict[str, Any]:
    """Shows a page in a frame, as Chromium's windows are no narrower than 500 px."""
    content = page.read_text().replace("</body>", f"{MEASURE}</body>")
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<!DOCTYPE html><pre id="measured"></pre><iframe width="{width}" height="900"'
        f' frameborder="0" srcdoc="{html.escape(content)}"></iframe>'
    )
    dom = show(frame, "--dump-dom")
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found and found[1], dom[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    write_report(make_record(), path)
    return path


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_browser_shows_the_time_line_and_all_releases(page: Path, width: int) -> None:
    seen = measure(page, width)
    assert seen["viewport"] == width
    # Wide things scroll in their own box, the page does not.
    assert seen["page"] <= width
    assert seen["font_px"] >= 16
    assert seen["text_height"] >= 10

    assert min(seen["timeline"]) > 200
    drawn = {name for name, size in seen["marks"].items() if max(size) > 3}
    assert {f"kill-{n}" for n in range(1, 8)} <= drawn
    assert {f"restarted-{n}" for n in range(1, 8)} <= drawn
    assert {f"release-{n}" for n in range(1, 13)} <= drawn
    for prefill in ("prefill-1", "prefill-2"):
        for decode in ("decode-1", "decode-2"):
            assert f"answers-{prefill}-{decode}" in drawn
    assert "failures-prefill-2-decode-1" in drawn

    texts = [text for text, *_ in seen["releases"]]
    assert texts == ["1.00 s", "2.00 s"] * 6
    assert all(min(size) > 10 for _, *size in seen["releases"])


def test_a_browser_paints_the_report_in_greys(page: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    show(page, f"--screenshot={picture}")
    pixels = imread(picture)[..., :3]
    dark = (pixels < 0.5).all(axis=-1).mean()
    assert 0.005 < dark < 0.5
    page.write_text(re.sub("<svg.*</svg>", "", page.read_text(), flags=re.DOTALL))
    show(page, f"--screenshot={picture}")
    assert (imread(picture)[..., :3] < 0.5).all(axis=-1).mean() < dark


def test_the_report_loads_nothing_and_needs_no_colour(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|@import', text)
    colours = re.findall(r"#([0-9a-f]{6}|[0-9a-f]{3})\b(?=[;\" ])", text)
    assert colours
    for colour in colours:
        third = len(colour) // 3
        assert len({colour[i : i + third] for i in range(0, len(colour), third)}) == 1


def test_a_release_that_never_came_is_said(tmp_path: Path) -> None:
    record = make_record(1)
    record.releases = [Release("decode-1", "engine-1", 12.5)]
    write_report(record, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Prefill replacement drill: failed" in text
    assert "<td class=n>2.50 s</td><td class=n>never</td>" in text
    assert "<td>1 of 2</td>" in text


def test_an_empty_drill_has_a_report(tmp_path: Path) -> None:
    record = Record({}, 2.0, 6, ["p1", "p2"], ["d1", "d2"], stopped="<no luck>")
    write_report(record, tmp_path / "report.html", make_record())
    text = (tmp_path / "report.html").read_text()
    assert "failed, incomplete" in text
    assert "<pre>&lt;no luck&gt;</pre>" in text
    assert "12 of 12" in text


def test_the_same_record_makes_the_same_report(page: Path, tmp_path: Path) -> None:
    write_report(make_record(), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page.read_text()
