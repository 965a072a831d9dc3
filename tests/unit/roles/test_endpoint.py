"""The endpoint of a trial that serves a model: the name of the model that clients see."""

from pathlib import Path

import pytest

from hpc_rl.roles.endpoint import name_model


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen2.5-7B", "Qwen2.5-7B"),
        ("/runs/sums/first/exports/final", "first-final"),
        ("/runs/sums/first/exports/step-00000040", "first-step-00000040"),
        ("/runs/sums/first-serve-40/exports/first-40", "first-40"),
    ],
)
def test_a_model_is_called_as_its_folder_or_trial(folder, name):
    assert name_model(Path(folder)) == name
