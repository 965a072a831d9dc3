"""The table of built-in workflows, and loading of the user's by import path.

A new one also needs its name in BUILT_IN and its options in WORKFLOW_ARGS (config/rules/generation_rules.py).
"""

import functools
import inspect
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.types import TrajectoryGroup
from hpc_rl.rollout.agent.workflow import AgentWorkflow
from hpc_rl.rollout.multi_turn import MultiTurn
from hpc_rl.rollout.rewards import import_object
from hpc_rl.rollout.teacher.teaching import TeacherWorkflow
from hpc_rl.rollout.user_errors import MISTAKES, Raised
from hpc_rl.rollout.workflow import Sampler, Workflow, trajectory


async def single_turn(prompt: dict[str, Any], generate: Sampler) -> TrajectoryGroup | None:
    """n_samples completions of the prompt, each scored."""
    ids = prompt["input_ids"]
    turns = await generate.samples(ids)
    texts = [generate.tokenizer.decode(turn.output_ids) for turn in turns]
    rewards = await generate.rewards(prompt, texts)
    scored = zip(turns, rewards, strict=True)
    return TrajectoryGroup(generate.index, [trajectory([(ids, turn)], reward) for turn, reward in scored])


# the objects that an import path would name
WORKFLOWS: dict[str, Any] = {
    "single_turn": single_turn,
    "multi_turn": MultiTurn,
    "teacher": TeacherWorkflow,
    "agent": AgentWorkflow,
}


def load_workflow(config: GRPOConfig) -> Workflow:
    """Return `rollout.workflow`, built-in or the user's. Raises ConfigError.

    A class is instantiated by its `create(config)`, or else by itself, in both cases with
    `rollout.workflow_args`.
    """
    option, path, args = "rollout.workflow", config.rollout.workflow, config.rollout.workflow_args
    workflow = WORKFLOWS[path] if path in WORKFLOWS else import_object(option, path)
    if isinstance(workflow, type):
        create = getattr(workflow, "create", None)
        make = functools.partial(create, config) if create else workflow
        signature = inspect.signature(make)
        if path in WORKFLOWS:  # other arguments belong to AReaL's workflows, and a note reports them
            args = {name: value for name, value in args.items() if name in signature.parameters}
        try:
            signature.bind(**args)
        except TypeError as error:
            made_by = f"{path}.create" if create else path
            why = f"do not fit the parameters of {made_by}: {error}"
            raise ConfigError(
                Refusal(option="rollout.workflow_args", kind=Kind.CONFLICT, why=why, related=(option,))
            ) from error
        try:
            workflow = make(**args)
        except MISTAKES as error:
            why = f"can't be created, because it raised {Raised.from_error(error).text}"
            raise ConfigError(Refusal(option=option, value=path, kind=Kind.FILE, why=why)) from error
    elif args and path not in WORKFLOWS:
        why, use = f"can't be passed to {path}, which is not a class", "make it a class, or remove them"
        raise ConfigError(
            Refusal(option="rollout.workflow_args", kind=Kind.CONFLICT, why=why, use=use, related=(option,))
        )
    run = getattr(workflow, "run", workflow)
    if not callable(run):
        allowed = "a function, or an object with a method `async run(prompt, generate)`"
        raise ConfigError(Refusal(option=option, value=repr(path), kind=Kind.FILE, why=f"must be {allowed}"))
    return run
