"""The fast decoder of the embedded engine, and the KV cache in rows.

`FusedDecoder` runs the layers of Llama, Qwen2 and Qwen3 itself, with q/k/v and gate/up in one product each;
hf_decoder.py decodes other models. Not supported: sliding-window and recurrent layers, and more than one
device.

Shapes: N rows, T tokens of a prompt, S tokens of cache, H heads, K key heads, G = H / K, D head size, V
vocabulary.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

FUSED_TYPES = ("llama", "qwen2", "qwen3")  # model_type of the models that FusedDecoder runs


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


class Decoder(Protocol):
    """Computes logits. `prefill` starts rows, `decode` adds one token to each row."""

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits [m, V] after each row's last token, keys and values [m, K, T, D] as in CacheRows.

        `ids` [m, T] are padded on the right.
        """
        ...

    def decode(self, ids: torch.Tensor, lengths: torch.Tensor, rows: CacheRows, columns: int) -> torch.Tensor:
        """Return logits [N, V] of ids [N] at positions `lengths` in rows 0 … N - 1 of `columns` columns."""
        ...

    def compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [m, T, V] of each position of ids [m, T]."""
        ...


class FusedDecoder:
    """See Decoder. Decodes Llama, Qwen2 and Qwen3 with fused weights.

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
            raise NotImplementedError("o_proj or down_proj has a bias")
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
        x, prefilled = self._compute_hidden(ids)
        last = torch.arange(len(ids), device=ids.device) * ids.shape[1] + lengths - 1
        return self._logits(x[last]), prefilled

    def compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self._logits(self._compute_hidden(ids)[0]).view(*ids.shape, -1)

    def _compute_hidden(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return hidden states [m * T, hidden] after the layers, and keys and values as `prefill`."""
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
        return x, prefilled

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
