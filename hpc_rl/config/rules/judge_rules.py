"""Rules about `rollout.judge`: its pool and its template."""

from collections.abc import Collection, Iterator

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.teacher_rules import check_template_columns
from hpc_rl.config.text_templates import list_names
from hpc_rl.core.refusal import Kind, Refusal

VARIABLES = ("question", "completion")


def check_judge(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    found, is_used = config.rollout.judge, "judge" in config.rollout.reward_functions
    if found is None:
        if is_used:
            yield Refusal(
                option="rollout.reward_fn",
                value="judge",
                kind=Kind.MISSING,
                why="needs the section rollout.judge",
                use="set rollout.judge.pool",
                related=("rollout.judge", "rollout.judge.pool"),
            )
        return
    if not is_used:
        yield Refusal(
            option="rollout.judge",
            kind=Kind.NO_EFFECT,
            why=f"has no effect: rollout.reward_fn is {config.rollout.reward_fn}",
            use="set rollout.reward_fn judge, or remove the section",
            related=("rollout.reward_fn",),
        )
    if found.pool not in config.pools:
        known = f"there are: {', '.join(config.pools) or 'none'}"
        hint = suggest_name(found.pool, config.pools)
        yield Refusal(
            option="rollout.judge.pool",
            value=repr(found.pool),
            kind=Kind.VALUE,
            why="is not a pool of section pools",
            use=f"{known}. {hint}".rstrip(),
            related=("pools",),
        )
    if "completion" not in list_names(found.template):
        why = "must contain {completion}, in the place where the answer belongs"
        yield Refusal(option="rollout.judge.template", kind=Kind.VALUE, why=why)
    if not found.temperatures:
        why, use = "is empty, so no score is asked for", "give at least one, such as 0.2"
        yield Refusal(option="rollout.judge.temperatures", kind=Kind.VALUE, why=why, use=use)


GRPO_RULES = [check_judge]


def check_columns(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if isinstance(config, GRPOConfig) and config.rollout.judge is not None:
        template = config.rollout.judge.template
        yield from check_template_columns(config, "rollout.judge.template", template, VARIABLES)


FILE_RULES = [check_columns]
