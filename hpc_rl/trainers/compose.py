"""Builds a run and its recipe from the configuration, and loads the engine's state."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from hpc_rl import __version__
from hpc_rl.config.load.stored import redact
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import (
    DPOConfig,
    GRPOConfig,
    RWConfig,
    SFTConfig,
    count_steps,
    find_loaded_reference,
    has_own_prompts,
)
from hpc_rl.config.options.training import PPOActorConfig, TrainEngineConfig
from hpc_rl.config.pool_view import EVALUATION_POOL, find_trained_pool, has_evaluation_pool
from hpc_rl.config.schedule import count_critic_updates_per_step, count_updates_per_step
from hpc_rl.core.node_copies import compute_identity
from hpc_rl.core.trial import load_json
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.encode import Encoded, load_encoded, load_preferences, save_encoded
from hpc_rl.datasets.rows import Rows
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.engines import ENGINES
from hpc_rl.engines.base import Engine, FrozenBase, Scorer
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.rollout.batch_prefetch import BatchPrefetch
from hpc_rl.stats.kept_samples import SampleWriter
from hpc_rl.stats.metrics_writers import JsonlWriter, MetricsWriters, RunIdentity, open_writers
from hpc_rl.trainers.activity import Activity
from hpc_rl.trainers.callbacks import Callbacks
from hpc_rl.trainers.critic import Critic
from hpc_rl.trainers.dpo import make_dpo_task
from hpc_rl.trainers.evaluations import EvaluationsBeside
from hpc_rl.trainers.grpo_recipe import GRPO, place_schedule
from hpc_rl.trainers.loop import Recipe
from hpc_rl.trainers.run import Run, find_tokenizer_folder
from hpc_rl.trainers.shared_gpus import SharedGPUs, take_back
from hpc_rl.trainers.start import TrainerContext, begin, load_state
from hpc_rl.trainers.supervised import REWARD_MODEL, SFT, SupervisedRecipe, SupervisedTask
from hpc_rl.weights import TRANSPORTS, disk
from hpc_rl.weights.lending import LendingPublisher
from hpc_rl.weights.process_groups import ProcessGroups
from hpc_rl.weights.publish import Publisher
from hpc_rl.weights.transport import Transport, TransportContext

logger = logging.getLogger(__name__)
Composed = tuple[Run, Recipe]
LoadRows = Callable[[DatasetConfig, Tokenizer], Rows[Encoded]]
TrainedModel = tuple[str, TrainEngineConfig, int]  # name, section, optimizer updates per step


def compose_grpo(start: TrainerContext, stack: ExitStack) -> Composed:
    """Compose RL training: batches from the rollout role, weights to the servers."""
    config = start.config
    assert isinstance(config, GRPOConfig)
    num_prompts, start.data = start.ranks.from_rank0(lambda: _count_prompts(config))
    begun = start.ranks.from_rank0(lambda: begin(start))
    publisher = _open_publisher(start, config, stack) if start.ranks.rank == 0 else None
    lending = publisher if isinstance(publisher, LendingPublisher) else None
    if start.shares_gpus:
        take_back(start.ranks, lending)
    frozen = _build_reference(start, config)
    reference: Scorer | None = frozen
    models: list[TrainedModel] = [("actor", config.actor, count_updates_per_step(config))]
    if config.critic is not None:
        models.append(("critic", config.critic, count_critic_updates_per_step(config)))
    run = _make_run(start, begun, models, count_steps(config, num_prompts), stack)
    run.engine.publishes_model = not config.actor.use_lora or config.actor.lora_publish == "merged"
    if reference is None and config.actor.use_lora and (config.actor.kl_ctl or config.actor.beta):
        reference = FrozenBase(run.engine)
    place_schedule(run.engine, run.step, count_updates_per_step(config))
    critic = None
    if config.critic is not None and run.critic is not None:
        per_step = count_critic_updates_per_step(config)
        place_schedule(run.critic, run.step, per_step)
        critic = Critic(run.critic, config.critic, start.ranks, per_step)
    rollout = RolloutClient(start.names, start.tokens)
    stack.callback(rollout.close)
    prefetch = None
    is_ahead = config.async_training and config.rollout.max_head_offpolicyness > 0
    if is_ahead and start.ranks.rank == 0 and not start.shares_gpus:
        prefetch = BatchPrefetch(RolloutClient(start.names, start.tokens))
        stack.callback(prefetch.close)
    is_beside = config.valid_dataset is not None and not config.evaluator.blocking
    if publisher is not None and not (is_beside and run.pending_evaluations):
        publisher.release()  # servers that a start before this one held
    if is_beside:
        run.evaluate_beside(_open_evaluations(run, publisher, stack) if publisher else None)
    transport: Transport = resolve_name(TRANSPORTS[config.actor.weight_update_mode])(
        TransportContext(
            trial=start.trial,
            engine=run.engine,
            publisher=publisher,
            stopping=start.stopping,
            tokenizer=find_tokenizer_folder(config),
            on_wait=lambda: run.does("wait for room", run.step),
        )
    )
    stack.callback(transport.close)
    samples = _open_samples(start, config, stack) if start.ranks.rank == 0 else None
    shared = None
    if start.shares_gpus:
        engines = [*run.engines, *([] if frozen is None else [frozen])]
        shared = SharedGPUs(engines, start.ranks, lending, run.stats)
    return run, GRPO(run, rollout, transport, num_prompts, reference, samples, critic, shared, prefetch)


def _open_publisher(start: TrainerContext, config: GRPOConfig, stack: ExitStack) -> Publisher:
    """Return the connections to the servers. Rank 0 only."""
    publisher = (LendingPublisher if start.shares_gpus else Publisher)(
        start.trial,
        start.names,
        start.tokens,
        find_trained_pool(config),
        config.rollout.setup_timeout,
        pause_mode=config.weights.pause_mode,
        max_paused=config.weights.max_paused,
        history_bytes=disk.find_history_bytes(config),
        evaluation_pool=EVALUATION_POOL if has_evaluation_pool(config) else "",
        server_share=config.evaluator.server_share,
    )
    if config.actor.weight_update_mode == "xccl":
        publisher.process_groups = ProcessGroups(start.address, torch.device(start.device))
    stack.callback(publisher.close)
    return publisher


def _open_evaluations(run: Run, publisher: Publisher, stack: ExitStack) -> EvaluationsBeside:
    client = RolloutClient(run.names, run.tokens)  # of its own, for its thread
    stack.callback(client.close)
    return EvaluationsBeside(client, publisher, run.lineage, run.stopping, run.make_progress)


def _open_samples(start: TrainerContext, config: GRPOConfig, stack: ExitStack) -> SampleWriter:
    """Return the writer of readable completions. Rank 0 only."""
    writer = JsonlWriter(start.attempt.samples(start.incarnation))
    stack.callback(writer.close)
    decode = partial(Tokenizer(find_tokenizer_folder(config)).decode, skip_special_tokens=False)
    return SampleWriter(writer, decode, config.rollout.keep_samples)


def compose_supervised(
    load: LoadRows, make_task: Callable[[Engine], SupervisedTask], start: TrainerContext, stack: ExitStack
) -> Composed:
    """Compose supervised training: each rank computes the batches from the dataset."""
    config = start.config
    assert isinstance(config, SFTConfig | RWConfig | DPOConfig)
    tokenizer = Tokenizer(find_tokenizer_folder(config))
    rows = _load_encoded(load, start, config.train_dataset, tokenizer)
    start.data = rows.fingerprint
    begun = start.ranks.from_rank0(lambda: begin(start))
    valid = config.valid_dataset
    held_out = None if valid is None else _load_encoded(load, start, valid, tokenizer)
    run = _make_run(start, begun, [("actor", config.model, 1)], count_steps(config, len(rows)), stack)
    return run, SupervisedRecipe(run, make_task(run.engine), rows, held_out)


def compose_dpo(start: TrainerContext, stack: ExitStack) -> Composed:
    """Compose direct preference optimization: supervised training with a frozen reference model."""
    config = start.config
    assert isinstance(config, DPOConfig)
    section = find_loaded_reference(config)
    reference = None if section is None else _make_frozen(start, section)

    def make_task(engine: Engine) -> SupervisedTask:
        return make_dpo_task(config.model, reference or FrozenBase(engine))

    return compose_supervised(load_preferences, make_task, start, stack)


def _load_encoded(
    load: LoadRows, start: TrainerContext, dataset: DatasetConfig, tokenizer: Tokenizer
) -> Rows[Encoded]:
    """Return the rows of a dataset as tokens. If a node has a local disk, its ranks share the work."""
    if start.copies.folder is None or start.ranks.num == 1:
        return load(dataset, tokenizer)
    sources = [compute_identity(Path(dataset.path).expanduser()), compute_identity(Path(tokenizer.folder))]
    key = repr((sources, dataset.max_length, load.__name__, __version__))
    try:
        made = start.copies.make_once(key, ".npz", lambda path: save_encoded(path, load(dataset, tokenizer)))
        return load_encoded(made)
    except OSError as error:
        form = "this rank tokenizes dataset %s itself, because it can't use the node's shared tokens: %s"
        logger.warning(form, dataset.path, error)
        return load(dataset, tokenizer)


COMPOSE: dict[str, Callable[[TrainerContext, ExitStack], Composed]] = {
    "grpo": compose_grpo,
    "teacher": compose_grpo,
    "sft": partial(compose_supervised, SFT.load, lambda _engine: SFT),
    "rw": partial(compose_supervised, REWARD_MODEL.load, lambda _engine: REWARD_MODEL),
    "dpo": compose_dpo,
}


def _count_prompts(config: GRPOConfig) -> tuple[int, dict[str, Any]]:
    """Return the number of prompts in an epoch and the fingerprint of the rows."""
    # no workers: the rollout role tokenizes the prompts
    dataset = replace(config.train_dataset, num_workers=0) if has_own_prompts(config) else None
    prompts = Curriculum(dataset, Tokenizer(find_tokenizer_folder(config)), config.seed)
    return len(prompts), prompts.fingerprint


def _build_reference(start: TrainerContext, config: GRPOConfig) -> Engine | None:
    """Return a second, frozen model for the KL terms, or None if they need none. It is never saved."""
    section = find_loaded_reference(config)
    if section is None:
        return None
    return _make_frozen(start, section)


def _make_frozen(start: TrainerContext, model: TrainEngineConfig) -> Engine:
    """Return a reference model, with the weights at its path."""
    engine = _make_engine(start, _use_local_copy(start, model), "ref", frozen=True)
    engine.initialize(0)
    return engine


def _make_engine(
    start: TrainerContext, model: TrainEngineConfig, name: str = "actor", frozen: bool = False
) -> Engine:
    engine: Engine = resolve_name(ENGINES[start.train.backend])(
        model,
        Mesh.of(start.train, start.ranks.rank, start.ranks.num),
        name=name,
        device=start.device,
        seed=start.config.seed,
        frozen=frozen,
    )
    engine.pin_memory = start.config.train_dataset.pin_memory
    if isinstance(model, PPOActorConfig) and model.aent is not None:
        engine.entropy_clamp = model.aent.entropy_clamp
    return engine


def _use_local_copy(start: TrainerContext, model: TrainEngineConfig) -> TrainEngineConfig:
    """Return the section with a copy of the checkpoint on the node's disk, if training has one node."""
    # On several nodes each rank reads only its part, which is less than a copy for each node.
    return replace(model, path=start.copies.find_path(model.path)) if start.is_one_node else model


