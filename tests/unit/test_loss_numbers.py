"""The numbers about the memory of the loss in the documentation are the stored ones, and within the goals."""

import json
from pathlib import Path

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
