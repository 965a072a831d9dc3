"""Rows of parameter_status.tsv say `works`: a sample of them, another each day, shows that their tests would notice.

`make rows` does it with all of them.
"""

import dataclasses
import datetime
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from patience import extend

BITE = Path(__file__).with_name("bite.py")


@dataclasses.dataclass
class Options:
    size: int = 1
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class OthersOptions(Options): ...


def test_a_disconnected_option_is_the_default_for_the_product_and_a_value_for_tests():
    tool = runpy.run_path(str(BITE.with_name("disconnect.py")))
    tool["disconnect"](Options, "size")
    tool["disconnect"](OthersOptions, "names")
    product = {"__name__": "hpc_rl.somewhere"}
    exec("def read(options): return options.size, vars(options)['size'], options.names", product)
    here, there = Options(7, ["a"]), OthersOptions(7, ["a"])
    assert product["read"](here) == (1, 1, ["a"]) and product["read"](there) == (1, 1, [])
    assert (here.size, there.names) == (7, ["a"])
    assert dataclasses.replace(here, names=[]) == Options(7) != Options(1)


@pytest.mark.timeout(900)
def test_a_sample_of_rows_is_noticed_when_it_is_disconnected():
    seed = str(datetime.datetime.now(datetime.UTC).date().toordinal())
    argv = [sys.executable, str(BITE), "--sample", "2", "--seed", seed, "--jobs", "1"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=extend(880), check=False)
    assert run.returncode == 0, f"{' '.join(argv[1:])}\n{run.stdout}{run.stderr}"
