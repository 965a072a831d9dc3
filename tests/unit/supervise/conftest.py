"""A trial without files, and its first attempt."""

import pytest

from hpc_rl.core.trial import Attempt, Trial


@pytest.fixture
def trial(tmp_path) -> Trial:
    trial = Trial.of(tmp_path, "me", "exp", "one")
    trial.make_dirs()
    return trial


@pytest.fixture
def attempt(trial) -> Attempt:
    attempt = trial.attempt("7.0")
    attempt.make_dirs()
    return attempt
