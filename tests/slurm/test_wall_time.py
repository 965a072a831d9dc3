"""A job that is too short for its trial: it stops by itself in time, is requeued, goes on, and no step is
lost or repeated.
"""

import contextlib
import subprocess
import threading
from collections.abc import Iterator

import pytest
from kill_anything import READY, Killed, Trials, make_workplace, short_name
from patience import extend

from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import load_json
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.status.trial_status import load_status
from hpc_rl.supervise.deadline import SITE_END

pytestmark = pytest.mark.timeout(600)
SLOW_REWARD = """import time
def score(prompt, completion, **columns):
    time.sleep(0.08)
    return sum(map(ord, completion)) % 7 / 7
"""
WINDOW_S = 24 + extend(3)  # from the first start of the job to what the supervisor takes for its end
SITE_FILE = """[[ -s {file} ]] || echo $(($(date +%s) + {window_s:.0f})) >{file}
export {name}=$(<{file})
"""


@pytest.fixture
def trials(cluster, tmp_path, request) -> Iterator[Trials]:
    trials = Trials(make_workplace(tmp_path), short_name(request.node.name))
    with hurrying(cluster):
        yield trials
    trials.end_all()


@contextlib.contextmanager
def hurrying(cluster) -> Iterator[None]:
    """Requeued jobs are spared Slurm's two minutes."""
    over = threading.Event()

    def hurry() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(subprocess.SubprocessError):
                cluster.hurry()

    thread = threading.Thread(target=hurry, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def restarts(one: Killed) -> list[int]:
    return [
        event["restart"]
        for event in JsonLines(one.trial.job_state(one.job_id)).poll()
        if event["event"] == "started"
    ]


def test_a_job_whose_time_is_nearly_over_saves_is_requeued_and_goes_on(trials):
    """The job tells its end itself: one told by the submission may be over before a slow job has started."""
    told = SITE_FILE.format(name=SITE_END, file=trials.folder / "end", window_s=WINDOW_S)
    (trials.folder / "site.sh").write_text(told)
    options = READY | {"launcher.setup": f". {trials.folder / 'site.sh'}"}
    one = trials.start(options, scheduler="slurm", total_steps=120, held=True)
    one.until(lambda: one.trial.attempt(f"{one.job_id}.0").ended.exists())
    one.finish().promises.check()
    attempts = restarts(one)
    assert len(attempts) >= 2 and attempts == list(range(len(attempts))), (
        "one that comes back before that time stops once more"
    )
    for restart in attempts[:-1]:
        ended = load_json(one.trial.attempt(f"{one.job_id}.{restart}").ended)
        assert ended["exit_code"] == 75 and "time is nearly over" in ended["reason"]
    assert one.promises.steps_repeated() == 0, "each stop saved the last step that it had trained"
    story = load_status(one.trial, SlurmScheduler().query_states([one.job_id])[one.job_id])
    assert "time is nearly over" in story.attempts[0].cause and story.attempts[-1].state == "done"


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_a_trial_of_four_time_limits_finishes_over_several_requeues(trials):
    (trials.folder / "slow_reward.py").write_text(SLOW_REWARD)
    options = {
        **READY,
        "launcher.slurm.time": "'0:03:00'",
        "recover.freq_steps": 50,
        "evaluator.freq_steps": 200,
    }
    options |= {"rollout.reward_fn": "slow_reward:score"}
    one = trials.start(options, scheduler="slurm", total_steps=700)
    one.until(lambda: one.over, 5000)
    one.finish().promises.check()
    attempts = restarts(one)
    assert len(attempts) >= 4 and attempts == list(range(len(attempts)))
    for restart in attempts[:-1]:
        ended = load_json(one.trial.attempt(f"{one.job_id}.{restart}").ended)
        assert ended["exit_code"] == 75 and "time is nearly over" in ended["reason"], (
            "none was ended by Slurm"
        )
    assert one.promises.steps_repeated() == 0, "each stop saved the last step that it had trained"
