"""Which row a prompt index has: mixtures by share, weights of a column, the band of mean rewards."""

import json
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.options.dataset import MixedSetConfig, PromptDatasetConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.order import choose_set, order_by_weight, permute_rows
from hpc_rl.datasets.rows import Draw, compute_fingerprint

TOKENIZER = SimpleNamespace(encode=lambda text: [len(text)])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(tmp_path, num_rows=4, seed=1, mix=None, **options) -> Curriculum:
    """Return a curriculum over rows named r0, r1, … with the weights 0, 1, 2, …"""
    rows = [{"prompt": f"r{number}", "weight": number} for number in range(num_rows)]
    path = write(tmp_path / "main.jsonl", rows)
    return Curriculum(PromptDatasetConfig(path=path, mix=mix or {}, **options), TOKENIZER, seed)


def draw_all(curriculum, number, rates=None):
    """Return the first draws, each after the records of the ones before."""
    next_visits, draws = {}, []
    for index in range(number):
        draws.append(curriculum.draw(index, next_visits, rates or {}))
        next_visits[draws[-1].part] = draws[-1].visit + 1
    return draws


def test_uniform_draws_are_the_order_of_the_rows_in_every_epoch(tmp_path):
    curriculum = make(tmp_path)
    rows = [draw.row for draw in draw_all(curriculum, 8)]
    assert rows == [*permute_rows(1, 0, 4), *permute_rows(1, 1, 4)]
    # rates mean nothing here
    assert draw_all(curriculum, 8, {(0, row): 0.0 for row in range(4)})[7].row == rows[7]
    assert [curriculum.get(Draw(0, 2, visit)).epoch for visit in (3, 4)] == [0, 1]


def test_each_data_set_gets_its_share_of_the_indexes():
    half = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
    assert [choose_set(index, half)[0] for index in range(8)] == [0, 1, 0, 2, 0, 1, 0, 2]
    # floor(0.7 n + 1/2) of the first n indexes are of the first set: 0 1 1 2 3 4 4 5 6 6 7
    assert [choose_set(index, [Fraction(7, 10), Fraction(3, 10)]) for index in range(10)] == [
        (0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (0, 4), (0, 5), (1, 2), (0, 6),
    ]  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 60))
def test_shares_hold_for_every_prefix_and_no_visit_is_skipped(parts, number):
    shares = [Fraction(part, sum(parts)) for part in parts]
    chosen = [choose_set(index, shares) for index in range(number)]
    for part, share in enumerate(shares):
        visits = [visit for one, visit in chosen if one == part]
        assert visits == list(range(len(visits)))
        assert abs(len(visits) - share * number) <= 1 + part * Fraction(1, 2)


def test_rows_of_a_mixture_name_their_set_and_keep_the_order_of_it(tmp_path):
    code = write(tmp_path / "code.jsonl", [{"question": f"c{number}"} for number in range(3)])
    mix = {"code": MixedSetConfig(path=code, share=0.25, columns={"prompt": "question"})}
    curriculum = make(tmp_path, mix=mix, shuffle=False)
    prompts = [curriculum.get(draw) for draw in draw_all(curriculum, 8)]
    assert [one.columns["prompt"] for one in prompts] == ["r0", "r1", "c0", "r2", "r3", "r0", "c1", "r1"]
    assert [one.columns["data_set"] for one in prompts][1:3] == ["main", "code"]
    assert [one.epoch for one in prompts] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert len(curriculum) == 7
    main = tmp_path / "main.jsonl"
    assert curriculum.fingerprint == compute_fingerprint(main, code) != compute_fingerprint(code, main)
    assert curriculum.fingerprint["rows"] == 7


