"""Every option is used: code outside config/ or a script template reads it, or a table here explains it.

This goes by names, not by types. An attribute `x.option` counts if its name is unique, else only as
`section.option`. A name is unique if only one section has it and no other class has such an attribute.
"""

import ast
import inspect
import re
from collections import defaultdict
from dataclasses import fields
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent
from typing import get_args, get_type_hints

from package_sources import SOURCES, parse_source

from hpc_rl.config import (
    held_out,
    sglang_versions,
    vllm_versions,
)
from hpc_rl.config.algorithm_defaults import make_set_config
from hpc_rl.config.devices import choose_allocation
from hpc_rl.config.load import stored
from hpc_rl.config.load.fields import find_section, list_hints, list_options
from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.options.experiment import CONFIGS, find_last_step, has_own_prompts
from hpc_rl.config.options.inference import InferenceEngineConfig
from hpc_rl.config.pool_view import find_teacher_pool, view_pool
from hpc_rl.config.rules.container_rules import OPTION
from hpc_rl.config.rules.teacher_rules import VARIABLES
from hpc_rl.config.schedule import (
    compute_learning_rate,
    count_critic_updates_per_step,
    count_updates_per_step,
    count_warmup,
)
from hpc_rl.core.algorithms import ALGORITHMS, AlgorithmRow
from hpc_rl.plan.containers import PYTHONS
from hpc_rl.plan.schema import Unit
from hpc_rl.render.hooks import EVENTS
from hpc_rl.render.slurm_options import SLURM_OPTIONS

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {
    name: hint
    for cls in CONFIGS.values()
    for name, hint in list_options(cls).items()
    if not find_section(hint)
}
FLAGGED = {  # section -> options that become flags of a server
    "sglang": {one for table in sglang_versions.FLAGS.values() for one in table},
    "vllm": {one for table in vllm_versions.FLAGS.values() for one in table},
}
LOCAL_NAMES = {  # what code calls a section where not by its own name
    "train_dataset": {"dataset"},
    "valid_dataset": {"dataset"},
    "actor": {"config", "model"},
    "model": {"config"},
    "ref": {"config", "model"},
    "critic": {"config", "model"},
    "optimizer": {"config"},
    "reward_norm": {"norm", "value"},
    "adv_norm": {"norm", "value"},
    "rollout_correction": {"section"},
    "gconfig": {"_gconfig"},
    "eval_gconfig": {"_gconfig", "gconfig", "own"},
    "embedded": {"config"},
    "environments": {"section"},
    "sglang": {"own"},
    "vllm": {"own"},
    "wandb": {"settings"},
    "swanlab": {"settings"},
    "mlflow": {"settings"},
    "trackio": {"settings"},
    "keep_best": {"keep"},
    "evaluator": {"options"},
    "NAME": {"pool", "one"},
    "distillation": {"section"},
    "teacher": {"_options"},
    "judge": {"_options"},
    "": {"config"},
}
# pattern -> why no role reads it: a rule holds it to the one value that is possible, or loading acts on it
ONLY_RULES = {
    r"cluster\.cluster_name": "names a profile, which load reads",
    r"cluster\.node_dirs": "where files may be that this machine lacks (container_rules)",
    r"launcher\.snapshot": "files that a submission copies (config/snapshot.py)",
    r"(train|valid)_dataset\.type": "must be the trainer's (consistency.datasets)",
    r"train_dataset\.sequences_per_rank": "gives batch_size its default (generation_rules.adapted)",
    r"actor\.(importance_sampling_level|use_sapo_loss)": "selects the algorithm (algorithm_rules)",
    r"valid_dataset\.(batch_size|sequences_per_rank|shuffle|drop_last|pin_memory)": "noted: held-out rows are used once, in order",
    r"rollout\.consumer_batch_size": "must equal train_dataset.batch_size (generation_rules.rollout)",
    r"actor\.(group_size|temperature|max_new_tokens)": "must equal gconfig's",
    r"actor\.(reward|adv)_norm\.group_size": "must equal gconfig.n_samples (training_rules)",
    r"stats_logger\.(wandb\.wandb_api_key|swanlab\.api_key)": "refused when set (consistency)",
    r"(actor|critic|model|ref)\.backend": "names the engine, as allocation_mode does (engine_rules, train_mesh)",
    r"(actor|critic|model|ref)\.optimizer\.type": "adam, or empty where nothing is trained",
}


def list_own_options(row: AlgorithmRow) -> list[str]:
    """Return the options of an algorithm, which trainers/algorithm_options.py reads by name."""
    return [field.name for field in fields(resolve_name(row.path).options)]


