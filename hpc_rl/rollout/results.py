"""The results of a trial without a trainer, as files: the completions, and their mean reward."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import SCORES, fsync_dir, write_json
from hpc_rl.core.types import Trajectory
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.evaluation import measure_rewards
from hpc_rl.rollout.single_pass import SinglePass
from hpc_rl.stats.tracker import compute_means

COMPLETIONS = "completions.jsonl"


def write_results(
    folder: Path,
    made: SinglePass,
    tokenizer: Tokenizer,
    pass_reward: float,
    sets_column: str | None = None,
    num_kept: int | None = None,
    set_pass_rewards: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Write the files of a finished pass, and return the scores, which are written last.

    Of each prompt the `num_kept` completions of the highest reward are written, None for all. `sets_column`
    is of valid_dataset, `set_pass_rewards` has the reward of a pass in each further set. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rewards, stats = defaultdict[str, list[list[float]]](list), defaultdict[str, list[dict[str, float]]](list)
    of_column = defaultdict[str, list[list[float]]](list)
    temporary = folder / f".{COMPLETIONS}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        for index, group in made.list_groups():
            name, prompt, every = made.find_set(index), made.find_prompt(index), group.trajectories
            own = [one.reward for one in every]
            rewards[name].append(own)
            stats[name].append(compute_means(one.stats for one in every))
            if sets_column is not None and not name:
                of_column[str(prompt.columns.get(sets_column, ""))].append(own)
            best = sorted(range(len(every)), key=lambda number: -every[number].reward)
            for number in best[:num_kept] if num_kept else range(len(every)):
                about = {**prompt.columns, "index": index, "row": prompt.row, "sample": number}
                if set_pass_rewards:
                    about["set"] = name
                row = about | describe_completion(every[number], tokenizer)
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / COMPLETIONS)
    fsync_dir(folder)
    scores: dict[str, Any] = {
        "prompts": sum(map(len, rewards.values())),
        "left_out": dict(made.rejections),
        "completions": sum(len(own) for one in rewards.values() for own in one),
    }
    for name, one in sorted(rewards.items()):
        passes = (set_pass_rewards or {}).get(name, pass_reward)
        measures = measure_rewards(one, passes) | compute_means(stats[name])
        scores |= {f"{name}/{measure}" if name else measure: value for measure, value in measures.items()}
    for name, one in sorted(of_column.items()):
        scores |= {f"{name}/{key}": value for key, value in measure_rewards(one, pass_reward).items()}
    write_json(folder / SCORES, scores)
    return scores


def describe_completion(one: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the columns of a completion; its text begins with the model's first token."""
    first = int(one.loss_mask.argmax()) if one.loss_mask.any() else len(one.ids)
    return {
        "completion": tokenizer.decode(one.ids[first:].tolist()),
        "reward": float(one.reward),
        "finish_reason": one.finish_reason,
        "num_tokens": int(one.loss_mask.sum()),
    }
