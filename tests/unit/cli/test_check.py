"""`hpc-rl check --episode`: what it shows while it runs."""

from hpc_rl.cli import check as checking
from hpc_rl.trials.episode import EpisodeProgress, EpisodeStage


def test_progress_is_a_line_for_each_stage_and_some_while_one_lasts(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checking.time, "monotonic", lambda: now[0])
    with checking.ProgressLine() as line:
        for second, stage, tokens in [
            (1, EpisodeStage.LOADING, 0),
            (2, EpisodeStage.LOADING, 0),
            (3, EpisodeStage.RUNNING, 0),
            (4, EpisodeStage.RUNNING, 8),
            (14, EpisodeStage.RUNNING, 96),
        ]:
            now[0] = 100.0 + second
            line.show(EpisodeProgress(stage, tokens))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "episode: loading the model (1 s)",
        "episode: running the workflow (3 s)",
        "episode: running the workflow (96 tokens, 14 s)",
    ]
