"""The inside of an executor worker: runs workflows for the rollout service (pipes.py)."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from typing import Any

from hpc_rl.config.held_out import find_sampling
from hpc_rl.config.options.experiment import GRPOConfig, has_trainer
from hpc_rl.core.errors import EndpointUnavailable, InputRefused
from hpc_rl.core.log import redact
from hpc_rl.core.types import TrajectoryGroup, WeightVersion, encode
from hpc_rl.rollout import pipes
from hpc_rl.rollout.batch_log.ledger import GroupRecord, RejectReason
from hpc_rl.rollout.distillation import Teacher, TextSource
from hpc_rl.rollout.pipes import (
    GroupMade,
    LoopBlocked,
    NoGroup,
    NoteKept,
    NoteMade,
    Outcome,
    PromptScored,
    RunPrompt,
)
from hpc_rl.rollout.rewards import BatchReward, Rejection, check_number
from hpc_rl.rollout.server_pool import ChatPool, ServerPool
from hpc_rl.rollout.user_errors import OF_REWARD, Raised
from hpc_rl.rollout.workflow import Sampler, Workflow, check_group
from hpc_rl.rollout.workflows import WORKFLOWS
from hpc_rl.stats.kept_samples import shorten_columns
from hpc_rl.stats.tracker import compute_means

logger = logging.getLogger(__name__)


class Worker:
    """Runs a workflow on each prompt that it receives; `write` takes a message for the rollout service.

    `pool` follows the trainer, `others` and `source` are as in Sampler, `vocab_size` is the model's number of
    token ids. `teacher` scores the trajectories of training. `evaluated` has the servers that only evaluate,
    if there are any.
    """

    def __init__(
        self,
        config: GRPOConfig,
        pool: ServerPool,
        others: Mapping[str, ChatPool],
        workflow: Workflow,
        rewards: BatchReward,
        write: Callable[[bytes], Any],
        vocab_size: int,
        teacher: Teacher | None = None,
        source: ServerPool | TextSource | None = None,
        evaluated: ServerPool | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.workflow = workflow
        sampler = partial(Sampler, seed=config.seed, others=others, rewards=rewards)
        self._sampler = partial(sampler, n_samples=config.gconfig.n_samples, pool=pool, source=source)
        self._teacher = teacher
        is_exact = has_trainer(config) and not config.evaluator.blocking
        self._held_out_samplers = {}
        for name in ("", *config.evaluator.sets):
            own, section = find_sampling(config, name)
            sampled = (evaluated or pool).copy_with_sampling(own, section, is_exact)
            sampled.name = pool.name  # as workflows know it
            self._held_out_samplers[name] = partial(sampler, n_samples=own.n_samples, pool=sampled)
        self._write = write
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._raised: Counter[str] = Counter()  # exceptions of user code, by place
        self._noting: dict[tuple[int, str], asyncio.Future[bytes]] = {}  # by ticket and key

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer until the pipe ends."""
        self._write(pipes.pack({"op": "ready"}))
        while (request := await pipes.receive_frame(reader)) is not None:
            if request["op"] == "run":
                self._tasks[request["ticket"]] = asyncio.create_task(self.answer(request))
            elif request["op"] == "kept":
                self.continue_workflow(request)
            elif request["ticket"] in self._tasks:
                self._tasks[request["ticket"]].cancel()

    async def answer(self, prompt: RunPrompt) -> None:
        """Run the workflow and send its outcome."""
        try:
            outcome = await self._obtain_outcome(prompt)
        finally:
            self._tasks.pop(prompt["ticket"], None)
        self._write(pipes.pack(outcome))

    async def _obtain_outcome(self, prompt: RunPrompt) -> Outcome:
        ticket, index = prompt["ticket"], prompt["index"]

        def reject(reason: str, message: str, place: str = "", trace: str = "") -> NoGroup:
            self._log(place, "prompt %d is rejected, %s: %s", index, reason, message)
            which = "held-out prompt" if prompt["evaluate"] else "prompt"
            error = redact(f"{which} {index}: {message}" if reason in OF_REWARD else message)
            return NoGroup(op="rejected", ticket=ticket, reason=reason, error=error, place=place, trace=trace)

        try:
            group = await self._run(prompt)
        except Rejection as error:
            return reject(error.reason, error.message, error.place, error.trace)
        except InputRefused as error:
            # all servers would refuse it: it was not sent to another one
            return reject(RejectReason.REFUSED, f"refused by a server: {error}")
        except EndpointUnavailable as error:
            logger.warning("prompt %d will begin again, because it failed: %s", index, error)
            return NoGroup(op="unavailable", ticket=ticket, reason="", error=redact(str(error)))
        except (Exception, SystemExit) as error:
            # from the user's workflow or a request: the prompt is issued again, a few times
            text, place, trace = Raised.from_error(error, self.workflow)
            self._log(place, "prompt %d failed: %s", index, text)
            reason = RejectReason.EXCEPTION
            return NoGroup(op="failed", ticket=ticket, reason=reason, error=text, place=place, trace=trace)
        if group is None:
            return NoGroup(op="rejected", ticket=ticket, reason=RejectReason.WORKFLOW_NONE, error="")
        if not prompt["evaluate"]:
            return _make_group_frame(group, prompt, kept=self.config.rollout.keep_samples > 0)
        is_first = index < self.config.evaluator.keep_samples and not prompt["held_out_set"]
        return _make_score_frame(group, prompt, kept=is_first or not has_trainer(self.config))

    def _log(self, place: str, form: str, *values: Any, counted: str = "prompts") -> None:
        """Log the outcome of a prompt; for repeated places only the 1st, 2nd, 4th, 8th and so on."""
        self._raised[place] += 1
        count = self._raised[place]
        if not place or count & (count - 1) == 0:
            more = f" ({count} {counted} so far)" if place and count > 1 else ""
            logger.warning(form + more, *values)

    def tell_blocked(self, place: str, trace: str) -> None:
        """Report a call of user code that blocks the event loop; empty texts report its return."""
        if place:
            form = "%s blocks this rollout worker (use await or a thread), so all its prompts wait:\n%s"
            self._log(f"blocked {place}", form, place, trace, counted="times")
        self._write(pipes.pack(LoopBlocked(op="blocked", place=place, trace=trace)))

    def continue_workflow(self, frame: NoteKept) -> None:
        """Let the workflow that made a note continue."""
        waiting = self._noting.get((frame["ticket"], frame["key"]))
        if waiting is not None and not waiting.done():
            waiting.set_result(frame["value"])

    async def _note(self, prompt: RunPrompt, key: str, value: bytes) -> bytes:
        """Return the stored value; an evaluation stores nothing."""
        if prompt["evaluate"]:
            return value
        ticket, index, version = prompt["ticket"], prompt["index"], prompt["version"]
        waiting = self._noting[ticket, key] = asyncio.get_running_loop().create_future()
        note = NoteMade(op="note", ticket=ticket, index=index, version=version, key=key, value=value)
        try:
            self._write(pipes.pack(note))
            return await waiting
        finally:
            del self._noting[ticket, key]

    async def _run(self, prompt: RunPrompt) -> TrajectoryGroup | None:
        """Return the group of a prompt, checked and scored, or None if the workflow makes none."""
        make_sampler = self._sampler
        if prompt["evaluate"]:
            make_sampler = self._held_out_samplers[prompt["held_out_set"]]
        sampler = make_sampler(prompt, note=partial(self._note, prompt))
        group = await self.workflow({**prompt["columns"], "input_ids": prompt["input_ids"]}, sampler)
        if group is None:
            return None
        # an agent may lose episodes, and an episode may give several sequences
        fixed = self.config.rollout.workflow in WORKFLOWS.keys() - {"agent"}
        strict = self.config.rollout.check_trajectory_format
        check_group(group, prompt["index"], self.vocab_size, sampler.n_samples if fixed else None, strict)
        # a workflow may set the reward itself
        for trajectory in group.trajectories:
            trajectory.reward = check_number(trajectory.reward)
        if self._teacher is not None and not prompt["evaluate"]:
            await self._teacher.score(group, prompt)
        return group if group.trajectories else None


