"""docs/algorithms.md: the table has every algorithm, and the page's own algorithm trains."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.refusal import Refusal
from hpc_rl.tools.check_user_code import check_user_code
from tests.unit.trainers.test_recipes import batch_of, grpo_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
OWN = re.search(r"<!-- file: careful.py -->\n```python\n(.*?)```", PAGE, re.S)[1]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "careful.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("careful", None)


def test_the_table_has_every_algorithm():
    (table,) = re.findall(r"\n\| `actor.algorithm` \|.*?\n\n", PAGE, re.S)
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(ALGORITHMS)


def test_the_algorithm_of_the_page_trains_with_its_option(tmp_path, own):
    """Ratio e, clipped to 1.2 for credit 0.5, and a quarter of e for credit -0.5."""
    recipe = grpo_recipe(tmp_path, algorithm="careful:CAREFUL", algorithm_args={"mistakes": 0.25})
    recipe.update(6, batch_of([1.0, 0.0]))
    assert recipe.run.stats.take()["loss"] == pytest.approx(0.5 * (0.25 * np.e - 1.2) / 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], ""),
        (["actor.algorithm_args={mistaks: 1}"], "has no mistaks; it has mistakes"),
        (["actor.algorithm=careful:Options"], "must name an Algorithm"),
        (["actor.algorithm=careful:CAREFULL"], "can't be imported"),
        (["actor.algorithm=carefree:MINE"], "can't be imported: No module named 'carefree'"),
    ],
)
def test_a_submission_checks_it(words, problem, own, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+", "answer": "2"}\n')
    base = ["experiment_name=e", "trial_name=t", f"train_dataset.path={rows}", "train_dataset.batch_size=4"]
    given = [*base, "actor.path=/m", "actor.algorithm=careful:CAREFUL", *words]
    found = check_user_code(check(load([], given, profiles=[]), files=False).config)
    texts = "\n".join(str(one) for one in found if isinstance(one, Refusal))
    assert problem in texts and bool(texts) == bool(problem)
