"""Style of the page of `infinity report`: one palette for all charts, legible on the light and the
dark page; the reader's system chooses between them.

Each colour of the palette has a contrast of at least 3 with both pages (WCAG's bound for graphics).
Texts of charts get their colour from the page's style sheet, since plotly has a single text colour.
"""

from __future__ import annotations

from typing import Any, Final

PAGES: Final = {"light": "#ffffff", "dark": "#0d1117"}
"""Background of the page."""

BLUE: Final = "#3b82f6"
ORANGE: Final = "#d9730d"
GREEN: Final = "#2a9d4a"
PURPLE: Final = "#a371f7"
RED: Final = "#e5534b"
TEAL: Final = "#1b93a3"
OCHRE: Final = "#b08800"
GREY: Final = "#7d8590"
PALETTE: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, OCHRE, GREY)
"""Colours of runs and of parts, in this order."""

UNITS: Final = ("Phase", 0.85)
"""(plotly's colour scale for the places of units in the model, the used share of the scale). The
scale has one brightness; its end is not used, since it has the colour of its beginning.
"""

_GRID = "rgba(125,133,144,0.3)"
CHART: Final[dict[str, Any]] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": GREY},
    "autotypenumbers": "strict",
    "hovermode": "closest",
    "hoverlabel": {"align": "left"},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
}
"""Layout of each chart, with a transparent background. plotly's templates are not used: copying one
into a chart takes 13 ms."""
AXIS: Final[dict[str, Any]] = {
    "gridcolor": _GRID,
    "zerolinecolor": _GRID,
    "zerolinewidth": 2,
    "linecolor": GREY,
    "ticks": "",
    "automargin": True,
    "title": {"standoff": 15},
}

_PAGES_STYLE = f"""
:root {{ color-scheme: light dark; --page: {PAGES["light"]}; --text: #1f2328; --muted: #57606a; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: {PAGES["dark"]}; --text: #e6edf3; --muted: #9198a1; }} }}
"""
STYLE: Final = (
    _PAGES_STYLE
    + """
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page);
       margin: 1.5rem auto; max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .2rem; }
p { margin: .2rem 0 .4rem; color: var(--muted); }
table { border-collapse: collapse; margin: .4rem 0; }
td, th { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top; }
td { overflow-wrap: anywhere; }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: minmax(0, 1fr); gap: .5rem; }
.gtitle, .xtitle, .ytitle, .legendtext, .xtick text, .ytick text {
       fill: var(--text) !important; }
@media (min-width: 1000px) { .beside { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
"""
)

POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""Content security policy. It forbids all requests: plotly.js and its styles are in the page."""


def reloads(seconds: float | None) -> str:
    """Return the script that reloads a page after `seconds`; "" for None. A reload keeps the
    reader's scroll position.
    """
    if seconds is None:
        return ""
    return f"<script>setTimeout(() => location.reload(), {1e3 * seconds:.0f})</script>"
