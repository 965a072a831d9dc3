"""From a checked configuration to the inputs of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.config.load.stored import Loaded
from hpc_rl.config.options.experiment import GRPOConfig, has_trainer
from hpc_rl.config.pool_view import find_trained_pool, view_pool
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial
from hpc_rl.plan.estimate import Estimate
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers import pick
from hpc_rl.simulate.calibrate import calibrate
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.setup import Setup, make_setup
from hpc_rl.simulate.splits import plan_splits, scale_split
from hpc_rl.simulate.tune import compute_rate
from hpc_rl.trials import needs
from hpc_rl.trials.checklist import Stage, judge

# backend -> its option for the sequences that a server decodes at once
SEQUENCE_LIMITS = {
    "sglang": "max_running_requests",
    "vllm": "max_num_seqs",
    "embedded": "max_running_requests",
}
NODE_FACTORS = (0.25, 0.5, 1, 2, 4)
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True)
class Case:
    """A trial to simulate, with what is needed to plan it in other ways."""

    config: GRPOConfig
    plan: Plan
    setup: Setup
    costs: Costs
    num_rows: int | None

    def list_splits(self) -> Iterator[tuple[str, Setup]]:
        """Yield other splits of the same units that can be planned."""
        return plan_splits(self.config, self.plan, self._make_plan, self.num_rows)

    def map_rates(self) -> list[dict[str, float | str]]:
        """Return the rate for other numbers of nodes and shares of servers, as far as they can be planned."""
        found: list[dict[str, float | str]] = []
        sizes = sorted({max(1, round(self.plan.n_nodes * factor)) for factor in NODE_FACTORS})
        for n_nodes in sizes:
            for share in SHARES:
                other = scale_split(self.config, self.plan, n_nodes, share)
                if other is None:
                    continue
                try:
                    plan = self._make_plan(other)
                except ConfigError:  # leaves a node or a GPU idle
                    continue
                setup = make_setup(other, plan, self.num_rows)
                rate = compute_rate(setup, self.costs, 0)
                found.append(
                    {"n_nodes": n_nodes, "share": share, "allocation": plan.allocation, "tokens_per_s": rate}
                )
        return found

    def _make_plan(self, config: GRPOConfig) -> Plan:
        scheduler = "local" if pick(config.launcher.type) == "local" else "slurm"
        return make_plan(config, (), interpreter=self.plan.python, scheduler=scheduler)  # type: ignore[arg-type]


def make_case(loaded: Loaded, measured: Sequence[Trial] = ()) -> Case:
    """Return the case of a configuration, with costs measured in trials, else with defaults.

    Weights, data and Pythons need not be on this machine. Raises ConfigError for options that submit refuses,
    and for another trainer than grpo's; TrialStateError if the trials tell nothing.
    """
    costs = calibrate(measured) if measured else Costs()
    if loaded.config.launcher.type == "auto" and loaded.config.cluster.n_nodes > 1:
        # several nodes have a scheduler, also if this machine has not
        launcher = replace(loaded.config.launcher, type="slurm")
        loaded = replace(loaded, config=replace(loaded.config, launcher=launcher))
    planned = judge(loaded, frozenset({Stage.OPTIONS})).require()
    config = planned.loaded.config
    if not isinstance(config, GRPOConfig) or not has_trainer(config):
        why = "can't be simulated here, because the trial does not train with generation servers"
        use = "simulate a grpo configuration that trains"
        trainer = planned.plan.trainer
        raise ConfigError(Refusal(option="trainer", value=trainer, kind=Kind.UNSUPPORTED, why=why, use=use))
    plan = planned.plan
    has_rows = Path(config.train_dataset.path).expanduser().exists()
    known = needs.find_known_models(config)
    found = needs.estimate_needs(config, plan, known, pick(config.launcher.type), count_rows=has_rows)
    found = found if isinstance(found, Estimate) else None  # of a trainer and its servers
    num_rows = found.work.rows if found else None
    costs = adapt_costs(costs, config, plan, found)
    return Case(config, plan, make_setup(config, plan, num_rows), costs, num_rows)


def adapt_costs(costs: Costs, config: GRPOConfig, plan: Plan, found: Estimate | None) -> Costs:
    """Return the costs with the sizes that configuration and model give."""
    name = find_trained_pool(config)
    backend = next((pool.backend for pool in plan.pools if pool.name == name), plan.pools[0].backend)
    limits = {f"{backend}.{SEQUENCE_LIMITS[backend]}": getattr(
        getattr(view_pool(config, name), backend), SEQUENCE_LIMITS[backend]
    )}  # fmt: skip
    if found is not None:
        costs = costs.replace_measured("the model's config.json", model_bytes=found.disk.weights)
        server = next((one for one in found.servers if one.pool == name), None)
        if server is not None:
            size = server.weight_bytes * server.units
            costs = costs.fit_model(size, server.weight_bytes, found.disk.checkpoint)
        if server is not None and server.cached_tokens:
            length = costs.prompt_tokens + min(costs.mean_length, config.gconfig.max_new_tokens)
            limits["the server's cache"] = max(1, int(server.cached_tokens / length))
    known = {origin: limit for origin, limit in limits.items() if limit is not None}
    if not known:
        return costs
    origin = min(known, key=lambda one: known[one])
    return costs.replace_measured(origin, server_sequences=known[origin])