def _make_group_frame(group: TrajectoryGroup, prompt: RunPrompt, kept: bool) -> GroupMade:
    group.index = prompt["index"]
    if kept:
        group.columns, group.shortened = shorten_columns(prompt["columns"])
    else:
        for one in group.trajectories:
            one.output = ""
    record = GroupRecord.from_group(group, WeightVersion.parse(prompt["version"]).step)
    return GroupMade(
        op="group",
        ticket=prompt["ticket"],
        record=list(astuple(record)),
        newest_lineage=max(group.lineages(), default=0),
        group=encode(group),
    )


def _make_score_frame(group: TrajectoryGroup, prompt: RunPrompt, kept: bool) -> PromptScored:
    group.index = prompt["index"]
    if kept:
        group.columns, group.shortened = shorten_columns(prompt["columns"])
    trained = [(t.lineages[t.loss_mask], t.steps[t.loss_mask]) for t in group.trajectories]
    versions = {WeightVersion(int(a), int(b)) for pair in trained for a, b in zip(*pair, strict=True)}
    return PromptScored(
        op="scored",
        ticket=prompt["ticket"],
        rewards=[t.reward for t in group.trajectories],
        num_tokens=sum(int(t.loss_mask.sum()) for t in group.trajectories),
        versions=[str(version) for version in sorted(versions)],
        stats=compute_means(t.stats for t in group.trajectories),
        group=encode(group) if kept else b"",
    )
