"""The HTML page of a report: one file that loads no other. Charts are drawn by the plotly.js in it."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import jinja2
import yaml

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.log import redact
from hpc_rl.stats.kept_samples import Sample
from hpc_rl.stats.read import HELD_OUT, is_held_out
from hpc_rl.status.comparison import make_headline
from hpc_rl.status.curve import smooth
from hpc_rl.status.formatting import format_number
from hpc_rl.status.goodput import MEANINGS, PARTS, Bucket, Span
from hpc_rl.status.progress import AXES, get_axis_title, measure_progress
from hpc_rl.status.trial_report import (
    TrialReport,
    find_differences,
    is_own,
    make_attempt_rows,
    make_fact_rows,
    make_goodput_rows,
    summarize_staleness,
    thin_out,
)

CHARTS = {  # metric -> title, in their order; own metrics follow, all others are in the chart with the menu
    HELD_OUT: "Held-out",
    "reward": "Reward",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "entropy": "Entropy",
    "behave_approx_kl": "KL to the policy that generated",
    "kl_rewards": "KL to the reference, in the reward",
    "reward_std": "Standard deviation of the rewards",
    "zero_advantage_groups": "Share of groups without an advantage",
    "completion_len": "Tokens of a completion",
    "truncated": "Share of truncated completions",
    "staleness_mean": "Staleness (steps)",
    "lr": "Learning rate",
    "step_s": "Seconds per step",
}
COLORS = {  # by Okabe and Ito: told apart by colour-blind readers too
    Bucket.GENERATE: "#56b4e9",
    Bucket.TRAIN: "#009e73",
    Bucket.PUBLISH: "#0072b2",
    Bucket.EVALUATE: "#cc79a7",
    Bucket.SAVE: "#f0e442",
    Bucket.WAIT: "#e69f00",
    Bucket.START: "#999999",
    Bucket.STOP: "#cccccc",
    Bucket.LOST: "#d55e00",
    Bucket.UNUSED: "#000000",
}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # of the trials
MIN_SPAN = 0.005  # part of an attempt that is seen on the time line
MAX_OWN = 24  # own metrics that have a chart each
MIN_SMOOTHED = 40  # curves with fewer points have no mean
NUM_COLUMNS = 4  # steps or evaluations in a row
NUM_PROMPTS = 3  # that are shown at each of them
MAX_TEXT = 2000  # characters of a prompt or completion
MAX_SEARCHED = 1000  # completions that a page searches


def make_page(reports: Sequence[TrialReport], now: float) -> str:
    """Return the page as of `now`, in Unix seconds. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"--html needs plotly, which is not installed ({error}): pip install 'hpc-rl[report]'"
        ) from error
    source = resources.files("hpc_rl.status").joinpath("report_page.html").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    trials = [
        {
            "name": report.name,
            "directory": report.status.trial.dir,
            "attempts": make_attempt_rows(report),
            "samples": make_sample_tables(report.samples),
            "config": redact(yaml.safe_dump(report.config, sort_keys=False)),
            "provenance": redact(yaml.safe_dump(report.provenance, sort_keys=True)),
        }
        for report in reports
    ]
    return environment.from_string(source).render(
        title=", ".join(report.name for report in reports),
        written=time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now)),
        trials=trials,
        facts=make_fact_rows(reports),
        buckets=[(str(bucket), MEANINGS[bucket], cells) for bucket, cells in make_goodput_rows(reports)],
        differences=find_differences(reports),
        figures=format_script(
            {name: figure for name, figure in make_figures(reports).items() if figure["data"]}
        ),
        headline=make_headline(reports),
        others=format_script(list_other_curves(reports)),
        axes=format_script(list_axes(reports)),
        searched=format_script(list_searched(reports)),
        colors=format_script(LINES),
        has_curves=any(report.history.metrics() for report in reports),
        plotly=jinja2.utils.markupsafe.Markup(get_plotlyjs()),
    )


def format_script(value: Any) -> Any:
    """Return a value as JSON that can stand inside of a script element."""
    text = json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return jinja2.utils.markupsafe.Markup(text)


