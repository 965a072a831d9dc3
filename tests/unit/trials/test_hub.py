"""The hub: what is fetched and pinned, what is uploaded, and what is told without token or network."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, serve_hub
from patience import extend

from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import ConfigError
from hpc_rl.trials import hub

pytestmark = pytest.mark.waits

PUSH = "import sys; from pathlib import Path; from hpc_rl.trials import hub; print(hub.push(Path(sys.argv[1]), {!r}, True))"
CLOSED = "http://127.0.0.1:9"  # nobody listens


def run(argv: list[str], cache, endpoint: str, here) -> subprocess.CompletedProcess:
    """Run a program whose hub is elsewhere: the client reads these variables when it is imported."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
    own["PYTHONPATH"] = str(Path(__file__).parents[3])
    own |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, *argv]
    return subprocess.run(
        command, env=os.environ | own, cwd=here, capture_output=True, text=True, timeout=extend(120)
    )


def test_an_export_is_uploaded_file_by_file(tmp_path):
    (tmp_path / "model").mkdir()
    for name, text in (("README.md", "---\nlibrary_name: transformers\n---\n# t"), ("config.json", "{}")):
        (tmp_path / "model" / name).write_text(text)
    with serve_hub() as fake:
        done = run(
            ["-c", PUSH.format("me/mine"), str(tmp_path / "model")], tmp_path / "hf", fake.url, tmp_path
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/mine")
    (made,) = fake.created
    assert (made["organization"], made["name"]) == ("me", "mine")
    # the client's newest version has another word for it
    assert made.get("private") or made.get("visibility") == "private"
    sent = {
        line["value"]["path"]: line["value"]["content"] for line in fake.committed if line["key"] == "file"
    }
    assert sent.keys() == {"README.md", "config.json"}
    assert base64.b64decode(sent["config.json"]) == b"{}"


def test_an_upload_without_a_network_says_where_the_export_is(tmp_path):
    done = run(["-c", PUSH.format("me/mine"), str(tmp_path)], tmp_path / "hf", CLOSED, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert "CannotWrite: me/mine can't be uploaded: " in last
    assert f"the export is in {tmp_path}; `hf upload me/mine {tmp_path}` tries again" in last


def test_fetch_replaces_names_by_the_files_of_a_commit(tmp_path):
    config = tmp_path / "sft.yaml"
    config.write_text(
        "trainer: sft\nexperiment_name: e\ntrial_name: t\nmodel: {path: me/base}\ntrain_dataset: {path: you/rows@main}\n"
    )
    with serve_hub() as fake:
        for name in ("config.json", "model.safetensors", "model.bin"):
            fake.files["me/base", name] = b"{}"
        for name in ("data/test.jsonl", "data/train.jsonl"):
            fake.files["you/rows", name] = json.dumps({"prompt": "1", "answer": "1"}).encode()
        argv = ["-m", "hpc_rl.cli", "submit", str(config), "--fetch", "--dry_run", "--json"]
        done = run(argv, tmp_path / "hf", fake.url, tmp_path)
        loaded = tmp_path / "hf/hub"
        base = loaded / f"models--me--base/snapshots/{COMMIT}"
        rows = loaded / f"datasets--you--rows/snapshots/{COMMIT}/data/train.jsonl"
        assert done.stderr.splitlines()[:2] == [
            f"fetched    model.path: me/base at commit {COMMIT}, in {base}",
            f"fetched    train_dataset.path: you/rows at commit {COMMIT}, in {rows}",
        ]
        assert rows.is_file() and (base / "model.safetensors").is_file() and not (base / "model.bin").exists()
        refusals = " ".join(json.loads(done.stdout)["refusals"])
        assert str(base) in refusals, "its files are tiny, so the checks refuse the folder, not the name"
        missing = run(
            ["-m", "hpc_rl.cli", "check", str(config), "--fetch", "model.path=me/other"],
            tmp_path / "hf", fake.url, tmp_path,
        )  # fmt: skip
    assert missing.returncode == 64
    assert "model.path me/other can't be fetched from the hub: " in missing.stderr
    assert hub.find_origin(base) == ("me/base", COMMIT) and hub.find_origin(tmp_path) == ("", "")


@pytest.mark.parametrize(
    "name, environ, words",
    [
        ("mine", {}, "is not the name of a repository; give OWNER/NAME"),
        ("me/mine", {}, "needs a token of the hub that may write; run `hf auth login`, or export HF_TOKEN"),
    ],
)
def test_a_push_is_refused_before_the_export(monkeypatch, tmp_path, name, environ, words):
    import huggingface_hub
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="--push") as caught:
        hub.check_push(name)
    assert words in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if not name.startswith("mine"):
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
            hub.check_push(name)


def test_private_needs_a_push(fake_trial, make_generation, capsys):
    make_generation(fake_trial.trial, 3)
    assert main(["export", str(fake_trial.trial.dir), "--private"]) == 64
    assert "add --push OWNER/NAME" in capsys.readouterr().err