READERS = (  # what roles and the plan read through
    *(
        find_last_step,
        find_teacher_pool,
        has_own_prompts,
        PromptDatasetConfig.parts.fget,
        PromptDatasetConfig.shares.fget,
        count_warmup,
        compute_learning_rate,
        count_updates_per_step,
        count_critic_updates_per_step,
        view_pool,
        make_set_config,
        choose_allocation,
    ),
    InferenceEngineConfig.reward_functions.fget,
)
# pattern -> a dict of the product that has each such option's name as a key or value, for getattr
BY_NAME = {
    r"(?:actor|distillation)\.(\w+)": {name for row in ALGORITHMS.values() for name in list_own_options(row)},
    r"teacher\.templates\.(\w+)": VARIABLES,
    r"evaluator\.sets\.NAME\.(\w+)": held_out.SAMPLING,
    r"launcher\.hooks\.(\w+)": EVENTS,
    r"launcher\.(\w+)": stored.VARIABLES,
    r"launcher\.slurm\.(\w+)": {name.replace("-", "_") for names in SLURM_OPTIONS.values() for name in names},
    r"launcher\.slurm\.srun_args\.(\w+)": get_args(get_type_hints(Unit)["role"]),
    r"launcher\.slurm\.(\w+_image)": OPTION.values(),
    r"launcher\.slurm\.(\w+_image_python)": PYTHONS.values(),
}


@cache
def find_reads() -> dict[str, set[str]]:
    """Attribute name -> what it is read of: the last name before it."""
    found = defaultdict(set)
    for tree in _parse_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of = node.value
                found[node.attr].add(
                    of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
                )
    return found


@cache
def find_own_names() -> set[str]:
    """Attributes and methods of the product's other classes."""
    found = set()
    for tree in _parse_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
    return found


@cache
def _parse_sources() -> list[ast.AST]:
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[1] != "config"]
    readers = [ast.parse(dedent(inspect.getsource(function))) for function in READERS]
    return [*map(parse_source, files), *readers]


@cache
def load_templates() -> str:
    return "\n".join(
        path.read_text() for folder in ("sbatch", "templates") for path in (ROOT / folder).rglob("*.j2")
    )


@cache
def find_owners() -> dict[str, set[type]]:
    """Option's last name -> the classes that declare it."""
    found = defaultdict(set)

    def walk(cls: type) -> None:
        for name, hint in list_hints(cls).items():
            found[name].add(
                next(base for base in reversed(cls.__mro__) if name in inspect.get_annotations(base))
            )
            if find_section(hint):
                walk(find_section(hint))

    for cls in CONFIGS.values():
        walk(cls)
    return found


def is_read(name: str) -> bool:
    *sections, leaf = name.split(".")
    section = sections[-1] if sections else ""
    if any(
        (found := re.fullmatch(pattern, name)) and found[1] in known for pattern, known in BY_NAME.items()
    ):
        return True
    if section in FLAGGED and leaf in FLAGGED[section]:
        return True
    if name.startswith("launcher.slurm.servers.") and f"launcher.slurm.{leaf}" in OPTIONS:
        return is_read(f"launcher.slurm.{leaf}")  # render/layouts.py lays the section over launcher.slurm
    if section == "slurm" and re.search(rf"\bslurm\.{leaf}\b", load_templates()):
        return True
    if len(find_owners()[leaf]) == 1 and leaf not in find_own_names():
        return bool(find_reads()[leaf])
    return bool(find_reads()[leaf] & {section, *LOCAL_NAMES.get(section, set())})


def is_explained(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in ONLY_RULES)


def test_every_option_is_read_or_explained():
    unread = [name for name in OPTIONS if not (is_read(name) or is_explained(name))]
    assert not unread, "nothing reads these: build them, refuse them, or take them out"


def test_the_explanations_are_needed():
    for pattern in ONLY_RULES:
        matching = [name for name in OPTIONS if re.fullmatch(pattern, name)]
        assert matching, pattern
        assert any(not is_read(name) for name in matching), f"{pattern}: all of these are read"


def test_an_option_that_nobody_reads_would_be_found(monkeypatch):
    monkeypatch.setitem(find_owners(), "no_such_option", {object})
    assert not is_read("actor.no_such_option")
    assert not is_explained("actor.no_such_option")
    monkeypatch.setitem(find_owners(), "path", {object, int})
    assert not is_read("saver.path")  # others have a path, this section would not
