"""Which files a snapshot has, and under which names Python finds them."""

from pathlib import Path

import pytest

from hpc_rl.config import snapshot
from hpc_rl.config.load.load import load
from hpc_rl.config.snapshot import list_snapshot_files
from hpc_rl.core.errors import ConfigError

BASE = ["experiment_name=e", "trial_name=t", "actor.path=/m", "train_dataset.path=/d.jsonl"]


def list_files(work: Path, *paths: Path | str) -> list[str]:
    given = [f"launcher.snapshot=[{','.join(str(work / path) for path in paths)}]"]
    config = load([], [*BASE, f"cluster.fileroot={work / 'runs'}", *given], profiles=[]).config
    found = list_snapshot_files(config, work)
    assert all(path.is_file() for path in found.values())
    return sorted(found)


def make_files(work: Path, *names: str) -> None:
    for name in names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("x = 1\n")


def test_paths_below_the_working_directory_keep_their_names_and_others_are_at_the_top(tmp_path):
    work = tmp_path / "work"
    make_files(work, "rewards.py", "tools/data.json", "tools/.git/config", "tools/__pycache__/a.pyc")
    make_files(tmp_path, "elsewhere/lib/a.py")
    assert list_files(work, "rewards.py", "tools", tmp_path / "elsewhere" / "lib") == [
        "lib/a.py",
        "rewards.py",
        "tools/data.json",
    ]


def test_a_part_of_a_package_brings_all_of_it(tmp_path):
    make_files(tmp_path, "mine/__init__.py", "mine/sub/__init__.py", "mine/sub/reward.py", "mine/other.py")
    assert list_files(tmp_path, "mine/sub/reward.py") == [
        "mine/__init__.py",
        "mine/other.py",
        "mine/sub/__init__.py",
        "mine/sub/reward.py",
    ]


def test_the_working_directory_without_its_trials(tmp_path):
    make_files(tmp_path, "rewards.py", "runs/me/e/t/config.json")
    assert list_files(tmp_path, ".") == ["rewards.py"]


def test_refusals_name_the_path(tmp_path, monkeypatch):
    make_files(tmp_path, "work/a.py", "other/a.py")
    with pytest.raises(ConfigError, match=r"launcher\.snapshot: .*/work/none does not exist"):
        list_files(tmp_path / "work", "none")
    with pytest.raises(ConfigError, match=r"would both be copied to a\.py"):
        list_files(tmp_path / "work", "a.py", tmp_path / "other" / "a.py")
    monkeypatch.setattr(snapshot, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match=r"/work/a\.py the copy has more than"):
        list_files(tmp_path / "work", "a.py")


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [(".", ["__init__.py", "lib/my.py"]), ("lib/my.py", ["lib/my.py"]), ("./lib", ["lib/my.py"])],
)
def test_relative_paths_start_at_the_working_directory(tmp_path, monkeypatch, paths, wanted):
    make_files(tmp_path, "__init__.py", "lib/my.py", "runs/me/secret")
    monkeypatch.chdir(tmp_path)
    overrides = [*BASE, "cluster.fileroot=runs", f"launcher.snapshot=[{paths}]"]
    if paths != ".":
        (tmp_path / "__init__.py").unlink()
    config = load([], overrides, profiles=[]).config
    assert sorted(list_snapshot_files(config, Path.cwd())) == wanted
