"""Rules about options that say one thing twice, or that have an effect only together with another."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from hpc_rl.config.sections.experiment import ABSENT, Config, GRPOConfig, value_of
from hpc_rl.config.sections.inference import SGLangConfig
from hpc_rl.config.tables.sglang_versions import ALSO, DROPPED, FLAGS, SET_BY_THE_TRIAL

_SECTIONS = ("saver", "evaluator", "recover", "stats_logger", "rollout", "actor", "ref", "model")
_ROOTS = {"experiment_name": "experiment_name", "trial_name": "trial_name", "fileroot": "cluster.fileroot"}


def identity(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """AReaL repeats experiment, trial and fileroot in most sections; a trial has one of each."""
    for section in _SECTIONS:
        for name, root in _ROOTS.items():
            value, expected = value_of(config, f"{section}.{name}"), value_of(config, root)
            if value not in (ABSENT, None, "", expected):
                yield f"{section}.{name} {value} must equal {root} {expected}; leave it out, it follows."


def consumer(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """One batch size, and a queue that can hold a batch."""
    if not isinstance(config, GRPOConfig):
        return
    rollout, batch_size = config.rollout, config.train_dataset.batch_size
    if rollout.consumer_batch_size not in (None, batch_size):
        yield (
            f"rollout.consumer_batch_size {rollout.consumer_batch_size} must equal train_dataset.batch_size {batch_size}; "
            "leave it out, it follows."
        )
    if rollout.queue_size is not None and rollout.queue_size < batch_size:
        yield f"rollout.queue_size {rollout.queue_size} can't hold a batch: train_dataset.batch_size is {batch_size}."


def servers(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Options of generation that only some servers have."""
    if not isinstance(config, GRPOConfig):
        usual = SGLangConfig()  # said at its default, as `config show` prints it, an option changes nothing
        named = sorted(name for name in explicit if name.startswith("sglang."))
        named = [name for name in named if value_of(config, name) != getattr(usual, name.rpartition(".")[2])]
        if named:
            yield f"{named[0]} has no effect: a {config.trainer} trial has no generation servers; leave the section sglang out."
        return
    g, sglang = config.gconfig, config.sglang
    if sglang.model_path not in ("", config.actor.path):
        yield f"sglang.model_path {sglang.model_path} must equal actor.path {config.actor.path}; leave it out, it follows."
    for name, why in DROPPED.get(sglang.version, {}).items():
        value = getattr(sglang, name)
        if value:
            yield f"sglang.{name} {str(value).lower()} can't be used: SGLang {sglang.version} has no such option; {why}."
    yield from _sglang_extra_args(sglang)
    if g.stop and sglang.skip_tokenizer_init:
        yield "gconfig.stop needs the server's tokenizer: set sglang.skip_tokenizer_init to false, or use gconfig.stop_token_ids."
    if is_embedded(config):
        neutral: dict[str, tuple] = {
            "stop": (None, []),
            "frequency_penalty": (0.0,),
            "min_p": (0.0,),
            "repetition_penalty": (1.0,),
        }
        for name, values in neutral.items():
            if getattr(g, name) not in values:
                instead = (
                    "use gconfig.stop_token_ids, or sglang servers"
                    if name == "stop"
                    else "use sglang servers"
                )
                yield f"gconfig.{name} {getattr(g, name)} can't be used with embedded servers; {instead}."


def _sglang_extra_args(sglang: SGLangConfig) -> Iterator[str]:
    """No flag that the trial or an option of the section gives already: the later one would win."""
    named = {flag: name for name, flag in FLAGS[sglang.version].items() if isinstance(flag, str)}
    for word in sglang.extra_args:
        came = word.partition("=")[0]
        flag = ALSO.get(came, came)
        name = named.get(flag)
        if flag in SET_BY_THE_TRIAL or (name and not hasattr(sglang, name)) or name == "model_path":
            yield f"sglang.extra_args: {came} is derived from the plan and can't be given."
        elif name and getattr(sglang, name) not in (None, False):
            yield f"sglang.extra_args: {came} has an option of its own: sglang.{name}."


