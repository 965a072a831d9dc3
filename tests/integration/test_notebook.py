"""docs/notebook.ipynb runs as it stands: two trials, frames, a plot, a fork and an export."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from patience import extend
from toy_trials import ROOT, make_toy

import hpc_rl

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a kernel does; return the value of its last expression, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


@pytest.mark.timeout(extend(900))
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_toy(tmp_path / "quickstart", "base")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    shown = [
        run_cell("".join(cell["source"]), names) for cell in notebook["cells"] if cell["cell_type"] == "code"
    ]
    for value in shown:
        if hasattr(value, "_repr_html_"):
            assert value._repr_html_()
    assert [trial.state for trial in names["trials"]] == ["done", "done"]
    frame = names["frames"]["lr-0.002"]
    assert list(frame["step"]) == [*range(1, 9)], "one row per step"
    assert list(frame.loc[frame["eval_loss"].notna(), "step"]) == [4, 8]
    assert len(names["figure"].data) == 2
    assert names["best"].name == "lr-0.002"
    assert names["fork"].step == 10
    assert "config.json" in shown[-2] and any(name.endswith(".safetensors") for name in shown[-2])
    assert {trial.name for trial in shown[-1]} == {"lr-0.0001", "lr-0.002", "longer"}
    assert hpc_rl.Trial("longer").metrics().column("step")[-1] == 10