def make_figures(reports: Sequence[TrialReport]) -> dict[str, dict[str, Any]]:
    """Return the charts of a page as plotly.js takes them, by the ids of their places."""
    found = {"goodput": make_goodput_figure(reports)}
    for number, report in enumerate(reports):
        found[f"attempts-{number}"] = make_attempts_figure(report)
    found |= {f"curve-{metric}": make_curve_figure(reports, metric) for metric in keep_chart(reports)}
    for number, report in enumerate(reports):
        found[f"steps-{number}"] = make_step_figure(report)
    by_length = [[one.num_tokens for one in report.samples] for report in reports]
    by_age = [
        [age for one in report.samples if (age := summarize_staleness(one)) is not None] for report in reports
    ]
    found["lengths"] = make_histogram(reports, by_length, "Length of kept completions", "tokens")
    found["ages"] = make_histogram(
        reports, by_age, "Staleness of kept completions", "steps behind the trainer"
    )
    return found


def keep_chart(reports: Sequence[TrialReport]) -> list[str]:
    """Return the metrics with a separate chart, in order."""
    known = dict.fromkeys(name for report in reports for name in report.history.metrics())
    own = [name for name in known if is_own(name)]
    return [*(name for name in CHARTS if name in known), *own[:MAX_OWN]]


def draw_chart(title: str, data: list[dict[str, Any]], **layout: Any) -> dict[str, Any]:
    margin = {"l": 55, "r": 15, "t": 40, "b": 60}
    legend = {"orientation": "h", "y": -0.3, "traceorder": "normal"}
    return {
        "data": data,
        "layout": {"title": {"text": title}, "margin": margin, "height": 300, "legend": legend} | layout,
    }


def make_curve_figure(reports: Sequence[TrialReport], metric: str) -> dict[str, Any]:
    title = CHARTS.get(metric, metric)
    if metric == HELD_OUT:
        title = f"Held-out {reports[0].status.history.held_out[0]}"
    elif is_held_out(metric):
        title = f"Held-out {metric.removeprefix('eval_')}"
    curves = [report.history.curve(metric) for report in reports]
    longest = max(map(len, curves))
    num_steps = longest // (MIN_SMOOTHED // 2) if longest >= MIN_SMOOTHED and not is_held_out(metric) else 1
    traces = []
    for number, (report, curve) in enumerate(zip(reports, curves, strict=True)):
        steps, values = make_columns(thin_out(curve))
        mode = "lines+markers" if len(steps) < 30 else "lines"
        line = {"color": LINES[number % len(LINES)]}
        trace = {"x": steps, "y": values, "name": report.name, "mode": mode, "line": line, "meta": number}
        if num_steps > 1:  # the values themselves are pale behind their mean
            traces.append(trace | {"opacity": 0.25, "showlegend": False, "hoverinfo": "skip"})
            steps, values = make_columns(thin_out(smooth(curve, num_steps)))
            trace |= {"x": steps, "y": values}
        traces.append(trace)
    return draw_chart(
        f"{title} (mean of {num_steps} steps)" if num_steps > 1 else title,
        traces,
        xaxis={"title": {"text": "step"}},
        yaxis={"exponentformat": "e"},
        showlegend=len(reports) > 1,
    )


def list_other_curves(reports: Sequence[TrialReport]) -> dict[str, list[Any]]:
    """Return the other metrics: a pair of steps and values for each trial."""
    drawn = keep_chart(reports)
    names = {name: None for report in reports for name in report.history.metrics() if name not in drawn}
    return {
        name: [(report.name, *make_columns(thin_out(report.history.curve(name)))) for report in reports]
        for name in names
    }


def list_axes(reports: Sequence[TrialReport]) -> dict[str, dict[str, Any]]:
    """Return the axes that every trial has: a title, and for each trial a pair of steps and amounts.

    The first pair is the step before the first one, and 0. The page interpolates between pairs.
    """
    found = {}
    on_gpus = any(report.goodput.on_gpus for report in reports)
    for axis in AXES:
        curves = [measure_progress(axis, report.history, report.goodput) for report in reports]
        if all(curves):
            begun = [thin_out([(curve[0][0] - 1, 0.0), *curve]) for curve in curves]
            found[axis] = {"title": get_axis_title(axis, on_gpus), "places": list(map(make_columns, begun))}
    return found


