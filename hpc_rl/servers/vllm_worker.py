"""Our part of vLLM's worker processes. A copy of this file is imported there; hpc_rl is not installed.

Importing it registers a transfer engine that receives weights over a process group of torch, like SGLang:
gloo on a CPU, NCCL on GPUs.
"""

import hashlib
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

ENGINE = "hpc_rl"
LIMIT = timedelta(seconds=60)  # to join, and for a bucket


@dataclass
class GroupInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GroupEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives buckets of whole tensors. The store has the keys that hpc_rl/servers/weight_group.py uses."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo
    group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        name, kind = init_info.group_name, init_info.backend
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store: Any = dist.TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=LIMIT
        )
        for prefix in (name, f"{name}/", {"gloo": "cpu/", "nccl": "cuda/"}[kind]):
            store = dist.PrefixStore(prefix, store)
        if kind == "gloo":
            self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, LIMIT)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = LIMIT
            self.group = dist.ProcessGroupNCCL(store, rank, init_info.world_size, options)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self.group is None:
            raise RuntimeError("vLLM has joined no process group: call /init_weight_transfer_engine first")
        dtypes = [getattr(torch, name) for name in update_info.dtypes]
        pairs = zip(dtypes, update_info.shapes, strict=True)
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in pairs]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([flat], options).wait()
        parts = zip(update_info.names, flat.split(sizes), dtypes, update_info.shapes, strict=True)
        self.model.load_weights([(name, part.view(dtype).view(shape)) for name, part, dtype, shape in parts])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.abort()
            self.group = None


WeightTransferEngineFactory.register_engine(ENGINE, GroupEngine)


def _hash_tensor(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=8).hexdigest()


class WorkerExtension:
    """Calls of vLLM's `/collective_rpc`."""

    def pack_output_layer(self: Any) -> None:
        """Renew the packed copy of the output layer."""
        # On a CPU vLLM computes with packed copies of the weights. A reload does not pack an output layer
        # that shares its weights with the embedding.
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)

    def compute_checksums(self: Any) -> dict[str, str]:
        """Return a checksum (64 bits, hex) of each parameter's bytes, by vLLM's names."""
        parameters = self.model_runner.get_model().named_parameters()
        return {name: _hash_tensor(parameter) for name, parameter in parameters}

    def abandon_weight_update(self: Any) -> None:
        """End an incomplete update: the weights are a mixture, but can be reloaded."""
        self._weight_update_active = False
        self.weight_transfer_engine.finish_weight_update()
