"""The HTML map of a simulation: throughput over the number of nodes and the share of the servers."""

from __future__ import annotations

from typing import Any

import jinja2

from hpc_rl.core.errors import ConfigError
from hpc_rl.status.report_page import format_script

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:15px sans-serif;margin:2em;max-width:70em}td,th{padding:.2em .8em;text-align:left}</style>
<script>{{ plotly }}</script></head><body>
<h1>{{ title }}</h1>
<p>Simulated tokens per second and device, by the number of nodes and the share of the servers.</p>
<div id="map"></div>
<h2>This trial</h2>
<table>{% for name, value in facts %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
<p>{{ defaults }}</p>
<script>const f = {{ figure }}; Plotly.newPlot("map", f.data, f.layout, {responsive: true});</script>
</body></html>
"""


def make_map_page(
    title: str,
    points: list[dict[str, Any]],
    devices_per_node: float,
    facts: list[tuple[str, str]],
    defaults: str,
) -> str:
    """Return the page; `points` are of Case.map_rates. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        why = f"--html needs plotly, which is not installed ({error}): pip install 'hpc-rl[report]'"
        raise ConfigError(why) from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    markup = jinja2.utils.markupsafe.Markup
    return environment.from_string(PAGE).render(
        title=title,
        facts=facts,
        defaults=defaults,
        figure=format_script(draw_map(points, devices_per_node)),
        plotly=markup(get_plotlyjs()),
    )


def draw_map(points: list[dict[str, Any]], devices_per_node: float) -> dict[str, Any]:
    """Return the map as plotly.js takes it; cells without a plan stay empty."""
    nodes = sorted({point["n_nodes"] for point in points})
    shares = sorted({point["share"] for point in points})
    known = {(point["n_nodes"], point["share"]): point for point in points}
    rates, texts = [], []
    for share in shares:
        row = [known.get((n_nodes, share)) for n_nodes in nodes]
        rates.append([
            one and one["tokens_per_s"] / one["n_nodes"] / devices_per_node for one in row
        ])  # fmt: skip
        texts.append([one["allocation"] if one else "" for one in row])
    data = {
        "type": "heatmap", "x": [str(one) for one in nodes], "y": [f"{share:.0%}" for share in shares],
        "z": rates, "text": texts, "colorscale": "Viridis", "colorbar": {"title": "tokens/s"},
        "hovertemplate": "%{x} nodes, %{y} servers: %{z:.4g} tokens/s per device<br>%{text}<extra></extra>",
    }  # fmt: skip
    layout = {"xaxis": {"title": "nodes", "type": "category"}, "yaxis": {"title": "devices of servers"}}
    return {"data": [data], "layout": layout}
