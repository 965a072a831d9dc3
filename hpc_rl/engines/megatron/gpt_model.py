"""Megatron-core's GPTModel for a Hugging Face architecture; it returns log-probabilities and entropies."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hpc_rl.config.megatron_models import find_odd_layers
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.megatron.experts import GroupedExperts, replace_dispatchers
from hpc_rl.engines.megatron.modules import AllTokens, Norm, PackedAttention
from hpc_rl.engines.megatron.packed import RankBatch
from hpc_rl.engines.megatron.weight_map import ARCHITECTURES, pad_vocabulary
from hpc_rl.engines.shared.logprobs import choose_tile, token_logprobs
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.model import DTYPES


def check_architecture(hf: Any, path: str) -> None:
    """Raise ConfigError if this engine does not support the model. `hf` is its transformers config."""
    if hf.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"{path} is a {hf.model_type} model, but the megatron backend can train "
            f"{', '.join(sorted(ARCHITECTURES))} only; use fsdp"
        )
    odd = find_odd_layers(hf.to_dict())
    if odd:
        named = ", ".join(f"{key}: {value}" for key, value in odd.items())
        raise ConfigError(
            f"the megatron backend can't train a model with {named} (config.json of {path}); use fsdp"
        )


def check_layout(hf: Any, mesh: Mesh, virtual: int | None) -> None:
    """Raise ConfigError if the mesh can't divide the model."""
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    stages = mesh.pipeline * (virtual or 1)
    num_experts = getattr(hf, ARCHITECTURES[hf.model_type].num_experts or "none", 0)
    width = getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size
    problems = []
    if heads % mesh.tensor:
        problems.append(f"its {heads} attention heads can't be divided by t{mesh.tensor}")
    if groups % mesh.tensor and mesh.tensor % groups:
        problems.append(
            f"its {groups} key-value heads neither divide t{mesh.tensor} nor are a multiple of it"
        )
    if hf.intermediate_size % mesh.tensor:
        problems.append(f"its intermediate_size {hf.intermediate_size} can't be divided by t{mesh.tensor}")
    if hf.num_hidden_layers % stages:
        what = f"p{mesh.pipeline}" + (f" times {virtual} chunks" if virtual else "")
        problems.append(f"its {hf.num_hidden_layers} layers can't be divided by {what}")
    if mesh.experts > 1 and not num_experts:
        problems.append(f"it has no experts for e{mesh.experts}")
    if num_experts and num_experts % mesh.experts:
        problems.append(f"its {num_experts} experts can't be divided by e{mesh.experts}")
    if num_experts and width % mesh.expert_tensor:
        problems.append(
            f"the width {width} of its experts can't be divided by {mesh.expert_tensor} tensor ranks"
        )
    rows = pad_vocabulary(hf.vocab_size, mesh.tensor) // mesh.tensor
    if rows * (mesh.tensor - 1) >= hf.vocab_size:
        problems.append(f"its {hf.vocab_size} tokens are too few for t{mesh.tensor}")
    if virtual and mesh.pipeline < 2:
        problems.append(f"{virtual} virtual stages need a pipeline, as p2")
    if problems:
        raise ConfigError(f"allocation_mode can't divide the model with megatron: {'; '.join(problems)}")


