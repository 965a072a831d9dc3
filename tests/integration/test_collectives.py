"""The check of the collectives: ranks that work, and one that sends a wrong number."""

from pathlib import Path

import gloo_ranks
import pytest

from hpc_rl.core.trial import load_json

pytestmark = pytest.mark.timeout(120)


def test_it_passes_ranks_that_work_and_names_the_node_of_one_that_does_not(tmp_path: Path):
    gloo_ranks.run(Path(__file__).with_name("collectives_rank.py"), "check", 4, tmp_path, timeout_s=100)
    for rank in range(4):
        found = load_json(tmp_path / f"found-{rank}.json")
        assert "over 4 ranks" in found["fine"]["summary"] and "GB/s" in found["fine"]["summary"]
        assert found["wrong"]["nodes"] == ["n3"] and "n3: " in found["wrong"]["reason"]
        assert "nodes" not in found["all"] and "No node differs" in found["all"]["reason"], "none is avoided"