def list_searched(reports: Sequence[TrialReport]) -> list[dict[str, Any]]:
    """Return the completions that the page searches, at most MAX_SEARCHED, from the whole training."""
    room = MAX_SEARCHED // len(reports)
    found = []
    for report in reports:
        every = -(-len(report.samples) // room) or 1
        for one in report.samples[::-1][::every][::-1]:
            what = "held-out" if one.evaluation else "training"
            cell = _format_cell(one, with_prompt=True)
            found.append(cell | {"facts": f"{report.name}, {what}, {cell['facts']}"})
    return found


def make_columns(curve: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [float(f"{value:.5g}") for _, value in curve]


def make_step_figure(report: TrialReport) -> dict[str, Any]:
    """Return how the seconds of each step are divided."""
    traces = []
    for metric, bucket in PARTS:
        steps, values = make_columns(thin_out(report.history.curve(metric)))
        if any(values):
            line = {"color": COLORS[bucket], "width": 0.5}
            kind = {"stackgroup": "one", "mode": "lines", "name": bucket, "line": line}
            traces.append({"x": steps, "y": values, "fillcolor": COLORS[bucket], **kind})
    axes = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "seconds"}}}
    return draw_chart(f"{report.name}: a step of the trainer", traces, **axes)


def make_goodput_figure(reports: Sequence[TrialReport]) -> dict[str, Any]:
    names = [report.name for report in reports]
    traces = []
    for bucket in Bucket:
        parts = [
            100 * report.goodput.buckets.get(bucket, 0.0) / max(report.goodput.allocation_s, 1e-9)
            for report in reports
        ]
        if any(parts):
            marker = {"color": COLORS[bucket], "line": {"color": "white", "width": 1}}
            bar = {"type": "bar", "orientation": "h", "name": bucket, "marker": marker}
            traces.append({"x": parts, "y": names, **bar})
    height = 170 + 40 * len(reports)
    axes: dict[str, Any] = {"xaxis": {"ticksuffix": " %", "range": [0, 100]}}
    axes["yaxis"] = {"automargin": True, "autorange": "reversed"}
    return draw_chart("Where the allocation went", traces, barmode="stack", height=height, **axes)


def make_attempts_figure(report: TrialReport) -> dict[str, Any]:
    """Return the attempts of a trial on a time line, by the trainer's activity."""
    bars: dict[str, list[tuple[Any, ...]]] = {}
    causes = {row[0]: row[-1] for row in make_attempt_rows(report)}
    for number, use in enumerate(report.goodput.attempts, 1):
        label, hover = str(number), f"{use.id}<br>{causes[use.id]}"
        if use.waited_s:
            bars.setdefault("queue", []).append((use.start - use.waited_s, use.waited_s, label, hover))
        for name, start, end in merge_spans(use.spans, MIN_SPAN * (use.end - use.start)):
            bars.setdefault(name, []).append((start, end - start, label, hover))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "base": [format_date(start) for start, *_ in found],
            "x": [1000 * seconds for _, seconds, *_ in found],
            "y": [label for *_, label, _ in found],
            "customdata": [[hover, format_number(seconds)] for _, seconds, _, hover in found],
            "hovertemplate": f"{name}, %{{customdata[1]}} s<br>%{{customdata[0]}}<extra></extra>",
            "marker": {"color": "#ddddee" if name == "queue" else COLORS[Bucket(name)]},
        }
        for name, found in bars.items()
    ]
    axes: dict[str, Any] = {"xaxis": {"type": "date", "nticks": 4, "tickangle": 0}}
    axes["yaxis"] = {"title": {"text": "attempt"}, "autorange": "reversed", "type": "category"}
    height = 215 + 26 * len(report.goodput.attempts)
    return draw_chart(f"{report.name}: attempts", traces, barmode="overlay", height=height, **axes)