def test_weights_draw_rows_in_proportion_and_never_a_row_of_weight_0(tmp_path):
    curriculum = make(tmp_path, curriculum="weights")  # of 4 visits in an epoch: 0, 2/3, 4/3, 2
    for epoch in range(5):
        seen = Counter(draw.row for draw in draw_all(curriculum, 4 * epoch + 4)[-4:])
        assert seen[0] == 0 and seen[1] <= 1 and seen[1] + seen[2] == 2 == seen[3]
    draws = draw_all(curriculum, 3000)
    seen = Counter(draw.row for draw in draws)
    assert [round(seen[row] / 500) for row in range(4)] == [0, 1, 2, 3]
    # two visits to a row are two samples, in one epoch too
    assert len({(curriculum.get(draw).epoch, draw.row) for draw in draws[:40]}) == 40


def test_the_points_of_systematic_sampling():
    # edges 1/4 * 3 * (1, 2, 4) = 0.75, 1.5, 3; each of u, u + 1, u + 2 takes the row of its interval
    visits = {tuple(order_by_weight(seed, 0, np.array([1.0, 1.0, 2.0]), False)) for seed in range(60)}
    assert visits == {(0, 1, 2), (0, 2, 2), (1, 2, 2)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any), st.integers(0, 99))
def test_each_row_has_its_expected_visits_rounded(weights, seed):
    weights_N = np.array(weights, float)
    seen = Counter(order_by_weight(seed, 3, weights_N).tolist())
    for row, expected in enumerate(weights_N / weights_N.sum() * len(weights)):
        assert abs(seen[row] - expected) < 1


@pytest.mark.parametrize("weight", [-1, None, "2", True, float("inf"), float("nan"), 10**400])
def test_a_bad_weight_names_its_row(tmp_path, weight):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "weight": 1}, {"prompt": "y", "weight": weight}])
    with pytest.raises(ConfigError, match=r"a\.jsonl row 2: its column weight must be a number"):
        Curriculum(PromptDatasetConfig(path=path, curriculum="weights"), TOKENIZER, 1)


@pytest.mark.parametrize("unit", [5e-324, 1.0, 4e307])
def test_the_unit_of_weights_is_of_no_importance(tmp_path, unit):
    """The sum of the largest ones, and the inverse of the smallest, are no finite numbers."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "weight": unit * one} for one in (1, 2, 4, 1)])
    curriculum = Curriculum(PromptDatasetConfig(path=path, curriculum="weights"), TOKENIZER, 1)
    seen = Counter(draw.row for draw in draw_all(curriculum, 800))
    assert [seen[row] for row in range(4)] == pytest.approx([100, 200, 400, 100], rel=0.2)


def test_weights_of_0_alone_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "w": 0}])
    with pytest.raises(ConfigError, match="column w is 0 in every row"):
        Curriculum(PromptDatasetConfig(path=path, curriculum="weights", weight_column="w"), TOKENIZER, 1)


def test_rows_outside_of_the_band_are_visited_less_often(tmp_path):
    options = {"curriculum": "band", "pass_band": [0.25, 0.75], "outside_share": 0.2}
    curriculum = make(tmp_path, 4, shuffle=False, **options)
    assert [draw.row for draw in draw_all(curriculum, 5)] == [0, 1, 2, 3, 0]  # new rows always
    rates = {(0, 0): 0.0, (0, 1): 0.25, (0, 2): 0.75, (0, 3): 1.0}
    draws = draw_all(curriculum, 2400, rates)
    seen = Counter(draw.row for draw in draws)
    # of the visits in an epoch 1, 1, 0.2 and 0.2 are kept
    assert [round(seen[row] / 1000, 1) for row in range(4)] == [0.2, 1.0, 1.0, 0.2]
    visits = [draw.visit for draw in draws]
    assert visits == sorted(set(visits)) and visits[-1] > 3900
    # a visit has one outcome, whatever was drawn before
    assert draws[100] == curriculum.draw(0, {0: draws[99].visit + 1}, rates)


def test_a_band_that_no_row_is_in_still_draws(tmp_path):
    curriculum = make(tmp_path, 2, curriculum="band", outside_share=0.05)
    rates = {(0, 0): 0.0, (0, 1): 1.0}
    assert {draw.row for draw in draw_all(curriculum, 50, rates)} == {0, 1}
