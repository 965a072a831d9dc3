"""Temporary files of killed writers: a later process removes them, and no others."""

import json
import os
import subprocess
import sys
import time

from hpc_rl.core.trial import ORPHAN_S, write_json

KILLED = """
import os, signal, sys
from pathlib import Path
from hpc_rl.core import trial
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
trial.write_json(Path(sys.argv[1]) / "done.json", {})
"""


def test_what_a_killed_writer_left_is_removed_a_day_later(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, tmp_path])
    [orphan] = tmp_path.glob(".done.json.*.tmp")
    write = [sys.executable, "-c", KILLED.replace("os.replace =", "unused ="), tmp_path]
    subprocess.run(write, check=True)
    assert orphan.exists()  # its writer may still live
    kept = [tmp_path / ".of-a-user.tmp", tmp_path / ".gen-00000001.7.0.0.tmp"]
    kept[0].touch()
    kept[1].mkdir()
    long_ago = time.time() - ORPHAN_S - 60
    for path in (orphan, *kept):
        os.utime(path, (long_ago, long_ago))
    subprocess.run(write, check=True)
    assert not orphan.exists() and all(path.exists() for path in kept)


def test_a_file_is_written_where_old_ones_can_not_be_removed(tmp_path, monkeypatch):
    orphan = tmp_path / f".x.json.{'a' * 12}.tmp"
    orphan.touch()
    os.utime(orphan, (0, 0))

    def refuse(*_args, **_more):
        raise PermissionError

    monkeypatch.setattr(os, "unlink", refuse)
    write_json(tmp_path / "x.json", [1])
    assert json.loads((tmp_path / "x.json").read_text()) == [1]
