"""Copies on a node's own disk, by processes as the roles of a node are: once, whole, and never in the way."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import extend

from hpc_rl.core import node_copies
from hpc_rl.core.node_copies import NodeCopies

READER = """
import sys
from pathlib import Path
import filelock
from hpc_rl.core.node_copies import NodeCopies

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: of all files, by all threads

copies = NodeCopies(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
before = bytes_read()
path = Path(copies.find_path(sys.argv[2]))
asking = bytes_read() - before
print(path, asking, sum(len(one.read_bytes()) for one in path.glob("*.safetensors")), flush=True)
"""
LITTLE = 100_000  # bytes of other files


def make_model(folder: Path, num_bytes: int, num_files: int = 4) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for number in range(num_files):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            for start in range(0, num_bytes // num_files, 1 << 20):
                file.write(os.urandom(min(1 << 20, num_bytes // num_files - start)))
    return folder


def start(disk: Path, model: Path) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", READER, str(disk), str(model)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdout and process.stdin
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("\n")
    process.stdin.flush()


def check_readers(count: int, model: Path, disk: Path) -> None:
    """Have so many processes read the model at once: one reads the original, once, and all read its copy."""
    processes = [start(disk, model) for _ in range(count)]
    for process in processes:
        go(process)
    answers = [process.communicate(timeout=extend(900))[0].split() for process in processes]
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert {(Path(path).name, int(read)) for path, _, read in answers} == {(model.name, num_bytes)}
    assert all(Path(path).is_relative_to(disk) for path, *_ in answers)
    *others, first = sorted(int(asking) for _, asking, _ in answers)
    # the original, and the copy to compare it
    assert 2 * num_bytes <= first < 2 * num_bytes + LITTLE and others[-1] < LITTLE


def test_three_processes_read_the_original_once(tmp_path):
    check_readers(3, make_model(tmp_path / "model", 3 << 20), tmp_path / "disk")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_eight_processes_read_one_gb_once(tmp_path):
    check_readers(8, make_model(tmp_path / "model", 1 << 30), tmp_path / "disk")


def check_kills(tmp_path: Path, num_kills: int, num_bytes: int) -> int:
    """Kill the process that copies, at any instant; return how many kills came before the copy was whole."""
    model, cut = make_model(tmp_path / "model", num_bytes), 0
    before = time.monotonic()
    warm_up = start(tmp_path / "warm", model)
    go(warm_up)
    warm_up.communicate(timeout=extend(300))
    duration_s = time.monotonic() - before
    for number in range(num_kills):
        disk = tmp_path / f"disk{number}"
        killed, waits = start(disk, model), start(disk, model)
        go(killed)
        time.sleep(random.uniform(0, duration_s))
        killed.send_signal(signal.SIGKILL)
        go(waits)
        answer = waits.communicate(timeout=extend(300))[0].split()
        copy = Path(answer[0])
        assert copy.is_relative_to(disk) and int(answer[2]) == sum(
            path.stat().st_size for path in model.glob("*.safetensors")
        )
        for path in model.iterdir():
            assert (copy / path.name).read_bytes() == path.read_bytes()
        assert not list(disk.glob("**/.partial-*"))
        killed_answer = killed.communicate(timeout=extend(60))[0]
        cut += not killed_answer
    return cut


def test_what_a_kill_cuts_off_is_copied_again(tmp_path):
    check_kills(tmp_path, 3, 32 << 20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path):
    assert check_kills(tmp_path, 100, 256 << 20) > 10, "some of the kills came in the middle"


def test_what_was_replaced_is_copied_again(tmp_path):
    model, copies = make_model(tmp_path / "model", 4096), NodeCopies(tmp_path / "disk")
    first = Path(copies.find_path(str(model)))
    (model / "config.json").write_text('{"other": 1}')
    second = Path(copies.find_path(str(model)))
    assert (first / "config.json").read_text() == "{}"
    assert (second / "config.json").read_text() == '{"other": 1}'
    assert Path(copies.find_path(str(model))) == second


def test_other_forms_of_the_weights_and_folders_are_linked_and_not_copied(tmp_path):
    model, copies = make_model(tmp_path / "model", 4096), NodeCopies(tmp_path / "disk")
    (model / "pytorch_model.bin").write_bytes(b"the same weights")
    (model / "templates").mkdir()
    copy = Path(copies.find_path(str(model)))
    assert (copy / "pytorch_model.bin").readlink() == model / "pytorch_model.bin"
    assert (copy / "templates").readlink() == model / "templates"
    assert not (copy / "model-0.safetensors").is_symlink()


def test_without_room_the_original_is_read_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    model, copies = make_model(tmp_path / "model", 4096), NodeCopies(tmp_path / "disk")
    monkeypatch.setattr(node_copies, "SPARE_BYTES", 1 << 60)
    assert copies.find_path(str(model)) == str(model)
    assert "and 1073741824.0 GB to spare are needed" in caplog.text and "are free in" in caplog.text
    assert not list((tmp_path / "disk").glob("**/*.safetensors"))


def test_a_file_is_copied_under_its_name(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    copy = Path(NodeCopies(tmp_path / "disk").find_path(str(data)))
    assert copy.name == "train.jsonl" and copy.read_text() == "{}\n" and copy != data


def test_a_file_is_made_once_on_a_node(tmp_path):
    copies, calls = NodeCopies(tmp_path), []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("made")

    assert copies.make_once("key", ".txt", make).read_text() == "made"
    assert copies.make_once("key", ".txt", make).read_text() == "made"
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError):
        copies.make_once("other", ".txt", lambda path: path.write_text(str(1 / 0)))