def _make_run(
    start: TrainerContext,
    begun: dict[str, Any],
    models: list[TrainedModel],
    num_steps: int,
    stack: ExitStack,
) -> Run:
    """Return the run with the engines of the models, their state loaded.

    `begun` is the result of `begin` on rank 0. The first model is the policy, the second, if any, the critic.
    """
    engines = []
    for name, model, updates_per_step in models:
        reads_weights = begun["manifest"] is None or model.use_lora  # states have no frozen parameters
        engine = _make_engine(start, _use_local_copy(start, model) if reads_weights else model, name)
        engine.initialize(num_steps * updates_per_step, empty=begun["manifest"] is not None)
        engines.append(engine)
    begun = load_state(start, begun, engines)
    config, attempt = start.config, start.attempt
    run = Run(
        **vars(start),
        engine=engines[0],
        critic=engines[1] if len(engines) > 1 else None,
        lineage=begun["lineage"],
        step=begun["step"],
        writers=MetricsWriters([]),
    )
    if start.ranks.rank == 0:
        tensorboard = config.stats_logger.tensorboard.path
        folder = Path(tensorboard).expanduser() if tensorboard else start.trial.tensorboard
        stored = redact(load_json(start.trial.config_json) or {})
        who = RunIdentity(config.experiment_name, config.trial_name, attempt.dir, start.trial.dir, stored)
        metrics = attempt.metrics(start.incarnation)
        run.writers = open_writers(metrics, folder, run.step, who, config.stats_logger)
        stack.callback(run.writers.close)
        run.activity = Activity(attempt.activity("trainer", 0, start.incarnation))
        if config.callbacks:
            run.callbacks = Callbacks(config.callbacks, attempt, run.does)
    if begun["manifest"] is not None:
        run.restore(begun["manifest"])
    return run
