"""The model card of an export: README.md with method, results, options and origins, and curves.svg."""

import hashlib
import shutil
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.config.load.stored import find_trainer, from_dict
from hpc_rl.config.options.experiment import Config, GRPOConfig, list_datasets
from hpc_rl.core.errors import HpcRlError
from hpc_rl.core.log import redact
from hpc_rl.core.trial import Trial, load_object
from hpc_rl.datasets.rows import compute_fingerprint
from hpc_rl.stats.read import HELD_OUT, Curve, History, load_history
from hpc_rl.status.curve import smooth
from hpc_rl.status.formatting import format_number
from hpc_rl.trials.handing_over import (
    ExportFacts,
    find_server_pythons,
    list_data_paths,
    list_serve_commands,
    load_export_facts,
    make_evaluate_command,
)
from hpc_rl.trials.hub import find_origin

CARD, CURVES = "README.md", "curves.svg"
MAX_EVALUATIONS = 12  # rows of the table
NUM_SMOOTHED = 10  # steps of the curve of training
LICENSE_KEYS = ("license", "license_name", "license_link")
HASHED_CHUNK = 1 << 20  # bytes
WIDTH, HEIGHT, MARGIN = 640, 280, 48  # of the curves, in pixels


def write_model_card(trial: Trial, step: int, version: str, folder: Path, shown: str = "") -> None:
    """Write README.md, curves.svg and the base model's license into the folder of an export.

    `step` and `version` are of the weights; `shown` is the name of the export in commands. Raises OSError.
    """
    history = cut_history(load_history(trial), step)
    picture = draw_curves(history)
    if picture:
        (folder / CURVES).write_text(picture)
    base = find_base_folder(trial)
    for path in sorted(base.glob("LICENSE*")) if base is not None and base.is_dir() else []:
        shutil.copyfile(path, folder / path.name)
    card = make_model_card(trial, step, version, folder, history, shown or ".", has_picture=bool(picture))
    (folder / CARD).write_text(card)


def make_model_card(
    trial: Trial, step: int, version: str, folder: Path, history: History, shown: str, has_picture: bool
) -> str:
    """Return the text of the card; its head is YAML, as the hub reads it."""
    stored = load_object(trial.config_json)
    config = _load_config(stored)
    base = find_base_folder(trial)
    name, commit = find_origin(base) if base is not None else ("", "")
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["hpc-rl", *(["reinforcement-learning"] if isinstance(config, GRPOConfig) else [])]
    head |= {"base_model": name} if name else {}
    of_base = load_license(base) if base is not None else {}
    head |= of_base
    data = " ".join(path for _, path in _list_data(config))
    facts = load_export_facts(folder, shown, data)
    if facts.base:
        head |= {"library_name": "peft"}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {trial.name}",
        f"{_describe_method(config)} Weights after step {step} (version {version}) of the trial {trial}.",
        "\n".join(_describe_base(base, name, commit, of_base)),
        *_format_results(history, has_picture),
        *_format_commands(facts),
        *_format_data(config),
        *_format_provenance(trial),
        *_format_options(trial),
    ]
    return "\n\n".join(parts) + "\n"


def list_use_commands(trial: Trial, folder: Path) -> tuple[dict[str, str], str]:
    """Return the commands that serve an export, by server, and the one that evaluates it."""
    facts = load_export_facts(folder, data=" ".join(list_data_paths(trial)))
    return list_serve_commands(facts, find_server_pythons(trial)), make_evaluate_command(facts)


def _load_config(stored: dict[str, Any]) -> Config | None:
    """Return the configuration of a trial; None for a damaged one or one of a later version."""
    try:
        return from_dict(stored) if stored else None
    except (HpcRlError, ValueError, TypeError, KeyError):
        return None


def _describe_method(config: Config | None) -> str:
    if config is None:
        return "Trained with hpc-rl."
    if not isinstance(config, GRPOConfig):
        names = {"sft": "supervised fine-tuning", "rw": "a reward model's loss", "dpo": "DPO"}
        trainer = find_trainer(config)
        return f"Trained with hpc-rl by {names.get(trainer, trainer)}."
    actor, g = config.actor, config.gconfig
    facts = [
        f"{config.train_dataset.batch_size} prompts with {g.n_samples} completions each a step",
        f"at most {g.max_new_tokens} new tokens",
        f"temperature {format_number(g.temperature)}",
        f"learning rate {format_number(actor.optimizer.lr) if actor.optimizer else 'none'}",
        f"at most {config.rollout.max_head_offpolicyness} versions of staleness",
    ]
    kind = "an adapter (LoRA)" if actor.use_lora else "all parameters"
    return f"Trained with hpc-rl by {actor.algorithm or 'grpo'}, {kind}: {', '.join(facts)}."


def find_base_folder(trial: Trial) -> Path | None:
    """Return the folder of the model that a trial started from; None if the configuration does not tell."""
    stored = load_object(trial.config_json)
    section = stored.get("actor") or stored.get("model") or {}
    path = section.get("path") if isinstance(section, dict) else None
    return Path(path).expanduser() if path else None


def load_license(folder: Path) -> dict[str, str]:
    """Return the license in the head of a model's README.md; {} if it says nothing."""
    try:
        text = (folder / CARD).read_text(errors="replace")
        begin, head, _ = text.split("---", 2)
        known = yaml.safe_load(head) if not begin.strip() else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: str(known[key]) for key in LICENSE_KEYS if key in known} if isinstance(known, dict) else {}


