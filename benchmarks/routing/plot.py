"""A figure of several panels with a line for each policy, as an SVG that needs nothing to be shown.

Owns the drawing. Computes nothing of what it draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Line", "Panel", "figure"]

_WIDTH: Final = 960
_HEIGHT: Final = 380
_LEFT: Final = 62
_TOP: Final = 64
_BOTTOM: Final = 56
_GAP: Final = 78
_COLORS: Final = ("#6b7280", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DASHES: Final = ("6 4", "2 3", "10 3 2 3", "", "4 2")
_STYLE: Final = "font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#1f2937"


@dataclass(frozen=True, slots=True)
class Line:
    """The values of one policy, at the figure's common points."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram. ``logarithmic`` is of the vertical axis."""

    title: str
    lines: Sequence[Line]
    lowest: float
    highest: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def clips(self, tick: float) -> bool:
        """Whether a tick stands for what is beyond it as well."""
        return tick == self.highest and any(value > tick for line in self.lines for value in line.values)

    def height(self, value: float) -> float:
        """Where a value is between the bottom (0) and the top (1); what is beyond is at the edge."""
        clipped = min(max(value, self.lowest), self.highest)
        if self.logarithmic:
            return math.log(clipped / self.lowest) / math.log(self.highest / self.lowest)
        return (clipped - self.lowest) / (self.highest - self.lowest)


def figure(points: Sequence[float], points_name: str, panels: Sequence[Panel], description: str) -> str:
    """The SVG. All panels have the same points from left to right and the same lines."""
    width = (_WIDTH - _LEFT - 20 - _GAP * (len(panels) - 1)) / len(panels)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    label = f'role="img" aria-label="{escape(description)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label} style="{_STYLE}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        *_legend([line.name for line in panels[0].lines]),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, points, points_name, _LEFT + number * (width + _GAP), width)
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for number, name in enumerate(names):
        parts.append(_stroke(f"M{x:.1f} 18H{x + 34:.1f}", number))
        parts.append(_text(x + 40, 22, name, "start"))
        x += 62 + 7.2 * len(name)
    return parts


def _panel(panel: Panel, points: Sequence[float], points_name: str, left: float, width: float) -> list[str]:
    bottom, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP

    def x_of(point: float) -> float:
        return left + width * (point - points[0]) / (points[-1] - points[0])

    def y_of(value: float) -> float:
        return bottom - height * panel.height(value)

    parts = [_text(left, _TOP - 14, panel.title, "start", bold=True)]
    for tick in panel.ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{left:.1f} {y:.1f}h{width:.1f}" stroke="#e5e7eb" fill="none"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:g}{'+' if panel.clips(tick) else ''}", "end"))
    for point in points:
        parts.append(f'<path d="M{x_of(point):.1f} {bottom}v5" stroke="#6b7280" fill="none"/>')
        parts.append(_text(x_of(point), bottom + 20, f"{point:g}", "middle"))
    parts.append(_text(left + width / 2, bottom + 42, points_name, "middle"))
    for number, line in enumerate(panel.lines):
        places = [(x_of(point), y_of(value)) for point, value in zip(points, line.values, strict=True)]
        parts.append(_stroke("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), number))
        color = _COLORS[number]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>' for x, y in places]
    return parts


def _stroke(path: str, number: int) -> str:
    dash = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
    return f'<path d="{path}" fill="none" stroke="{_COLORS[number]}" stroke-width="2.4"{dash}/>'


def _text(x: float, y: float, words: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
