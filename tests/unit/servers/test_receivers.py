"""Backends that receive weights over a process group; buckets as bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_rl.config import sglang_versions, vllm_versions
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import view_pool
from hpc_rl.config.rules.check import check
from hpc_rl.core.net import list_interfaces
from hpc_rl.servers.base import Receiver, ReplicaPlace
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.sglang import SGLangBackend
from hpc_rl.servers.vllm import VLLMBackend
from hpc_rl.servers.weight_group import Bucket, make_body, pack

WORDS = ["experiment_name=e", "trial_name=t", "total_train_steps=1", "train_dataset.path=/d"]
WORDS += ["train_dataset.batch_size=64", "actor.path=/m"]


def load_config(mode: str) -> GRPOConfig:
    words = [*WORDS, f"actor.weight_update_mode={mode}"]
    config = check(load([], words, profiles=[]), files=False).config
    assert isinstance(config, GRPOConfig)
    return config


def place(device: str, num_gpus: int, address: str = "127.0.0.1") -> ReplicaPlace:
    return ReplicaPlace(0, device, num_gpus, Path("log"), Path("key"), address)


@pytest.mark.parametrize("backend", [SGLangBackend, VLLMBackend])
def test_servers_of_other_projects_receive_over_nccl_on_gpus(backend):
    config = load_config("xccl")
    loopback = next(one.name for one in list_interfaces() if "127.0.0.1" in map(str, one.addresses))
    made = backend.create(config, place("cuda", 4))
    assert made.receiver == Receiver("nccl", 4)
    assert made.process.env["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    assert backend.create(config, place("cpu", 0)).receiver == Receiver("gloo", 1)
    assert backend.create(load_config("disk"), place("cuda", 4)).receiver is None


def part_of(node_rank: int, host: str = "127.0.0.1") -> ReplicaPlace:
    of_two = {"num_nodes": 2, "node_rank": node_rank, "rendezvous": (host, 4711)}
    return replace(place("cuda", 16), **of_two)


def test_the_nodes_of_a_replica_join_one_process_group():
    config = load_config("disk")
    first, second = (SGLangBackend.create(config, part_of(rank)).settings for rank in (0, 1))
    assert {**first, "node_rank": 1} == second and first["node_rank"] == 0
    assert (first["nnodes"], first["tensor_parallel_size"]) == (2, 16)
    assert first["dist_init_addr"] == "127.0.0.1:4711"
    assert SGLangBackend.create(config, part_of(0, "fd77::1")).settings["dist_init_addr"] == "[fd77::1]:4711"
    assert "nnodes" not in SGLangBackend.create(config, place("cuda", 8)).settings
    assert "NCCL_SOCKET_IFNAME" in SGLangBackend.create(config, part_of(0)).process.env
    head, other = (VLLMBackend.create(config, part_of(rank)) for rank in (0, 1))
    own = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 4711, "tensor_parallel_size": 16}
    assert head.settings.items() >= own.items() and other.settings.items() >= own.items()
    assert (head.settings["node_rank"], "headless" in head.settings) == (0, False)
    assert (other.settings["node_rank"], other.settings["headless"]) == (1, True)
    for backend, flags in ((head, vllm_versions.FLAGS), (other, vllm_versions.FLAGS)):
        [known] = flags.values()
        assert backend.settings.keys() <= known.keys()
    [known] = sglang_versions.FLAGS.values()
    assert second.keys() <= known.keys()


def test_vllm_gets_our_transfer_engine_only_with_the_option():
    made = VLLMBackend.create(load_config("xccl"), place("cuda", 1))
    assert json.loads(made.settings["weight_transfer_config"]) == {"backend": "hpc_rl"}
    other = VLLMBackend.create(load_config("disk"), place("cuda", 1))
    assert "weight_transfer_config" not in other.settings


def test_the_embedded_engine_receives_over_gloo():
    config = load_config("xccl")
    assert EmbeddedBackend.create(config, place("cpu", 0)).receiver == Receiver("gloo")
    assert EmbeddedBackend.create(load_config("disk"), place("cpu", 0)).receiver is None


def test_a_frozen_pool_receives_nothing():
    pools = ["pools.judge.path=/j", "allocation_mode=embedded:d1+embedded[judge]:d1+fsdp:d1"]
    config = load([], [*WORDS, "actor.weight_update_mode=xccl", *pools], profiles=[]).config
    assert isinstance(config, GRPOConfig)
    assert EmbeddedBackend.create(view_pool(config, "judge"), place("cpu", 0)).receiver is None


def test_a_bucket_keeps_types_and_shapes():
    tensors = [("a", torch.randn(3, 4)), ("b", torch.tensor(3.0)), ("c", torch.randn(5).to(torch.bfloat16))]
    bucket, flat = pack(tensors)
    assert bucket.num_bytes == flat.numel() == 48 + 4 + 10
    body = json.loads(json.dumps(make_body(bucket, "g", "0.1", last=True, keep_cache=False)))
    assert (body["weight_version"], body["flush_cache"]) == ("0.1", True)
    pairs = zip(Bucket.parse(body).split(flat), tensors, strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"names": [], "dtypes": [], "shapes": []},
        {"names": ["a"], "dtypes": ["save"], "shapes": [[1]]},
        {"names": ["a", "b"], "dtypes": ["float32"], "shapes": [[1]]},
        {"names": ["a"], "dtypes": ["float32"], "shapes": [["x"]]},
        {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[3], [2]]},  # not aligned
    ],
)
def test_a_malformed_bucket_is_refused(body):
    with pytest.raises(ValueError, match="names, dtypes and shapes"):
        Bucket.parse(body)