def _describe_base(base: Path | None, name: str, commit: str, known: dict[str, str]) -> list[str]:
    if base is None:
        return ["The base model is not recorded."]
    shown = f"[{name}](https://huggingface.co/{name}) at commit {commit}" if name else f"`{base}`"
    if known:
        license_text = f"Its license is {known.get('license_name') or known.get('license')}."
    else:
        license_text = "Its license is not recorded there: see where the model came from."
    return [f"Base model: {shown}.", license_text]


def cut_history(history: History, step: int) -> History:
    """Return the history up to a step."""
    return History(
        [row for row in history.steps if row["step"] <= step],
        [row for row in history.evaluations if row["step"] <= step],
    )


def _format_results(history: History, has_picture: bool) -> list[str]:
    """Return the section with the evaluations, and the picture of the curves."""
    measures = {
        name: {step: value for step, value in values if value is not None}
        for name, values in history.evaluated.items()
    }
    found = ["## Results"] if measures or has_picture else []
    steps = sorted({step for values in measures.values() for step in values})
    every = -(-len(steps) // MAX_EVALUATIONS) or 1
    if steps:
        rows = [["step", *(f"held-out {name}" for name in measures)], ["---"] * (len(measures) + 1)]
        for step in steps[::-1][::every][::-1]:
            values = (measures[name].get(step) for name in measures)
            rows.append([str(step), *("" if value is None else format_number(value) for value in values)])
        found.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if has_picture:
        found.append(f"![Curves of training and evaluations]({CURVES})")
    return found


def _format_commands(facts: ExportFacts) -> list[str]:
    serve = list_serve_commands(facts)
    return [
        "## Use",
        "Serve it by one of these:",
        f"```bash\n{serve['sglang']}\n{serve['vllm']}\n```",
        "Evaluate it with [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness):",
        f"```bash\n{make_evaluate_command(facts)}\n```",
    ]


def _list_data(config: Config | None) -> list[tuple[str, str]]:
    """Return the sections of data sets and their paths."""
    return [] if config is None else [(name, one.path) for name, one in list_datasets(config) if one.path]


def _format_data(config: Config | None) -> list[str]:
    """Return the table of data sets, with their hashes at the time of the export."""
    rows = []
    for section, path in _list_data(config):
        file = Path(path).expanduser()
        num_rows = compute_fingerprint(file).get("rows", "")
        rows.append(f"| {section} | `{path}` | {num_rows} | {hash_file(file)} |")
    head = "| section | path | rows | SHA-256 at the export |\n| --- | --- | --- | --- |"
    return ["## Data", "\n".join([head, *rows])] if rows else []


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits; of a directory or a missing file why there is none."""
    if path.is_dir():
        return "a directory"
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASHED_CHUNK):
                digest.update(chunk)
    except OSError as error:
        return f"not readable: {error.strerror}"
    return digest.hexdigest()


def _format_provenance(trial: Trial) -> list[str]:
    about = load_object(trial.provenance_json)
    rows = {"hpc-rl": str(about.get("version", ""))}
    for name, key in (("commit of hpc-rl", "git"), ("commit of the working directory", "workdir_git")):
        state = about.get(key) or {}
        if state.get("commit"):
            rows[name] = state["commit"] + (", with changes" if state.get("dirty") else "")
    lines = [f"- {name}: {value}" for name, value in rows.items() if value]
    return ["## Provenance", "\n".join(lines)] if lines else []


def _format_options(trial: Trial) -> list[str]:
    """Return the options that were given for the trial, secrets redacted."""
    try:
        text = redact(trial.config_yaml.read_text()).rstrip()
    except OSError:
        return []
    return ["## Options", f"```yaml\n{text}\n```"]


def draw_curves(history: History) -> str:
    """Return a picture of the held-out measure and of the reward, else the loss, of training; or ''."""
    metric = "reward" if history.curve("reward") else "loss"
    held_out = history.curve(HELD_OUT)
    curves = {
        f"{metric} of training (mean of {NUM_SMOOTHED} steps)": smooth(history.curve(metric), NUM_SMOOTHED),
        f"held-out {history.held_out[0]}": held_out,
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    steps = [step for points in curves.values() for step, _ in points]
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    frame = _Frame(max(*steps, 1), low, high if high > low else low + 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for part in (0.0, 0.5, 1.0):
        value, step = low + part * (frame.high - low), round(part * frame.last)
        y, x = frame.y(value), frame.x(step)
        parts.append(f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="4" y="{y + 4:.1f}">{escape(format_number(value))}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{step}</text>')
    for number, (name, points) in enumerate(curves.items()):
        color = ("#0072b2", "#d55e00")[number]
        parts.append(_draw_line(points, frame, color))
        x = MARGIN + number * (WIDTH - MARGIN) // 2
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Frame:
    """Places of steps and values in the picture."""

    def __init__(self, last: int, low: float, high: float) -> None:
        self.last, self.low, self.high = last, low, high

    def x(self, step: float) -> float:
        return MARGIN + (WIDTH - MARGIN - 16) * step / self.last

    def y(self, value: float) -> float:
        return HEIGHT - 44 - (HEIGHT - 60) * (value - self.low) / (self.high - self.low)


def _draw_line(points: Sequence[tuple[int, float]] | Curve, frame: _Frame, color: str) -> str:
    places = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    line = f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>'
    if len(points) > 1:
        return line
    (x, y), *_ = [place.split(",") for place in places.split()]
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
