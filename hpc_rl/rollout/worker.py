"""The executor worker's inside: runs workflows for the sequencer, which talks to it in frames over pipes.

In:  {"op": "run", "ticket", "index", "epoch", "row", "columns", "input_ids", "version", "evaluate"};
     {"op": "cancel", "ticket"}.
Out: {"op": "ready"}, or {"op": "ends", "error"} where it can't be; then for each ticket one of
     {"op": "group", "ticket", "oldest_step", "oldest_lineage", "newest_lineage", "num_trajectories", "num_tokens",
      "reward_sum", "group": bytes},
     {"op": "scored", "ticket", "reward", "num_tokens", "versions"}    of an evaluation,
     {"op": "rejected", "ticket", "reason", "error"?}                  the prompt's own fate: not tried again,
     {"op": "failed", "ticket", "error"}                               an exception: tried again a few times.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.errors import InputRefused, RoleFailed, ServerUnavailable
from hpc_rl.rollout import pipes
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards import Rewarder, RewardFailed, checked
from hpc_rl.rollout.workflow import WORKFLOWS, BadGroup, Generate, TooLong, Workflow, check_group, sampling
from hpc_rl.servers.client import GenerateRequest
from hpc_rl.types import TrajectoryGroup, Turn, encode

logger = logging.getLogger(__name__)

UNAVAILABLE_ROUNDS = 4  # with 2, 4, 8, 16 s between them; then the prompt's own retries count


class Client(Protocol):
    """What makes turns: servers.router.Router, or a fake. May also have `generate_many(requests) -> list[Turn]`."""

    async def generate(self, request: GenerateRequest) -> Turn: ...


class Worker:
    """Args:
    config: The trial's.
    tokenizer: For completions.
    client: Where turns come from.
    workflow: What is run for each prompt.
    rewarder: Where rewards come from.
    write: Takes the bytes of a frame for the sequencer.
    context: Tokens that the servers take for input and output together; None where that is not known.
    """

    def __init__(
        self,
        config: GRPOConfig,
        tokenizer: Tokenizer,
        client: Client,
        workflow: Workflow,
        rewarder: Rewarder,
        write: Callable[[bytes], Any],
        context: int | None = None,
    ) -> None:
        self.config = config
        self.context = context
        self.tokenizer = tokenizer
        self.workflow = workflow
        self.rewarder = rewarder
        self._client = client
        self._many = getattr(client, "generate_many", None)
        self._write = write
        self._sampling = sampling(config.gconfig, tokenizer.eos_token_ids)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._prefix = secrets.token_hex(4)
        self._rids = itertools.count()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the pipe ends."""
        self._send({"op": "ready"})
        while (frame := await pipes.read(reader)) is not None:
            if frame["op"] == "run":
                self._tasks[frame["ticket"]] = asyncio.create_task(self._answer(frame))
            elif frame["ticket"] in self._tasks:
                self._tasks[frame["ticket"]].cancel()

    def _send(self, frame: dict[str, Any]) -> None:
        self._write(pipes.pack(frame))

    async def _answer(self, frame: dict[str, Any]) -> None:
        try:
            outcome = await self._run(frame)
        except RewardFailed as error:
            logger.warning("prompt %d: %s", frame["index"], error)
            outcome = {"op": "rejected", "reason": error.reason, "error": str(error)}
        except TooLong as error:
            logger.warning("prompt %d is too long: %s", frame["index"], error)
            outcome = {"op": "rejected", "reason": RejectReason.TOO_LONG, "error": str(error)}
        except BadGroup as error:
            logger.warning("the group is rejected: %s", error)
            outcome = {"op": "rejected", "reason": RejectReason.BAD_GROUP, "error": str(error)}
        except InputRefused as error:  # by every server alike: it was not sent to another one
            logger.warning("prompt %d was refused by a server: %s", frame["index"], error)
            outcome = {
                "op": "rejected",
                "reason": RejectReason.REFUSED,
                "error": f"refused by a server: {error}",
            }
        except (
            Exception
        ) as error:  # of a user's workflow or of a request: the prompt is issued again, with a bound
            logger.warning("prompt %d failed", frame["index"], exc_info=True)
            outcome = {"op": "failed", "error": f"{type(error).__name__}: {error}"}
        finally:
            self._tasks.pop(frame["ticket"], None)
        self._send({**outcome, "ticket": frame["ticket"]})

    async def _run(self, frame: dict[str, Any]) -> dict[str, Any]:
        generate = Generate(
            index=frame["index"],
            identity=(self.config.seed, "evaluation" if frame["evaluate"] else frame["epoch"], frame["row"]),
            gconfig=self.config.gconfig,
            sampling=self._sampling,
            n_samples=1 if frame["evaluate"] else self.config.gconfig.n_samples,
            min_version=frame["version"],
            tokenizer=self.tokenizer,
            rewarder=self.rewarder,
            send=self._generate,
            rid=self._rid,
            context=self.context,
        )
        group = await self.workflow({**frame["columns"], "input_ids": frame["input_ids"]}, generate)
        if group is None:
            return {"op": "rejected", "reason": RejectReason.WORKFLOW_NONE}
        built_in = self.workflow in WORKFLOWS.values()
        strict = self.config.rollout.check_trajectory_format
        check_group(group, frame["index"], generate.n_samples if built_in else None, strict)
        if not group.trajectories:
            return {"op": "rejected", "reason": RejectReason.WORKFLOW_NONE}
        # a workflow may set the reward by itself
        for trajectory in group.trajectories:
            trajectory.reward = checked(trajectory.reward)
        return _scored(group) if frame["evaluate"] else _finished(group, frame["index"])

    async def _generate(self, requests: list[GenerateRequest]) -> list[Turn]:
        if not self.config.rollout.enable_rollout_tracing:
            return await self._send_requests(requests)
        for request in requests:
            numbers = (
                request.rid,
                len(request.input_ids),
                request.sampling["max_new_tokens"],
                request.min_version,
            )
            logger.info("request %s: %d tokens in, at most %d out, weights from %s on", *numbers)
        turns = await self._send_requests(requests)
        for request, turn in zip(requests, turns, strict=True):
            logger.info(
                "request %s: %d tokens out, %s, %s",
                request.rid,
                len(turn.output_ids),
                turn.finish_reason,
                turn.versions,
            )
        return turns

    async def _send_requests(self, requests: list[GenerateRequest]) -> list[Turn]:
        rounds = 0
        while True:
            try:
                if self._many is not None and len(requests) > 1:
                    return await self._many(requests)
                if len(requests) == 1:
                    return [await self._client.generate(requests[0])]
                return await asyncio.gather(*(self._client.generate(request) for request in requests))
            except (
                ServerUnavailable
            ) as error:  # each server that lives failed: may be the prompt's fault after all
                rounds += 1
                if rounds > UNAVAILABLE_ROUNDS:
                    raise
                logger.warning("%s; trying again", error)
                await asyncio.sleep(2.0**rounds)
            except RoleFailed as error:  # no server lives or is new enough: not the prompt's fault
                logger.warning("%s; waiting on", error)
                await asyncio.sleep(1.0)

    def _rid(self) -> str:
        return f"{self._prefix}{next(self._rids):016x}"


def _finished(group: TrajectoryGroup, index: int) -> dict[str, Any]:
    group.index = index
    lineages = [int(lineage) for t in group.trajectories for lineage in np.unique(t.lineages[t.loss_mask])]
    return {
        "op": "group",
        "oldest_step": group.oldest_step(),
        "oldest_lineage": min(lineages, default=0),
        "newest_lineage": max(lineages, default=0),
        "num_trajectories": len(group.trajectories),
        "num_tokens": sum(len(t.ids) for t in group.trajectories),
        "reward_sum": float(sum(t.reward for t in group.trajectories)),
        "group": encode(group),
    }


def _scored(group: TrajectoryGroup) -> dict[str, Any]:
    versions = {
        (int(lineage), int(step))
        for t in group.trajectories
        for lineage, step in zip(t.lineages[t.loss_mask], t.steps[t.loss_mask], strict=True)
    }
    rewards = [t.reward for t in group.trajectories]
    num_tokens = sum(int(t.loss_mask.sum()) for t in group.trajectories)
    labels = [f"{lineage}.{step}" for lineage, step in sorted(versions)]
    return {
        "op": "scored",
        "reward": sum(rewards) / len(rewards),
        "num_tokens": num_tokens,
        "versions": labels,
    }
