"""`hpc-rl simulate FILE`: predict step time, goodput, staleness and makespan before a trial is submitted."""

import argparse
import re
from pathlib import Path

from hpc_rl.cli.options import (
    CommandParser,
    Count,
    Namespace,
    PositiveCount,
    Seconds,
    align_columns,
    print_json,
)
from hpc_rl.cli.outcome import collect_sources
from hpc_rl.core.errors import CannotWrite, ExitCode
from hpc_rl.core.trial import write_atomic
from hpc_rl.simulate.describe import describe, describe_costs, make_json
from hpc_rl.simulate.prepare import Case, make_case
from hpc_rl.simulate.setup import Faults
from hpc_rl.simulate.tune import predict
from hpc_rl.trials import prepare, trial_index

ABOUT = """Simulate a configuration on a virtual clock, without nodes, GPUs or a scheduler: step time, use of
time, staleness, makespan with failures, preemption and time limits, and the first bottleneck.
Costs come from the files of trials (--from); without them, or for values that are missing there, they are
defaults for a model of 8 billion parameters on H100 GPUs, and the output names them."""
EPILOG = """examples:
  hpc-rl simulate grpo.yaml --n_nodes 4096 --mtbf 30d --from first
  hpc-rl simulate grpo.yaml -t 04:00:00 --queue_s 3600 --html map.html

Durations are numbers of seconds, or end with s, m, h or d."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(text: str | float) -> float:
    """Return the seconds of `30d`, `12h`, `5m`, `90s` or `90`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", str(text))  # jsonargparse may convert it twice
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text} can't be used; allowed: a duration as 30d, 12h, 5m or 90s")
    return float(match[1]) * UNITS_S[match[2]]


def add_faults(made: CommandParser) -> None:
    """Declare possible faults."""
    group = made.add_argument_group("cluster")
    mtbf = "mean time between failures of one node, as 30d (default: nodes never fail)"
    group.add_argument("--mtbf", type=parse_duration_s, metavar="TIME", help=mtbf)
    repair = "time until a failed node works again (default: 4h)"
    group.add_argument("--repair", type=parse_duration_s, default=4 * 3600.0, metavar="TIME", help=repair)
    spare = "nodes of the partition beyond the trial's (default: always enough)"
    group.add_argument("--spare_nodes", type=Count, metavar="N", help=spare)
    preempt = "mean time until a running job is preempted (default: never)"
    group.add_argument("--preempt_every", type=parse_duration_s, metavar="TIME", help=preempt)
    purge = "mean time between losses of the newest checkpoint, as by a purge (default: never)"
    group.add_argument("--purge_every", type=parse_duration_s, metavar="TIME", help=purge)
    queue = "mean seconds that a new job waits in the queue (default: 0)"
    group.add_argument("--queue_s", type=Seconds, default=0.0, metavar="S", help=queue)
    requeue = "seconds that a requeued job waits (default: 120)"
    group.add_argument("--requeue_s", type=Seconds, default=120.0, metavar="S", help=requeue)


def make_faults(args: Namespace) -> Faults:
    """Return the faults that the arguments of a command name."""
    never = float("inf")
    return Faults(
        mtbf_s=args.mtbf or never,
        repair_s=args.repair,
        spare_nodes=args.spare_nodes,
        preempt_every_s=args.preempt_every or never,
        purge_every_s=args.purge_every or never,
        queue_s=args.queue_s,
        requeue_s=args.requeue_s,
    )


def make_parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    origin = "a trial to measure the costs in; repeat it for several trials"
    made.add_argument("--from", dest="measured", action="append", default=[], metavar="TRIAL", help=origin)
    add_faults(made)
    draws = "number of simulations, with other luck and other costs (default: 5)"
    made.add_argument("--draws", type=PositiveCount, default=5, metavar="N", help=draws)
    html = "write a map of the throughput over nodes and splits to one HTML file"
    made.add_argument("--html", metavar="FILE", help=html)
    made.add_json("predictions, their ranges and all costs")
    return made


def main(args: Namespace) -> int:
    loaded = prepare.load_config(collect_sources(args))
    case = make_case(loaded, trial_index.resolve_all(args.measured))
    results = predict(case.setup, case.costs, make_faults(args), args.draws)
    facts = describe(case, results)
    if args.html:
        write_page(Path(args.html).expanduser().absolute(), case, facts)
    if args.json:
        print_json(make_json(case, results))
        return ExitCode.DONE
    print("\n".join(align_columns([[name, text] for name, text in facts])))
    for line in describe_costs(case.costs):
        print(line)
    if args.html:
        print(f"written: {args.html}")
    return ExitCode.DONE


def write_page(path: Path, case: Case, facts: list[tuple[str, str]]) -> None:
    """Write the map. Raises CannotWrite, ConfigError."""
    from hpc_rl.simulate.page import make_map_page

    devices = case.setup.count_devices("server") + case.setup.count_devices("trainer")
    defaults = f"Defaults, not measured: {', '.join(case.costs.list_defaults())}."
    title = f"{case.plan.experiment_name}/{case.plan.trial_name}"
    page = make_map_page(title, case.map_rates(), devices / case.plan.n_nodes, facts, defaults)
    try:
        write_atomic(path, page)
    except OSError as error:
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
