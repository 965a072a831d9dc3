"""A replica over a real vLLM on the CPU."""

import os
from pathlib import Path

from conformance import ServedReplica
from patience import extend

from hpc_rl.config.options.inference import VLLMConfig
from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.servers.server_process import ServerProcess
from hpc_rl.servers.vllm import (
    ADAPTER_ENVIRONMENT,
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    NAME,
    VLLMBackend,
    make_adapter_settings,
    make_settings,
)

# small kernels are not worth compiling
TEST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def backend_of(
    python: str,
    tokenizer: Path,
    folder: Path,
    extra_args: tuple[str, ...] = (),
    actor: PPOActorConfig | None = None,
) -> VLLMBackend:
    own = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "HF_HUB_OFFLINE": "1"}
    env = own | ENVIRONMENT | CPU_ENVIRONMENT | TEST_ENVIRONMENT
    of_cpu = VLLMConfig(
        dtype="float32", gpu_memory_utilization=None, enforce_eager=True, kv_cache_memory_bytes=1 << 28
    )
    settings = make_settings(of_cpu, "cpu", 1, 0, receives=True) | {"tokenizer": str(tokenizer)}
    if actor is not None:
        settings |= make_adapter_settings(actor.lora_rank)
        env |= ADAPTER_ENVIRONMENT
    process = ServerProcess(
        name=NAME, python=python, env=env, log=folder / "vllm.log", ready_timeout_s=extend(600)
    )
    return VLLMBackend(process=process, settings=settings, extra_args=extra_args)


def served_vllm(folder: Path, python: str) -> ServedReplica:
    """Return a replica that serves; its attribute `backend` is what it serves with."""
    made = []

    def make(_trial: object, model: Path) -> VLLMBackend:
        made.append(backend_of(python, model, folder))
        return made[0]

    replica = ServedReplica(folder, make)
    replica.start(600)
    replica.backend = made[0]
    return replica
