"""Where our default departs from the AReaL table, and why. One line per option; a test walks the whole table against this."""

from __future__ import annotations

_IDENTITY = "follows the root: a trial has one identity"
_FOLLOWS = "null follows gconfig: two numbers for one thing can't disagree"

DEPARTURES: dict[str, tuple[str, str]] = {  # option -> (AReaL's default, why)
    "cluster.fileroot": (
        "~/.cache/areal (a temporary directory in the code)",
        "must be on a file system that all nodes share",
    ),
    "cluster.n_nodes": ("32", "a trial that says nothing must not ask for 32 nodes"),
    "rollout.consumer_batch_size": ("1", "null follows train_dataset.batch_size: one batch size"),
    "rollout.schedule_policy": (
        "round_robin",
        "least_loaded: long completions don't pile up on one server; round_robin works too",
    ),
    "rollout.setup_timeout": (
        "120.0",
        "600: a server loads its weights from a shared disk, and compiles, before it answers",
    ),
    "train_dataset.type": ("???", "follows the trainer: rl for grpo, sft for sft, rw for rw"),
    "launcher.slurm.srun_additional_args": (
        "--mpi=pmi2 -K --chdir $PWD",
        "empty: -K would kill the roles before they save, and the plan says the rest",
    ),
    "launcher.slurm.mount": (
        "/storage:/storage",
        "empty: not every site has /storage; the trial's own directories are bound anyway",
    ),
    "actor.path": ("empty", "required: there is nothing to train without it"),
    "model.path": ("empty", "required: there is nothing to train without it"),
    "actor.group_size": ("1", _FOLLOWS),
    "actor.temperature": ("1.0", _FOLLOWS),
    "actor.max_new_tokens": ("1024", _FOLLOWS),
    "actor.reward_norm.group_size": ("1", _FOLLOWS),
    "actor.adv_norm.group_size": ("1", _FOLLOWS),
    "actor.kl_ctl": (
        "0.1",
        "the same, but 0 without a section ref: it has an effect only with a reference model",
    ),
    "actor.experiment_name": ("???", _IDENTITY),
    "actor.trial_name": ("???", _IDENTITY),
    "model.experiment_name": ("???", _IDENTITY),
    "model.trial_name": ("???", _IDENTITY),
    "saver.experiment_name": ("???", _IDENTITY),
    "saver.trial_name": ("???", _IDENTITY),
    "saver.fileroot": ("???", _IDENTITY),
    "evaluator.experiment_name": ("???", _IDENTITY),
    "evaluator.trial_name": ("???", _IDENTITY),
    "evaluator.fileroot": ("???", _IDENTITY),
    "recover.experiment_name": ("???", _IDENTITY),
    "recover.trial_name": ("???", _IDENTITY),
    "recover.fileroot": ("???", _IDENTITY),
    "stats_logger.experiment_name": ("???", _IDENTITY),
    "stats_logger.trial_name": ("???", _IDENTITY),
    "stats_logger.fileroot": ("???", _IDENTITY),
}
