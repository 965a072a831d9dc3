"""docs/environments.md: the file and the commands of its first part, as a reader would type them."""

import json
import re
from pathlib import Path

import pytest
from command_line import Shell

from hpc_rl.config.options.environments import EnvironmentsConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()


def block(mark: str) -> str:
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found, mark
    return found[1]


@pytest.mark.timeout(400)
def test_from_an_empty_file_to_a_trained_model(tmp_path):
    shell = Shell(tmp_path)
    (shell.here / "configs").symlink_to(ROOT / "configs")
    code, commands = block("file: sums.py"), block("run: tests/integration/test_environments_page.py")
    assert len(code.splitlines()) + len(commands.splitlines()) <= 40
    (shell.here / "sums.py").write_text(code)
    said = {}
    for line in commands.replace("\\\n", " ").splitlines():
        command = line.partition(" #")[0].strip()
        said[" ".join(command.split()[1:3])] = shell.type(command, timeout_s=300)
    assert "2 groups of 4; to read: groups.html" in said["env process"]
    assert "made by the model" in (shell.here / "groups.html").read_text()
    assert re.search(r"sums +done", shell.run("list").stdout)
    status = shell.run("status", "sums").stdout
    assert "step 40 of 40" in status
    (metrics,) = shell.here.rglob("sums/attempts/*/metrics.0.jsonl")
    rewards = [json.loads(line)["reward"] for line in metrics.read_text().splitlines() if '"reward"' in line]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_options_that_the_page_names_exist():
    for name in set(re.findall(r"environments\.([a-z_]+)", PAGE)) - {"md"}:
        assert name in EnvironmentsConfig.__dataclass_fields__, name
