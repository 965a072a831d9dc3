"""A role without the trial's tokens ends for good, with the reason."""

import subprocess
import sys

import pytest
from patience import extend

from hpc_rl.core.errors import ExitCode, FailureClass
from hpc_rl.core.records import ExitRecord
from hpc_rl.core.trial import Trial


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_a_role_without_its_tokens_ends_for_good_with_the_reason(tmp_path, role):
    trial = Trial.of(tmp_path, "user", "exp", "one")
    trial.make_dirs()
    attempt = trial.attempt("7.0")
    attempt.make_dirs()
    argv = [sys.executable, "-m", f"hpc_rl.roles.{role}", "--trial_dir", str(trial.dir), "--attempt", "7.0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=extend(120))
    assert done.returncode == ExitCode.BAD_CONFIG and "Traceback" not in done.stderr
    record = ExitRecord.read(attempt.exit_record(role, 0, 0, 0))
    assert record is not None and record.final and record.failure is FailureClass.USER
    assert f"{trial.secret}, with the tokens of the trial, is missing" in record.reason
