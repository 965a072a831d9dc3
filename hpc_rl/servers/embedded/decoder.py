"""The model of the embedded engine: a Hugging Face causal LM with a KV cache in rows, and its weights.

There are two decoders. `HFDecoder` calls the module through transformers' Cache API and supports any causal
LM with full attention. `FusedDecoder` runs the layers of Llama, Qwen2 and Qwen3 itself, with q/k/v and
gate/up in one product each; it is used only if it agrees with the module on a probe. Not supported:
sliding-window and recurrent layers, and more than one device.

Shapes: N rows, T tokens of a prompt, S tokens of cache, H heads, K key heads, G = H / K, D head size, V
vocabulary.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.utils.logging import disable_progress_bar

from hpc_rl.core import adapters
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError
from hpc_rl.servers.embedded.changes import PreparedChanges

logger = logging.getLogger(__name__)

FUSED_TYPES = ("llama", "qwen2", "qwen3")
PROBE_TOLERANCE = 1e-3
_A, _B = ".lora_A.weight", ".lora_B.weight"


class CacheRows:
    """KV cache of rows that are decoded together. Row i has its tokens in columns 0 … length_i - 1.

    `tensors` [rows, K, columns, D] are keys and values of the first layer, of the second, and so on. Rows
    after the live rows and columns after a row's length contain garbage.
    """

    def __init__(self, num_layers: int) -> None:
        self.tensors: list[torch.Tensor] = []
        self.num_layers = num_layers

    @property
    def capacity(self) -> tuple[int, int]:
        return (self.tensors[0].shape[0], self.tensors[0].shape[2]) if self.tensors else (0, 0)

    def reserve(
        self, rows: int, columns: int, like: torch.Tensor, live: tuple[int, int], exact: bool
    ) -> None:
        """Make room for `rows` x `columns`; keep the `live` part. Unless `exact`, double the capacity."""
        have_rows, have_columns = self.capacity
        if rows <= have_rows and columns <= have_columns:
            return
        if not exact:
            rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
            more = 0 if columns <= have_columns else max(64, have_columns // 2)
            columns = max(columns, have_columns + more)
        self.tensors = self.tensors or [like[:0]] * (2 * self.num_layers)
        for index, tensor in enumerate(self.tensors):
            # zeros: garbage times a weight of 0 must not be NaN
            new = like.new_zeros(rows, like.shape[1], columns, like.shape[3])
            new[: live[0], :, : live[1]] = tensor[: live[0], :, : live[1]]
            self.tensors[index] = new

    def write(self, first: int, prefilled: list[torch.Tensor], pick: torch.Tensor | None) -> None:
        """Write prefilled rows [m, K, T, D] at `first`: the rows in `pick`, in order, or all if None."""
        for tensor, new in zip(self.tensors, prefilled, strict=True):
            rows = new if pick is None else new[pick]
            tensor[first : first + len(rows), :, : rows.shape[2]] = rows

    def copy(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copy the first `columns` columns of rows."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for tensor in self.tensors:
            tensor[target, :, :columns] = tensor[source, :, :columns]


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
    """Decodes any causal LM with full attention through its forward method.

    `prefill` starts rows, `decode` adds one token to each row.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits [m, V] after each row's last token, keys and values [m, K, T, D] as in CacheRows.

        `ids` [m, T] are padded on the right.
        """
        cache: Any = DynamicCache()
        wanted, where = torch.unique(lengths - 1, return_inverse=True)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        at = {"position_ids": positions, "past_key_values": cache, "logits_to_keep": wanted}
        output = self.model(input_ids=ids, use_cache=True, **at)
        logits = output.logits[torch.arange(len(ids), device=ids.device), where]
        return logits.float(), [part for layer in cache.layers for part in (layer.keys, layer.values)]

    def decode(self, ids: torch.Tensor, lengths: torch.Tensor, rows: CacheRows, columns: int) -> torch.Tensor:
        """Return logits [N, V] of ids [N] at positions `lengths` in rows 0 … N - 1 of `columns` columns."""
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


class FusedDecoder:
    """Decodes Llama, Qwen2 and Qwen3 with fused weights.

    The module's weights become views of the fused weights, so memory holds them once.
    """

    def __init__(self, model: Any) -> None:
        config, base = model.config, model.model
        self.model, self.base = model, base
        first = base.layers[0].self_attn
        self.head_size, self.scale = first.head_dim, first.scaling
        self.num_heads, self.num_key_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.layers = [self._fuse(layer) for layer in base.layers]
        self.cos, self.sin = self._rotary(min(config.max_position_embeddings, 4096))

    def _fuse(self, layer: Any) -> dict[str, torch.Tensor | None]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        if attention.o_proj.bias is not None or mlp.down_proj.bias is not None:
            raise NotImplementedError("output projections with a bias are not supported")
        norms = None
        if hasattr(attention, "q_norm"):  # Qwen3: per head, one weight for queries and one for keys
            parts = [attention.q_norm.weight] * self.num_heads
            parts += [attention.k_norm.weight] * self.num_key_heads
            norms = torch.stack([part.detach() for part in parts])
        return {
            "norm": layer.input_layernorm.weight.detach(),
            "qkv": _join(qkv, "weight"),
            "qkv_bias": _join(qkv, "bias"),
            "qk_norm": norms,
            "out": attention.o_proj.weight.detach().t(),
            "mlp_norm": layer.post_attention_layernorm.weight.detach(),
            "gate_up": _join((mlp.gate_proj, mlp.up_proj), "weight"),
            "down": mlp.down_proj.weight.detach().t(),
        }

    def _rotary(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine tables [positions, 1, D]; the sine includes the sign of rotate_half."""
        at = torch.arange(num_positions, device=self.base.embed_tokens.weight.device)[None]
        cos, sin = self.base.rotary_emb(self.base.embed_tokens.weight[:1], at)
        half = self.head_size // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0, :, None].clone(), signed[:, None]

    def _tables(self, positions: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        if largest >= len(self.cos):
            self.cos, self.sin = self._rotary(2 * largest)
        return self.cos[positions], self.sin[positions]

    def _heads(
        self, x: torch.Tensor, layer: dict[str, Any], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute q [N, H, D], k and v [N, K, D] from hidden states [N, hidden], with norms and rotation."""
        num_qk = self.num_heads + self.num_key_heads
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], layer["norm"], self.eps), layer["qkv"], layer["qkv_bias"])
        qkv = qkv.view(len(x), num_qk + self.num_key_heads, self.head_size)
        qk = qkv[:, :num_qk]
        if layer["qk_norm"] is not None:
            qk = F.rms_norm(qk, (self.head_size,), None, self.eps) * layer["qk_norm"]
        left, right = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((right, left), dim=-1), sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_qk:]

    def _finish(self, x: torch.Tensor, attended: torch.Tensor, layer: dict[str, Any]) -> torch.Tensor:
        x = torch.addmm(x, attended, layer["out"])
        normed = F.rms_norm(x, x.shape[-1:], layer["mlp_norm"], self.eps)
        gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer["down"])

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.base.norm.weight, self.eps)
        return F.linear(normed, self.model.lm_head.weight).float()

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        m, t = ids.shape
        cos, sin = self._tables(torch.arange(t, device=ids.device).repeat(m), t)
        x = F.embedding(ids.view(-1), self.base.embed_tokens.weight)
        prefilled = []
        for layer in self.layers:
            q, k, v = self._heads(x, layer, cos, sin)
            q, k, v = (part.reshape(m, t, -1, self.head_size).transpose(1, 2) for part in (q, k, v))
            prefilled += [k, v]
            options = {"scale": self.scale, "enable_gqa": self.num_heads != self.num_key_heads}
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            x = self._finish(x, attended.transpose(1, 2).reshape(m * t, -1), layer)
        last = torch.arange(m, device=ids.device) * t + lengths - 1
        return self._logits(x[last]), prefilled

    def decode(self, ids: torch.Tensor, lengths: torch.Tensor, rows: CacheRows, columns: int) -> torch.Tensor:
        n, heads, size = len(ids), self.num_key_heads, self.head_size
        capacity = rows.capacity[1]
        cos, sin = self._tables(lengths, columns)
        numbers = torch.arange(n * heads, device=ids.device)
        lengths = lengths.repeat_interleave(heads)
        slots = numbers * capacity + lengths  # where each (row, head) stores its token in the flat cache
        mask = torch.zeros(n * heads, 1, columns, dtype=self.cos.dtype, device=ids.device)
        beyond = torch.arange(columns, device=ids.device)[None] > lengths[:, None]
        mask.masked_fill_(beyond[:, None], float("-inf"))
        x = F.embedding(ids, self.base.embed_tokens.weight)
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(x, layer, cos, sin)
            keys, values = rows.tensors[2 * index : 2 * index + 2]
            keys.view(-1, size).index_copy_(0, slots, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, slots, v.reshape(-1, size))
            k, v = (store[:n, :, :columns].flatten(0, 1) for store in (keys, values))
            scores = torch.baddbmm(mask, q.reshape(n * heads, -1, size), k.transpose(1, 2), alpha=self.scale)
            x = self._finish(x, torch.bmm(scores.softmax(-1), v).view(n, -1), layer)
        return self._logits(x)


def _join(modules: tuple[Any, ...], name: str) -> torch.Tensor | None:
    """Join the modules' parameters into one tensor; they become views of it."""
    parts = [getattr(module, name) for module in modules]
    if any(part is None for part in parts):
        return None
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joined


Decoder = HFDecoder | FusedDecoder


class Model:
    """A checkpoint in memory with its decoder and limits."""

    def __init__(self, path: str, dtype: str, scratch: bool = False) -> None:
        """Load the model. Raises ConfigError if it is not supported, OSError if the path can't be read."""
        self.path, self.dtype = path, getattr(torch, dtype)
        self._base: dict[str, torch.Tensor] = {}  # the weights that an adapter has changed, without it
        self._adopt(_build(path, self.dtype, scratch))

    def _adopt(self, module: Any) -> None:
        config = module.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ConfigError(
                f"the embedded engine can't serve {config.model_type} models with layers of kind "
                f"{', '.join(sorted(kinds))}; use sglang servers"
            )
        self.module = module.eval().requires_grad_(False)
        self.num_layers = config.num_hidden_layers
        self.vocab_size = module.get_output_embeddings().weight.shape[0]
        self.context_length = config.max_position_embeddings
        self.eos_ids = _find_eos_ids(module)
        self.decoder: Decoder = self._choose()

    def _choose(self) -> Decoder:
        config = self.module.config
        generic = HFDecoder(self.module)
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if config.model_type not in FUSED_TYPES or rope in ("dynamic", "longrope"):
            return generic
        try:
            fused = FusedDecoder(self.module)
            difference = _probe(generic, fused, self.num_layers, min(self.vocab_size, 1000))
        # an unknown variant of the architecture
        except (NotImplementedError, AttributeError, RuntimeError) as error:
            form = "the fast decoder can't run this %s model, so the decoder of transformers is used: %s"
            logger.warning(form, config.model_type, error)
            return generic
        tolerance = PROBE_TOLERANCE if self.dtype == torch.float32 else 1.0
        if not difference < tolerance:
            form = (
                "the fast decoder of %s models is wrong by %.2g here, so the decoder of transformers is used"
            )
            logger.warning(form, config.model_type, difference)
            return generic
        return fused

    def release(self) -> None:
        """Drop the weights; `load` must come next."""
        del self.module, self.decoder
        self._base = {}

    @property
    def is_released(self) -> bool:
        return not hasattr(self, "module")

    def load(self, path: str) -> None:
        """Load the weights of another checkpoint with the same architecture.

        If it raises OSError or ValueError, the old weights are unchanged.
        """
        if self.is_released:
            self._adopt(_build(path, self.dtype, False))
            self.path = path
            return
        if adapters.is_adapter(Path(path)):
            self._load_adapter(Path(path))
            return
        tensors = _load_tensors(Path(path))
        names = dict(self.module.named_parameters(remove_duplicate=False))
        own = {name: p for name, p in names.items() if not (name not in tensors and self._is_tied(name))}
        if tensors.keys() != own.keys():  # transformers renames these tensors when it loads them
            self._adopt(_build(path, self.dtype, False))
            self.path, self._base = path, {}
            return
        self._check_shapes(path, tensors, own)
        for name, parameter in own.items():
            parameter.data.copy_(tensors[name])
        self.finish_writing()
        self.path, self._base = path, {}

    def _load_adapter(self, folder: Path) -> None:
        """Merge an adapter into the weights of the base; it replaces the adapter before."""
        settings = AdapterSettings.read(folder)
        tensors = load_file(folder / adapters.WEIGHTS_NAME)
        names = dict(self.module.named_parameters())
        layers = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
        if len(tensors) != 2 * len(layers):
            raise ValueError(f"{folder} has tensors other than LoRA matrices")
        wanted = {f"{layer.removeprefix(adapters.PREFIX)}.weight": layer for layer in layers}
        if unknown := wanted.keys() - names.keys():
            raise ValueError(f"the adapter in {folder} changes {min(unknown)}, which the model does not have")
        for name in self._base.keys() - wanted.keys():
            names[name].data.copy_(self._base.pop(name))
        for name, layer in wanted.items():
            base = self._base.setdefault(name, names[name].detach().clone())
            product = tensors[layer + _B].float() @ tensors[layer + _A].float()
            names[name].data.copy_(base.float() + settings.alpha / settings.rank * product)
        self.path = str(folder)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite some weights, by their names in the module; call `finish_writing` after the last ones.

        Raises ValueError if a tensor does not belong to the model; then none is changed.
        """
        names = dict(self.module.named_parameters(remove_duplicate=False))
        if unknown := [name for name in tensors if name not in names]:
            raise ValueError(f"the model lacks weights named {unknown[0]}")
        self._check_shapes("the sent weights", tensors, {name: names[name] for name in tensors})
        for name, tensor in tensors.items():
            names[name].data.copy_(tensor)

    def apply(self, changes: PreparedChanges) -> bool:
        """Overwrite the changed weights; return false if they are not of this module, and change nothing."""
        if self.is_released:
            return False
        tensors = {name: p.data for name, p in self.module.named_parameters(remove_duplicate=False)}
        sizes = {name: tensor.numel() for name, tensor in tensors.items() if not self._is_tied(name)}
        if not changes.fits(tensors) or (changes.base is None and not changes.covers(sizes)):
            return False
        if changes.base is None:
            self._base = {}
        for part in changes.parts:
            part.write(tensors[part.rectangle.name])
        self.finish_writing()
        return True

    def list_names(self) -> set[str]:
        """Return the names of all weights, without an output layer that is tied to the embedding."""
        names = (name for name, _ in self.module.named_parameters(remove_duplicate=False))
        return {name for name in names if not self._is_tied(name)}

    def finish_writing(self) -> None:
        """Compute again the tensors that depend on the weights."""
        if isinstance(self.decoder, FusedDecoder):
            for fused, layer in zip(self.decoder.layers, self.module.model.layers, strict=True):
                if fused["qk_norm"] is not None:
                    heads = self.decoder.num_heads
                    fused["qk_norm"][:heads] = layer.self_attn.q_norm.weight
                    fused["qk_norm"][heads:] = layer.self_attn.k_norm.weight

    @staticmethod
    def _check_shapes(source: str, tensors: dict[str, torch.Tensor], own: dict[str, Any]) -> None:
        for name, parameter in own.items():
            if tensors[name].shape != parameter.shape:
                found, own_shape = list(tensors[name].shape), list(parameter.shape)
                raise ValueError(f"{source}: {name} is {found}, the model has {own_shape}")

    def compute_checksums(self) -> dict[str, str]:
        """Return the xxh3 (64 bits, hex) of each parameter's bytes, by its name in memory."""
        return {
            name: xxhash.xxh3_64_hexdigest(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            for name, one in self.module.named_parameters()
        }

    def _is_tied(self, name: str) -> bool:
        return name == "lm_head.weight" and bool(getattr(self.module.config, "tie_word_embeddings", False))


def _build(path: str, dtype: torch.dtype, scratch: bool) -> Any:
    disable_progress_bar()
    try:
        if scratch:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (KeyError, TypeError, RuntimeError) as error:
        message = f"{path}: not a causal language model that transformers can load: {error}"
        raise ValueError(message) from error


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(files):
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path / file} does not exist")
        try:
            tensors |= load_file(path / file)
        except SafetensorError as error:
            raise ValueError(f"{path / file}: {error}") from error
    return tensors


def _find_eos_ids(module: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation config, else of the config."""
    for config in (getattr(module, "generation_config", None), module.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()


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
