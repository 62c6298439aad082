"""The page of `infinity report` in headless Chromium: every chart is drawn, the console is silent,
and nothing is asked of the network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("plotly")

from infinity._src.cli.html_report import sections, write_report
from infinity._src.cli.run_history import read_run
from tests.unit.cli.run_pages import hostile_run, train_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]

# Before all else of the page: it notes what goes wrong, and at the end what was drawn.
PROBE = """
<script>
window.probe = {errors: [], blocked: [], alerts: 0};
window.alert = () => { probe.alerts++; };
addEventListener("error", event => probe.errors.push(String(event.message)));
addEventListener("unhandledrejection", event => probe.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", event => probe.blocked.push(event.blockedURI));
for (const level of ["error", "warn"]) {
    const write = console[level];
    console[level] = (...all) => { probe.errors.push(all.join(" ")); write(...all); };
}
addEventListener("load", () => setTimeout(() => {
    const marks = ".point > path, .point > text, path.js-line, .points > path";
    probe.charts = Object.fromEntries([...document.querySelectorAll(".plotly-graph-div")].map(
        each => [each.id, {
            wanted: each.data.length,
            traces: each.querySelectorAll("g.trace").length,
            marks: each.querySelectorAll(marks).length,
            width: each.querySelector("svg.main-svg").clientWidth,
        }]));
    probe.requests = performance.getEntriesByType("resource").map(each => each.name);
    const shown = document.createElement("pre");
    shown.id = "probe";
    shown.textContent = JSON.stringify(probe);
    document.body.append(shown);
}, 500));
</script>
"""


def loaded(page: Path, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Load the page; return the findings of the probe, and the lines of Chromium's console. No name
    has an address there, so that a request fails, and is an error of the page.
    """
    text = page.read_text(encoding="utf-8")
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("<title>", f"{PROBE}<title>", 1), encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000", "--dump-dom",
            "--window-size=1400,2400", probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(html.unescape(found[1])), console


def wanted_of(*directories: Path) -> dict[str, int]:
    """The number of traces of each chart."""
    found = sections([read_run(directory) for directory in directories])
    return {chart.name: len(chart.figure.data) for each in found for chart in each.charts}


@pytest.mark.parametrize("kind", ["trained", "hostile"])
def test_every_chart_is_drawn_without_an_error_and_without_a_network(
    tmp_path: Path, kind: str
) -> None:
    run = train_run(tmp_path / "run") if kind == "trained" else hostile_run(tmp_path / "run")
    write_report([run], tmp_path / "report.html")
    found, console = loaded(tmp_path / "report.html", tmp_path)
    assert (found["errors"], found["blocked"], found["alerts"]) == ([], [], 0)
    assert console == ""
    assert found["requests"] == []
    wanted = wanted_of(run)
    assert len(wanted) == (11 if kind == "trained" else 8)
    assert {name: chart["wanted"] for name, chart in found["charts"].items()} == wanted
    for name, chart in found["charts"].items():
        assert chart["traces"] == chart["wanted"], name
        assert chart["marks"] >= chart["wanted"], name
        assert chart["width"] > 300, name


def test_the_probe_sees_errors_requests_and_charts_that_are_missing(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    run = hostile_run(tmp_path / "run")
    write_report([run], tmp_path / "report.html")
    page = tmp_path / "report.html"
    text = re.sub(r'Plotly\.newPlot\((\s*"loss")', r"Plotly.nothing(\1", page.read_text("utf-8"))
    broken = text.replace(
        "</body>",
        '<img src="http://example.invalid/x.png"><script>console.error("seen")</script></body>',
    )
    assert broken.count("Plotly.nothing") == 1
    page.write_text(broken, encoding="utf-8")
    script = "const marks"
    tolerant = PROBE.replace("each.data.length", "(each.data || []).length").replace(
        'each.querySelector("svg.main-svg").clientWidth', "0"
    )
    assert script in tolerant
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PROBE", tolerant)
        found, console = loaded(page, tmp_path)
    assert "seen" in found["errors"]
    assert any("nothing" in error for error in found["errors"])
    assert found["blocked"] == ["http://example.invalid/x.png"]
    assert found["charts"]["loss"]["traces"] == 0
    assert "seen" in console