def make_transformer_config(
    hf: Any, config: TrainEngineConfig, mesh: Mesh, device: torch.device, **more: Any
) -> Any:
    """Return Megatron's configuration of the layers. `hf` is the transformers config."""
    architecture = ARCHITECTURES[hf.model_type]
    dtype = DTYPES[config.dtype]
    options = dict[str, Any](
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=get_head_size(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.head_norms,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.experts,
        expert_tensor_parallel_size=mesh.expert_tensor,
        sequence_parallel=mesh.tensor > 1,
        # micro-batches differ in length; this is checked for models without experts too
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # weights are read, or drawn, later
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # fused kernels that need a GPU, Transformer Engine or Apex
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    if architecture.num_experts:
        options |= {
            "num_moe_experts": getattr(hf, architecture.num_experts),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
            # True: the weights of all experts sum to 1; False: the weights of the chosen experts do
            "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    return TransformerConfig(**{**options, **more})


def get_head_size(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


class PolicyModel(GPTModel):
    """A pipeline stage, or a chunk of one. The last returns numbers for the wanted tokens."""

    def __init__(
        self,
        hf: Any,
        config: Any,
        angles: torch.Tensor,
        options: TrainEngineConfig,
        kernel: str,
        vp_stage: int | None,
    ) -> None:
        is_critic = options.is_critic
        self.vocabulary = hf.vocab_size
        self.padding_id = hf.pad_token_id
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        super().__init__(
            config=config,
            transformer_layer_spec=_choose_layers(config, kernel, vp_stage, options.use_lora),
            vocab_size=pad_vocabulary(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not is_critic,
            position_embedding_type="none",  # angles of the rows' positions are computed once for all layers
            vp_stage=vp_stage,
        )
        replace_dispatchers(self)
        self.entropy_clamp = 0.0  # see token_logprobs
        self.angles = angles  # float32 [head size / 2]: rotation of each pair of channels per position
        self.first_layer = get_transformer_layer_offset(config, vp_stage=vp_stage)
        if last and is_critic:
            self.output_layer = None
            self.score = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=angles.device
            )

    def forward(self, batch: RankBatch, temperature: float) -> Any:
        """Return log-probabilities and entropies of wanted tokens [N]; hidden states on earlier stages."""
        embedded = self._compute_embeddings(batch) if self.pre_process else None
        if embedded is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()  # recomputed layers get no gradients without one for their input
        turned_tc = torch.outer(batch.position_ids[0].float(), self.angles)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=torch.cat([turned_tc, turned_tc], dim=1)[:, None, None],
            packed_seq_params=batch.rows,
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        at = temperature if batch.temperature_n is None else batch.temperature_n
        logprobs_n, entropy_n = self._numbers(hidden[:, 0][batch.source_n], batch.targets_n, at)
        return self._of_all_tokens(logprobs_n, batch), self._of_all_tokens(entropy_n, batch)

    def _compute_embeddings(self, batch: RankBatch) -> torch.Tensor:
        """Embed the tokens. As in transformers, the padding token gets no gradient."""
        embedded_t1H = self.embedding(batch.input_ids, batch.position_ids)
        if self.padding_id is None:
            return embedded_t1H
        is_padding_t = batch.input_ids[0] == self.padding_id
        if self.config.sequence_parallel:
            is_padding_t = is_padding_t.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
        return torch.where(is_padding_t[:, None, None], embedded_t1H.detach(), embedded_t1H)

    def _numbers(
        self, hidden_nH: torch.Tensor, targets_n: torch.Tensor, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.output_layer is None:
            scores_n = self.score(hidden_nH).squeeze(1).float()
            return scores_n, torch.zeros_like(scores_n, requires_grad=False)
        tied = self.share_embeddings_and_output_weights
        head_vH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = self.pg_collection.tp
        if group.size() == 1:
            return token_logprobs(
                hidden_nH,
                head_vH,
                targets_n,
                temperature,
                entropy_clamp=self.entropy_clamp,
                needs_entropy=self.training,
            )
        rows, rank = len(head_vH), group.rank()
        own = min(rows, self.vocabulary - rows * rank)  # without padding
        # token_logprobs assumes that a rank's rows begin at (number of its rows) * rank
        return token_logprobs(
            hidden_nH,
            head_vH[:own],
            targets_n + (own - rows) * rank,
            temperature,
            choose_tile(rows, hidden_nH.device.type),
            group,
            needs_entropy=self.training,
        )

    def _of_all_tokens(self, values_n: torch.Tensor, batch: RankBatch) -> torch.Tensor:
        """Gather the values of all context ranks."""
        if self.config.context_parallel_size == 1:
            return values_n
        zeros_N = values_n.new_zeros(batch.num_wanted, *values_n.shape[1:])
        return AllTokens.apply(zeros_N.index_copy(0, batch.place_n, values_n), self.pg_collection.cp)


def _choose_layers(
    config: Any, kernel: str, vp_stage: int | None, has_adapters: bool
) -> TransformerBlockSubmodules:
    """Return the modules of a chunk, from Transformer Engine if it is installed and there is a GPU.

    Its linear layers contain norms, so that adapters could not have the normalized input.
    """
    norm: Any = Norm
    if torch.cuda.is_available() and has_transformer_engine() and not has_adapters:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        norm = TENorm
        layer = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, False, config.qk_layernorm)
    else:
        layer = get_gpt_layer_local_spec(
            config.num_moe_experts, False, config.qk_layernorm, normalization="RMSNorm"
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            parts = layer.submodules.self_attention.submodules
            parts.q_layernorm = parts.k_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = partial(PackedAttention, kernel=kernel)
    if config.num_moe_experts:
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE
