"""A replica over a real SGLang on the CPU."""

import os
from pathlib import Path

from conformance import ServedReplica
from patience import extend

from hpc_rl.config.options.inference import SGLangConfig
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.servers.server_process import ServerProcess
from hpc_rl.servers.sglang import NAME, SGLangBackend, make_adapter_settings, make_settings

SHIM = Path(__file__).parents[1] / "sglang" / "shim"


def backend_of(
    python: str,
    tokenizer: Path,
    folder: Path,
    extra_args: tuple[str, ...] = (),
    actor: PPOActorConfig | None = None,
) -> SGLangBackend:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    env |= {"PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    of_cpu = SGLangConfig(
        dtype="float32",
        attention_backend="torch_native",
        context_length=4096,
        max_running_requests=64,
        disable_overlap_schedule=True,
    )
    settings = make_settings(of_cpu, "cpu", 1, 0)
    settings["tokenizer_path"] = str(tokenizer)
    if actor is not None:
        settings |= make_adapter_settings(actor, "cpu")
    log = folder / "sglang.log"
    process = ServerProcess(name=NAME, python=python, env=env, log=log, ready_timeout_s=extend(600))
    secret = folder / "sglang.yaml"
    return SGLangBackend(process=process, settings=settings, extra_args=extra_args, secret=secret)


def served_sglang(folder: Path, python: str) -> ServedReplica:
    """Return a replica that serves; its attribute `secret` is the file with its key."""
    replica = ServedReplica(folder, lambda _trial, model: backend_of(python, model, folder))
    replica.start(600)
    replica.secret = folder / "sglang.yaml"
    return replica
