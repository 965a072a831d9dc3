"""Owners of a trial's directories and secret: other accounts must not be able to change a trial's code."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.trial import Trial, find_account_name
from hpc_rl.trials.lock import TrialLock

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial.of(tmp_path / "runs", find_account_name(), "exp", "one")


@contextlib.contextmanager
def another_account():
    """As OTHER, who is not root."""
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o002, 0, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_new_directories_are_written_by_their_owner_alone(trial, umask):
    trial.make_dirs()
    assert [mode(path) for path in (trial.dir, *trial.dir.parents[:3])] == [0o700, 0o755, 0o755, 0o755]
    trial.make_secret()
    assert mode(trial.secret) == 0o600


def test_a_trial_that_a_group_may_read_is_written_by_its_owner_alone(trial):
    trial.make_dirs(0o002)
    assert (mode(trial.dir), mode(trial.rollout)) == (0o755, 0o775)
    trial.make_dirs(0o002)


def test_below_a_directory_of_a_group_everything_keeps_its_group(trial):
    fileroot = trial.dir.parents[2]
    fileroot.mkdir()
    fileroot.chmod(0o2775)
    trial.make_dirs()
    assert all(path.stat().st_mode & stat.S_ISGID for path in (*trial.dir.parents[:2], *trial.dir.rglob("*")))


@needs_root
def test_a_directory_of_render_may_be_below_one_of_another_account(tmp_path):
    lab = tmp_path / "lab"
    ours = Trial(lab / "alice" / "scripts")
    ours.make_dirs()
    os.chown(lab, OTHER, OTHER)
    ours.make_dirs()
    os.chown(ours.dir.parent, OTHER, OTHER)
    with pytest.raises(TrialStateError, match=r"alice belongs to account .* --output of hpc-rl render"):
        ours.make_dirs()


@pytest.mark.parametrize("level", [-1, 0, 1], ids=["trial", "experiment", "user"])
def test_directories_that_others_can_write_are_refused(trial, level):
    trial.make_dirs()
    folder = trial.dir if level < 0 else trial.dir.parents[level]
    folder.chmod(0o777)
    with pytest.raises(TrialStateError) as refused:
        trial.make_dirs()
    assert f"{folder} can be written by other accounts (mode 0777)" in str(refused.value)
    assert f"chmod go-w {folder}" in str(refused.value)
    folder.chmod(0o1777)  # sticky: others can add names, and not replace ours
    trial.make_dirs()


def test_a_shared_fileroot_is_fine_unless_everybody_can_write_it(trial):
    trial.make_dirs()
    fileroot = trial.dir.parents[2]
    fileroot.chmod(0o2775)
    trial.make_dirs()
    fileroot.chmod(0o777)
    with pytest.raises(TrialStateError, match="runs can be written"):
        trial.make_dirs()


def test_nothing_is_left_of_a_submission_that_is_refused(trial):
    user = trial.dir.parents[1]
    user.mkdir(parents=True)
    user.chmod(0o777)
    with pytest.raises(TrialStateError), TrialLock(trial):
        pass
    assert not list(user.iterdir())


@needs_root
@pytest.mark.parametrize("level", [-1, 0, 1], ids=["trial", "experiment", "user"])
def test_directories_of_others_are_refused(trial, level):
    trial.make_dirs()
    folder = trial.dir if level < 0 else trial.dir.parents[level]
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(TrialStateError, match=f"belongs to account {OTHER}"):
        trial.make_dirs()


@needs_root
def test_who_can_close_a_directory_is_named(trial, monkeypatch):
    trial.make_dirs()
    user = trial.dir.parents[1]
    user.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    for owner, words in ((0, "Ask your administrators"), (OTHER, "Run")):
        os.chown(user, owner, owner)
        with pytest.raises(TrialStateError, match=rf"{words}( to run)? chmod go-w {user}, or choose"):
            trial.refuse_others()
    os.chown(user, OTHER + 1, OTHER + 1)
    words = rf"account {OTHER + 1}.*\. Choose a directory that you own"
    with pytest.raises(TrialStateError, match=words) as told:
        trial.refuse_others()
    assert "chmod" not in str(told.value)


@needs_root
def test_a_link_of_another_account_is_refused_whatever_it_leads_to(trial, tmp_path):
    trial.make_dirs()
    user = trial.dir.parents[1]
    user.rename(tmp_path / "elsewhere")
    user.symlink_to(tmp_path / "elsewhere")
    trial.make_dirs()  # our own link
    os.chown(user, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(TrialStateError, match=f"belongs to account {OTHER}"):
        trial.make_dirs()


@needs_root
def test_an_account_that_is_not_root_trusts_root_and_itself(trial):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        ours = Trial.of(folder, find_account_name(), "exp", "one")
        with another_account(), pytest.raises(TrialStateError, match="can be written by other accounts"):
            ours.make_dirs()
        Path(folder).chmod(0o755)
        ours.make_dirs()
        ours.make_secret()
        for path in (ours.dir, *ours.dir.rglob("*")):
            os.chown(path, OTHER, OTHER)
        with pytest.raises(TrialStateError, match=f"belongs to account {OTHER}"):
            ours.make_dirs()
        with another_account():
            ours.make_dirs()  # below directories of root
            ours.make_secret()


@pytest.mark.parametrize("wrong", [0o644, 0o640, 0o606])
def test_a_secret_that_others_could_read_is_never_used(trial, wrong):
    trial.make_dirs()
    trial.make_secret()
    trial.load_tokens()
    trial.secret.chmod(wrong)
    for use in (trial.load_tokens, trial.make_secret):
        with pytest.raises(TrialStateError, match="so it is not used"):
            use()


@needs_root
def test_a_secret_of_another_account_is_never_used(trial):
    trial.make_dirs()
    trial.make_secret()
    os.chown(trial.secret, OTHER, OTHER)
    with pytest.raises(TrialStateError, match=f"belongs to account {OTHER}"):
        trial.make_secret()


def test_a_missing_secret_is_told_of(trial):
    trial.make_dirs()
    with pytest.raises(TrialStateError, match=r"secret, with the tokens of the trial, is missing\. Stop"):
        trial.load_tokens()


def test_a_link_is_no_secret(trial, tmp_path):
    trial.make_dirs()
    trial.secret.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        trial.make_secret()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"control": 1'])
def test_a_damaged_secret_is_told_of(trial, content):
    trial.make_dirs()
    trial.secret.write_text(content)
    trial.secret.chmod(0o600)
    with pytest.raises(TrialStateError, match="is damaged"):
        trial.load_tokens()
