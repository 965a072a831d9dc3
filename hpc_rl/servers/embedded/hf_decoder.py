"""Models of transformers in the embedded engine: any causal LM with full attention."""

import logging
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.utils.logging import disable_progress_bar

from hpc_rl.servers.embedded.decoder import FUSED_TYPES, CacheRows, Decoder, FusedDecoder

logger = logging.getLogger(__name__)
PROBE_TOLERANCE = 1e-3


class _RowsLayer(CacheLayerMixin):
    """One layer of `CacheRows` with transformers' cache protocol, for one decode step."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, columns: int) -> None:
        super().__init__()
        self.store, self.lengths, self.columns = (keys, values), lengths, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        num_rows = len(self.lengths)
        at = torch.arange(num_rows, device=self.lengths.device)
        for store, new in zip(self.store, (key_states, value_states), strict=True):
            store[at, :, self.lengths] = new[:, :, 0]
        keys, values = self.store
        return keys[:num_rows, :, : self.columns], values[:num_rows, :, : self.columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0

    def get_seq_length(self) -> int:
        return self.columns - 1

    def get_max_length(self) -> int:
        return -1


class HFDecoder:
    """See Decoder. Decodes any causal LM with full attention through its forward method."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache: Any = DynamicCache()
        wanted, where = torch.unique(lengths - 1, return_inverse=True)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        at = {"position_ids": positions, "past_key_values": cache, "logits_to_keep": wanted}
        output = self.model(input_ids=ids, use_cache=True, **at)
        logits = output.logits[torch.arange(len(ids), device=ids.device), where]
        return logits.float(), [part for layer in cache.layers for part in (layer.keys, layer.values)]

    def compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits.float()

    def decode(self, ids: torch.Tensor, lengths: torch.Tensor, rows: CacheRows, columns: int) -> torch.Tensor:
        pairs = zip(rows.tensors[::2], rows.tensors[1::2], strict=True)
        layers: list[Any] = [_RowsLayer(keys, values, lengths, columns) for keys, values in pairs]
        mask = torch.arange(columns, device=ids.device)[None] <= lengths[:, None]
        mask = mask[:, None, None, :]
        if self.model.config._attn_implementation == "eager":
            dtype = self.model.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        cache = Cache(layers=layers)
        at = {"position_ids": lengths[:, None], "attention_mask": mask}
        output = self.model(input_ids=ids[:, None], past_key_values=cache, use_cache=True, **at)
        return output.logits[:, -1].float()


def load_module(path: str, dtype: torch.dtype, scratch: bool) -> Any:
    """Load a causal LM, or make one with random weights. Raises ValueError, OSError."""
    disable_progress_bar()
    try:
        if scratch:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (KeyError, TypeError, RuntimeError) as error:
        message = f"{path}: not a causal language model that transformers can load: {error}"
        raise ValueError(message) from error


def choose_decoder(module: Any) -> Decoder:
    """Return the fast decoder if it agrees with the module on a probe."""
    config, generic = module.config, HFDecoder(module)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FUSED_TYPES or rope in ("dynamic", "longrope"):
        return generic
    vocab_size = min(config.vocab_size, 1000)
    try:
        fused = FusedDecoder(module)
        difference = _probe(generic, fused, config.num_hidden_layers, vocab_size)
    # an unknown variant of the architecture
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        form = "the fast decoder can't run this %s model, so the slower one of transformers is used: %s"
        logger.warning(form, config.model_type, error)
        return generic
    tolerance = PROBE_TOLERANCE if module.dtype == torch.float32 else 1.0
    if not difference < tolerance:
        form = "the fast decoder's logits for this %s model are wrong by up to %.2g (allowed: %.2g), so the "
        form += "slower decoder of transformers is used"
        logger.warning(form, config.model_type, difference, tolerance)
        return generic
    return fused


@torch.inference_mode()
def _probe(one: Decoder, other: Decoder, num_layers: int, vocab_size: int) -> float:
    """Return the largest difference between the logits of two decoders, in a prefill and a decode step."""
    ids = torch.randint(0, vocab_size, (2, 5), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([5, 3])
    results = []
    for decoder in (one, other):
        logits, prefilled = decoder.prefill(ids, lengths)
        rows = CacheRows(num_layers)
        rows.reserve(2, 8, prefilled[0], (0, 0), exact=True)
        rows.write(0, prefilled, None)
        results.append((logits, decoder.decode(ids[:, 0].clone(), lengths, rows, 6)))
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