def is_embedded(config: Config) -> bool:
    """Whether the trial's servers are embedded ones; an empty allocation without GPUs becomes that."""
    mode = config.allocation_mode.strip()
    return mode.startswith("embedded") or (not mode and not config.cluster.n_gpus_per_node)


def loading(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Options of the datasets that need a GPU."""
    if config.train_dataset.pin_memory and not config.cluster.n_gpus_per_node:
        yield "train_dataset.pin_memory has no effect without GPUs (cluster.n_gpus_per_node 0); leave it out."


def idle_notes(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What was written and changes nothing in this trial; files of AReaL's say it all the same."""
    idle = [
        name
        for name in ("batch_size", "shuffle", "drop_last", "pin_memory")
        if f"valid_dataset.{name}" in explicit
    ]
    if idle and config.valid_dataset is not None:
        yield f"valid_dataset.{', '.join(idle)}: no effect: an evaluation takes every held-out row once, in their order."
    if isinstance(config, GRPOConfig):
        unused = "sglang" if is_embedded(config) else "embedded"
        if any(name.startswith(f"{unused}.") for name in explicit):
            yield f"{unused} has no effect: the trial's servers are {'embedded' if unused == 'sglang' else 'sglang'} ones."
        return
    roles = [
        name
        for name in sorted(explicit)
        if name.startswith(("launcher.rollout_", "launcher.inference_server_"))
    ]
    if roles:
        yield f"{', '.join(roles)}: no effect: a {config.trainer} trial has a trainer only."


METRICS = {  # trainer -> the numbers of its evaluations; the first is the default of saver.keep_best.metric
    "grpo": ("eval_reward",),
    "sft": ("eval_loss",),
    "rw": ("eval_loss", "eval_accuracy"),
}


def best(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """The best model is told by an evaluation that there is."""
    keep = config.saver.keep_best
    if config.recover.keep_best and config.valid_dataset is None:
        yield "recover.keep_best has no effect without valid_dataset: nothing is evaluated."
    if keep is None:
        return
    if config.valid_dataset is None:
        yield "saver.keep_best has no effect without valid_dataset: nothing is evaluated."
    allowed = METRICS[config.trainer or "grpo"]  # load fills it in
    if keep.metric is not None and keep.metric not in allowed:
        yield f"saver.keep_best.metric {keep.metric} is not measured in a {config.trainer} trial; allowed: {', '.join(allowed)}."


_OURS = {
    "-K": "--kill-on-bad-exit", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-w": "--nodelist",
    "-m": "--distribution", "-o": "--output", "-e": "--error", "-i": "--input", "-J": "--job-name", "-D": "--chdir",
    "-W": "--wait", "-k": "--no-kill",
}  # fmt: skip
_DERIVED = {
    *_OURS.values(), "--ntasks-per-node", "--exact", "--overlap", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--gpus-per-node",
    "--gpus-per-task", "--gpus", "--export", "--open-mode", "--label", "--unbuffered", "--het-group", "--multi-prog", "--pty",
}  # fmt: skip


def srun_options(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """`launcher.slurm.srun_additional_args`: each an option of srun, none that the plan decides."""
    name, text = "launcher.slurm.srun_additional_args", config.launcher.slurm.srun_additional_args
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield f"{name}: {text!r} can't be split into words: {error}."
        return
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if not word.startswith("-"):
            yield f"{name}: {word!r} is no option; write a value with its option: --name=value."
        elif option.startswith(("--container-", "--no-container-")):
            yield f"{name}: {option}: name images in launcher.slurm.trainer_image and its like, the rest in container_args."
        elif "$" in word:
            yield f"{name}: {word!r}: variables are not expanded; write the value."
        elif option in _OURS or option in _DERIVED:
            yield f"{name}: {option} is derived from the plan and can't be given."


RULES = [identity, consumer, servers, loading, best, srun_options]
