"""Measured numbers in the documentation are the stored ones; the memory of the loss is within its goal."""

import json
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads((ROOT / "benchmarks/results/loss_memory.json").read_text())["cases"]
MB = {name: round(case["peak_mb"]["median"]) for name, case in CASES.items()}


def test_the_page_has_the_stored_numbers():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    gradients = round(CASES["ours"]["gradient_mb"]["median"])
    cpu = 1 / CASES["whole logits"]["ratio_s"]["median"]
    for sentence in (
        f"need {MB['ours']} MB beside their inputs, of which {gradients} MB are the gradients",
        f"whole logits need {MB['whole logits']} MB, AReaL's way {MB['areal']} MB",
        f"`linear_cross_entropy` in chunks {MB['torch chunked']} MB",
        f"It takes {cpu:.2f} of the CPU time of whole logits",
    ):
        assert sentence in text


def test_the_stored_numbers_are_within_the_goals():
    assert max(MB["ours"], MB["ours with entropy"]) <= 170
    for name in ("ours", "ours with entropy"):
        assert CASES[name]["ratio_s"]["median"] <= CASES["whole logits"]["ratio_s"]["median"]


def test_the_page_about_scale_has_the_stored_shares_of_the_bound():
    text = " ".join((ROOT / "docs/scale.md").read_text().split())
    cases = json.loads((ROOT / "benchmarks/results/async_gain.json").read_text())["cases"]
    shares = {
        number: [one["share"] for one in cases if one["prompts"] == number] for number in (128, 256, 512)
    }
    spans = {
        number: f"{min(found):.2f} to {max(found):.2f} with {number}" for number, found in shares.items()
    }
    for span in spans.values():
        assert span in text


def test_the_page_has_the_stored_numbers_of_a_slower_machine():
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    cases = json.loads((ROOT / "benchmarks/results/side_by_side_slower.json").read_text())["cases"]
    for name, model in (("grpo-cold", "random"), ("grpo-warm", "warm")):
        ratio = cases[name]["ratio"]
        span = f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}) with the {model}"
        assert span in text
        shares = {
            role: median(pair["ours_by_role"][role] / pair["ours"] for pair in cases[name]["pairs"])
            for role in ("server", "trainer")
        }
        assert f"the server takes {shares['server']:.2f} and the trainer {shares['trainer']:.2f}" in text


def test_the_page_has_the_stored_time_of_compiled_layers():
    text = " ".join((ROOT / "docs/engines.md").read_text().split())
    sides = json.loads((ROOT / "benchmarks/results/engines.json").read_text())["step"]["sides"]
    rates = {name: sides[f"fsdp {name}"]["tokens_per_s"]["median"] for name in ("padded", "compiled")}
    assert f"takes {rates['padded'] / rates['compiled']:.2f} of the CPU time" in text
