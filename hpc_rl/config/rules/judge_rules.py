"""Rules about `rollout.judge`: its pool and its template."""

from collections.abc import Collection, Iterator

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.teacher_rules import check_template_columns
from hpc_rl.config.text_templates import list_names

VARIABLES = ("question", "completion")


def check_judge(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    found, is_used = config.rollout.judge, "judge" in config.rollout.reward_functions
    if found is None:
        if is_used:
            yield "rollout.reward_fn judge needs the section rollout.judge; set rollout.judge.pool."
        return
    if not is_used:
        scores = f"rollout.reward_fn is {config.rollout.reward_fn}"
        yield f"rollout.judge has no effect: {scores}; set rollout.reward_fn judge, or remove the section."
    if found.pool not in config.pools:
        known = f"there are: {', '.join(config.pools) or 'none'}"
        hint = suggest_name(found.pool, config.pools)
        yield f"rollout.judge.pool {found.pool!r} is not a pool of section pools; {known}. {hint}".rstrip()
    if "completion" not in list_names(found.template):
        yield "rollout.judge.template has no {completion}: write it where that belongs."
    if not found.temperatures:
        yield "rollout.judge.temperatures is empty, so no score is asked for; use at least one, such as 0.2."


GRPO_RULES = [check_judge]


def check_columns(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if isinstance(config, GRPOConfig) and config.rollout.judge is not None:
        template = config.rollout.judge.template
        yield from check_template_columns(config, "rollout.judge.template", template, VARIABLES)


FILE_RULES = [check_columns]
