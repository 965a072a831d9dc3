"""ScoredGroup: an environment's message in the form of Atropos; and files of groups for people to read."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.rollout.conversation import Conversation

NO_LOSS = -100  # in `masks`, for tokens that the model did not make
NO_LOGPROB = 1.0  # in `inference_logprobs`, for the same tokens


@dataclass(kw_only=True)
class ScoredGroup:
    """Episodes of one task with their scores; s sequences of t tokens.

    Raises ValueError for groups that no trainer can use.
    """

    tokens: list[list[int]]  # [s][t]
    masks: list[list[int]]  # [s][t]: the token, or NO_LOSS if the model did not make it
    scores: list[float]  # [s]
    inference_logprobs: list[list[float]] | None = None  # [s][t]
    advantages: list[list[float]] | None = None  # [s][t]
    ref_logprobs: list[list[float]] | None = None  # [s][t]
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None  # one for each sequence
    group_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num = len(self.tokens)
        for name in ("masks", "scores", "inference_logprobs", "advantages", "ref_logprobs", "overrides"):
            values = getattr(self, name)
            if values and len(values) != num:
                raise ValueError(f"{name} has {len(values)} entries, but tokens has {num}")
        for name in ("masks", "inference_logprobs", "advantages", "ref_logprobs"):
            for number, (ids, values) in enumerate(zip(self.tokens, getattr(self, name) or (), strict=False)):
                if len(values) != len(ids):
                    raise ValueError(f"{name}[{number}] has {len(values)} entries for {len(ids)} tokens")
        if not all(math.isfinite(score) for score in self.scores):
            raise ValueError(f"scores must be finite, got {self.scores}")

    @property
    def has_equal_scores(self) -> bool:
        return len(set(self.scores)) <= 1

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the protocol, without absent fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def make_group(
    episodes: Sequence[tuple[Conversation, float]], include_messages: bool, sampling: dict[str, Any]
) -> ScoredGroup:
    """Return the group of finished conversations and their scores."""
    tokens, masks, logprobs = [], [], []
    for conversation, _ in episodes:
        ids: list[int] = []
        mask: list[int] = []
        made: list[float] = []
        for context, turn in conversation.turns:
            ids += [*context, *turn.output_ids]
            mask += [*[NO_LOSS] * len(context), *turn.output_ids]
            made += [*[NO_LOGPROB] * len(context), *turn.output_logprobs]
        tokens.append(ids)
        masks.append(mask)
        logprobs.append(made)
    return ScoredGroup(
        tokens=tokens,
        masks=masks,
        scores=[float(score) for _, score in episodes],
        inference_logprobs=logprobs,
        messages=[conversation.messages for conversation, _ in episodes] if include_messages else None,
        generation_params=sampling,
    )


class GroupFile:
    """Groups as JSON lines in a new file, and an HTML page next to it.

    Args:
        path: Path of the JSON lines; if it exists, `_1`, `_2` … is added to its name.
        decode: Returns the text of token ids.
    """

    def __init__(self, path: Path, decode: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, number = path, 0
        while True:
            try:
                self._file = self.path.open("x")
                break
            except FileExistsError:
                number += 1
                self.path = path.with_name(f"{path.stem}_{number}{path.suffix}")
        self._decode = decode

    def add(self, group: ScoredGroup, **facts: Any) -> None:
        """Write one group, with facts about it such as `env_id` and `step`."""
        texts = [self._decode(ids, skip_special_tokens=False) for ids in group.tokens]
        self._file.write(json.dumps({**group.payload(), **facts, "texts": texts}) + "\n")
        self._file.flush()

    def close(self) -> Path:
        """Write the page; return its path."""
        self._file.close()
        page = self.path.with_suffix(".html")
        with self.path.open() as lines:
            page.write_text(render_html(self.path.name, (json.loads(line) for line in lines)))
        return page


def render_html(title: str, groups: Any) -> str:
    """Return one page with groups, their texts and scores; it loads nothing from elsewhere."""
    parts = [HEAD.replace("TITLE", html.escape(title))]
    for number, group in enumerate(groups):
        scores = group["scores"]
        mean = sum(scores) / max(1, len(scores))
        parts.append(
            f"<details {'open' if number == 0 else ''}><summary>group {number}: mean score {mean:.3g}"
        )
        parts.append("</summary>")
        for ids, mask, text, score in zip(
            group["tokens"], group["masks"], group["texts"], scores, strict=True
        ):
            num_made = sum(entry != NO_LOSS for entry in mask)
            parts.append(
                f"<h3>score {score:.3g}, {len(ids)} tokens, {num_made} of them made by the model</h3>"
                f"<pre>{html.escape(text)}</pre>"
            )
        parts.append("</details>")
    return "\n".join(parts) + "\n</body></html>\n"


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .75rem }
summary { cursor: pointer; font-weight: 600; padding: .25rem 0 }
h3 { font-size: 1rem; margin: .75rem 0 .25rem }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } pre { background: #222 } }
</style></head><body><h1>TITLE</h1>"""
