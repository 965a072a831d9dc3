"""Rules about trials without a trainer, which generate, evaluate or serve."""

from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import GRPOConfig, has_trainer
from hpc_rl.core.refusal import Kind, Refusal


def check_purpose(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse options that a trial without a trainer can't have."""
    purpose, related = config.purpose, ("purpose",)
    if config.keep_best_samples is not None and purpose != "generate":
        why, use = f"has no effect with purpose {purpose}", "use `hpc-rl generate`, or remove it"
        yield Refusal(option="keep_best_samples", kind=Kind.NO_EFFECT, why=why, use=use, related=related)
    elif (config.keep_best_samples or 0) > config.gconfig.n_samples:
        why = f"must not exceed gconfig.n_samples {config.gconfig.n_samples}"
        yield Refusal(
            option="keep_best_samples",
            value=config.keep_best_samples,
            kind=Kind.VALUE,
            why=why,
            related=("gconfig.n_samples",),
        )
    if has_trainer(config):
        return
    if purpose == "evaluate" and config.valid_dataset is None:
        why, use = "is null, and purpose evaluate needs it", "set valid_dataset.path to the file of the data"
        yield Refusal(option="valid_dataset", kind=Kind.MISSING, why=why, use=use, related=related)
    layout = config.launcher.slurm.layout
    wrong = {
        "environments": (config.environments is not None, "set", "set environments=null"),
        "actor.init_from_scratch": (config.actor.init_from_scratch, "true", "give a model with weights"),
        "actor.use_lora": (config.actor.use_lora, "true", "use the merged model, with actor.use_lora=false"),
        "callbacks": (bool(config.callbacks), ",".join(config.callbacks), "remove them"),
        "launcher.slurm.layout": (layout != "allocation", layout, "use layout allocation"),
    }
    for option, (is_wrong, value, use) in wrong.items():
        if is_wrong:
            why = f"can't be used with purpose {purpose}, which has no trainer"
            yield Refusal(option=option, value=value, kind=Kind.CONFLICT, why=why, use=use, related=related)


GRPO_RULES = [check_purpose]
