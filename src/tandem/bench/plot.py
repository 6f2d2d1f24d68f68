"""SVG plot of a run: the cumulative distribution of each metric in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tandem.bench.summary import METRICS, percentile

WIDTH, HEIGHT, LEFT, TOP = 360, 260, 50, 40
POINTS = 200
COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea")


def svg(title: str, runs: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return an SVG with one panel per metric of `METRICS` and one line per run. `runs` maps names to `summary.samples`."""
    panels = [_panel(i, metric, {name: run.get(metric, ()) for name, run in runs.items()}) for i, metric in enumerate(METRICS)]
    legend = "".join(
        f'<text x="{20 + 300 * i}" y="48" fill="{COLOURS[i % len(COLOURS)]}">{escape(name)}</text>' for i, name in enumerate(runs)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 40} {2 * HEIGHT + 70}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="26" font-size="16">{escape(title)}</text>{legend}{"".join(panels)}</svg>\n'
    )


def _panel(index: int, metric: str, samples: Mapping[str, Sequence[float]]) -> str:
    x, y = 20 + index % 2 * WIDTH, 60 + index // 2 * HEIGHT
    width, height = WIDTH - LEFT - 20, HEIGHT - TOP - 40
    highest = max((max(values) for values in samples.values() if values), default=0.0) or 1.0
    marks = [
        f'<text x="{LEFT}" y="{TOP - 12}">{escape(METRICS[metric])}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
    ]
    for share in (0.0, 0.5, 0.99, 1.0):
        at = TOP + height * (1 - share)
        marks.append(f'<path d="M{LEFT} {at:.1f}h{width}" stroke="#ddd"/>')
        if share != 0.99:
            marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{share:g}</text>')
    for part in (0.0, 0.5, 1.0):
        marks.append(
            f'<text x="{LEFT + width * part:.1f}" y="{TOP + height + 16}" text-anchor="middle">'
            f"{highest * part:.4g}{' ms' if part == 1.0 else ''}</text>"
        )
    for i, values in enumerate(samples.values()):
        if values:
            marks.append(
                f'<polyline fill="none" stroke-width="2" stroke="{COLOURS[i % len(COLOURS)]}" '
                f'points="{_points(values, highest, width, height)}"/>'
            )
    return f'<g transform="translate({x} {y})">{"".join(marks)}</g>'


def _points(values: Sequence[float], highest: float, width: int, height: int) -> str:
    ordered = sorted(values)
    shares = [i / POINTS for i in range(POINTS + 1)]
    places = ((LEFT + width * percentile(ordered, share) / highest, TOP + height * (1 - share)) for share in shares)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
