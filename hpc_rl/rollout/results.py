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
) -> dict[str, Any]:
    """Write the files of a finished pass, and return the scores, which are written last.

    Of each prompt the `num_kept` completions of the highest reward are written, None for all. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rewards: dict[int, list[float]] = {}
    stats: list[dict[str, float]] = []
    sets = defaultdict[str, list[list[float]]](list)
    temporary = folder / f".{COMPLETIONS}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        for group in made.list_groups():
            prompt, every = made.find_prompt(group.index), group.trajectories
            rewards[group.index] = own = [one.reward for one in every]
            stats.append(compute_means(one.stats for one in every))
            if sets_column is not None:
                sets[str(prompt.columns.get(sets_column, ""))].append(own)
            best = sorted(range(len(every)), key=lambda number: -every[number].reward)
            for number in best[:num_kept] if num_kept else range(len(every)):
                about = {**prompt.columns, "index": group.index, "row": prompt.row, "sample": number}
                row = about | describe_completion(every[number], tokenizer)
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / COMPLETIONS)
    fsync_dir(folder)
    scores = {
        "prompts": len(rewards),
        "left_out": dict(made.rejections),
        "completions": sum(map(len, rewards.values())),
        **measure_rewards(list(rewards.values()), pass_reward),
        **_measure_sets(sets, pass_reward),
        **compute_means(stats),
    }
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


def _measure_sets(sets: Mapping[str, list[list[float]]], pass_reward: float) -> dict[str, float]:
    """Return `<set>/<measure>` for each value of the column that names sets."""
    return {
        f"{name}/{measure}": value
        for name, rewards in sorted(sets.items())
        for measure, value in measure_rewards(rewards, pass_reward).items()
    }
