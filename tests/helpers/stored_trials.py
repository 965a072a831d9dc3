"""Two trials as they are on disk, from tests/fixtures/trials."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
import xxhash

from hpc_rl.core.trial import Trial, find_account_name

STORED = Path(__file__).parents[1] / "fixtures" / "trials" / "trials.tar.gz"
BINARY = (".zip", ".safetensors", ".ledger", ".seal")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory of submission with both trials in it."""
    with tarfile.open(STORED) as tar:
        tar.extractall(tmp_path, filter="data")
    trials = tmp_path / "runs" / find_account_name() / "stored"
    trials.parent.mkdir(parents=True)
    (tmp_path / "trials").rename(trials)
    python = Path(sys.executable)
    paths = {"TRIALS": trials, "ROOT": tmp_path, "PYTHON": python, "BIN": python.parent, "CODE": tmp_path}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix not in BINARY:
            text = path.read_text()
            for name, value in paths.items():
                text = text.replace(f"@{name}@", str(value))
            path.write_text(text)
    for manifest in trials.glob("*/recover/*/manifest.json"):
        update_checksums(manifest)
    for name in ("finished", "stopped"):
        Trial(trials / name).make_secret()
    return tmp_path


def update_checksums(manifest: Path) -> None:
    """Compute them anew: of each file, and of the manifest without its own."""
    data = json.loads(manifest.read_text())
    del data["xxh3"]
    for file in data["files"]:
        path = manifest.parent / file["name"]
        if path.exists():
            content = path.read_bytes()
            file |= {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    data["xxh3"] = xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
    manifest.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def trial_of(folder: Path, name: str) -> Trial:
    return Trial(folder / "runs" / find_account_name() / "stored" / name)