def merge_spans(spans: Sequence[Span], least_s: float) -> list[tuple[str, float, float]]:
    """Return (bucket, start, end) of stretches of at least `least_s`, each by what most of it was."""
    stretches: list[list[Span]] = [[]]
    for span in spans:
        if stretches[-1] and span.start - stretches[-1][0].start >= least_s:
            stretches.append([])
        stretches[-1].append(span)
    found: list[tuple[str, float, float]] = []
    for stretch in filter(None, stretches):
        seconds: dict[str, float] = defaultdict(float)
        for span in stretch:
            seconds[span.bucket] += span.end - span.start
        name, start = max(seconds, key=seconds.__getitem__), stretch[0].start
        if found and found[-1][0] == name:
            start = found.pop()[1]
        found.append((name, start, stretch[-1].end))
    return found


def format_date(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")


def make_histogram(
    reports: Sequence[TrialReport], values: list[list[int]], title: str, unit: str
) -> dict[str, Any]:
    traces = [
        {"type": "histogram", "x": found, "name": report.name, "histnorm": "percent", "opacity": 0.7,
         "marker": {"color": LINES[number % len(LINES)]}}
        for number, (report, found) in enumerate(zip(reports, values, strict=True)) if found
    ]  # fmt: skip
    every = sorted(one for found in values for one in found) or [0]
    ticks = {"dtick": max(1, (every[-1] - every[0]) // 8), "tick0": 0}  # whole numbers
    axes = {"xaxis": {"title": {"text": unit}} | ticks, "yaxis": {"ticksuffix": " %"}}
    return draw_chart(title, traces, barmode="overlay", bargap=0.1, showlegend=len(reports) > 1, **axes)


def make_sample_tables(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return completions side by side: the same held-out prompts, then the best and the worst of steps."""
    held_out = [one for one in samples if one.evaluation]
    tables = []
    by_step = spread_out({one.step: None for one in held_out})
    prompts = {one.prompt_index: None for one in held_out if one.step == (by_step or [0])[-1]}
    for prompt in list(prompts)[:NUM_PROMPTS]:
        row = [
            one for one in held_out if one.prompt_index == prompt and one.step in by_step and not one.sample
        ]
        title = f"Held-out prompt {prompt}"
        tables.append(
            {"title": title, "prompt": clip_text(row[0].prompt), "cells": [_format_cell(one) for one in row]}
        )
    trained = [one for one in samples if not one.evaluation]
    steps = spread_out({one.step: None for one in trained})
    for title, pick in (("Best completion of a step", max), ("Worst completion of a step", min)):
        row = [
            pick((one for one in trained if one.step == step), key=lambda one: one.reward) for step in steps
        ]
        if row:
            cells = [_format_cell(one, with_prompt=True) for one in row]
            tables.append({"title": title, "prompt": "", "cells": cells})
    return tables


def _format_cell(one: Sample, with_prompt: bool = False) -> dict[str, Any]:
    facts = (
        f"step {one.step}, reward {format_number(one.reward)}, {one.num_tokens} tokens, {one.finish_reason}"
    )
    parts = ", ".join(f"{name} {format_number(value)}" for name, value in one.stats.items())
    prompt = clip_text(one.prompt) if with_prompt else ""
    output = [f"output: {clip_text(one.output)}"] if one.output else []
    return {
        "facts": facts,
        "parts": parts,
        "prompt": prompt,
        "columns": [*(one.format_column(name) for name in one.columns), *output],
        "texts": clip_texts(one),
    }


def clip_text(text: str, room: int = MAX_TEXT) -> str:
    return text if len(text) <= room else f"{text[:room]} … ({len(text) - room} more characters)"


def clip_texts(one: Sample) -> list[tuple[bool, str]]:
    """Return the first MAX_TEXT characters of a completion in pieces, as Sample.texts."""
    pieces, room = list(one.texts()), MAX_TEXT
    shown: list[tuple[bool, str]] = []
    for number, (made, text) in enumerate(pieces):
        if len(text) > room:
            rest = sum(len(more) for _, more in pieces[number + 1 :])
            return [*shown, (made, f"{text[:room]} … ({len(text) - room + rest} more characters)")]
        shown.append((made, text))
        room -= len(text)
    return shown


def spread_out(steps: dict[int, None]) -> list[int]:
    """Return at most NUM_COLUMNS of the steps: the first, the last, and some between."""
    known = sorted(steps)
    if len(known) <= NUM_COLUMNS:
        return known
    return [known[round(part * (len(known) - 1) / (NUM_COLUMNS - 1))] for part in range(NUM_COLUMNS)]
