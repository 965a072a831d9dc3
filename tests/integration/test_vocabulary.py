"""Log-probabilities of a vocabulary that is shared out over ranks, against the whole."""

from pathlib import Path

import gloo_ranks
import pytest

pytestmark = pytest.mark.timeout(120)


def test_parts_of_the_vocabulary_give_what_the_whole_gives(tmp_path: Path) -> None:
    gloo_ranks.run(Path(__file__).with_name("vocabulary_rank.py"), "parts", 2, tmp_path)
