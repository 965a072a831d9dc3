"""HTML for notebooks: tables and small curves, without a library and without scripts."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hpc_rl.status.formatting import format_number

MAX_SHOWN = 200  # rows of a table
WIDTH, HEIGHT = 240, 40  # of a curve, in pixels


def format_cell(value: Any) -> str:
    """Return a value as the text of a cell; empty for None."""
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else str(value)


def make_table(head: Sequence[str], rows: Sequence[Iterable[Any]]) -> str:
    """Return a table; of more than MAX_SHOWN rows the first ones, and how many there are."""
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"] if head else []
    for row in rows[:MAX_SHOWN]:
        lines.append(f"<tr>{''.join(f'<td>{escape(format_cell(cell))}</td>' for cell in row)}</tr>")
    more = f"<p>{MAX_SHOWN} of {len(rows)} rows</p>" if len(rows) > MAX_SHOWN else ""
    return f"<table>{''.join(lines)}</table>{more}"


def make_curve(points: Sequence[tuple[int, float]]) -> str:
    """Return a small curve as SVG; empty for less than two points."""
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = (last - first) or 1, (high - low) or 1.0
    places = " ".join(
        f"{(step - first) / across * WIDTH:.1f},{(1 - (value - low) / up) * (HEIGHT - 4) + 2:.1f}"
        for step, value in points
    )
    line = f'<polyline points="{places}" fill="none" stroke="#0072b2" stroke-width="1.5"/>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{line}</svg>'
