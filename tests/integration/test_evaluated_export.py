"""lm-evaluation-harness on an exported model, by the command that `hpc-rl export` prints."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from own_environments import make_environment
from patience import extend
from toy_trials import ROOT, hpc_rl, make_toy

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def train_and_export(here: Path, folder: str) -> dict:
    make_toy(here / "quickstart", "base")
    words = ["trial_name=small", "total_train_steps=3", "recover.freq_steps=3", "launcher.type=local"]
    hpc_rl("submit", ROOT / "configs/quickstart/sft.yaml", *words, "--follow", cwd=here, timeout_s=300)
    said = hpc_rl("export", "small", "--to", folder, "--json", cwd=here, timeout_s=300).stdout
    return json.loads(said)


@pytest.mark.parametrize("folder", ["handed", "lr=1,x"])
def test_the_printed_command_evaluates_it(tmp_path, folder, harness):
    told = train_and_export(tmp_path, folder)
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks"
    rows.write_text(
        "".join(json.dumps({"question": f"{n}+1+1=", "answer": str(n + 2)}) + "\n" for n in range(6))
    )
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(rows=rows))
    words = shlex.split(told["evaluate"])
    words[words.index("--tasks") + 1] = "sums"  # the printed one would be downloaded
    own = {"PATH": f"{harness.parent}:{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [*words, "--include_path", str(tasks), "--device", "cpu"],
        cwd=tmp_path, env=os.environ | own | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        timeout=extend(600),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "lm_eval_results").rglob("results_*.json")
    found = json.loads(path.read_text())
    assert found["n-samples"]["sums"]["effective"] == 6
    assert 0.0 <= found["results"]["sums"]["exact_match,none"] <= 1.0
    assert told["path"] in json.dumps(found["config"]["model_args"])


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> Path:
    """A Python that has lm-evaluation-harness."""
    return make_environment(tmp_path_factory.mktemp("harness"), "lm_eval[hf]")
