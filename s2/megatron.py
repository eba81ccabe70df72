"""S2 attention in Megatron-core's `core_attention` slot (megatron-core 0.19): the only file of the package that knows Megatron.

    ModuleSpec(module=S2CoreAttention, params={"pattern": pattern, "backend": "auto"})

Layout here is core's [s, b, h, d]. Core numbers layers from 1 over the whole model, pipeline stages included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from .attention import s2_attention
from .cache import S2Cache
from .decode import DECODERS, s2_decode
from .errors import S2Error
from .pattern import S2Pattern

DECODE_NAMES = tuple(row.name for row in DECODERS)


class S2CoreAttention(MegatronModule):
    """Attention of one layer and one tensor-parallel rank: the layer's pattern, the rank's heads of it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        pattern: S2Pattern,
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        """`pattern`: the whole model's; `backend`: as in `s2_attention`. The other arguments are core's; keywords that newer cores add
        are ignored."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise S2Error("attention_dropout", dropout, "S2 attention has no dropout", "set it to 0")
        if attention_type != "self":
            raise S2Error("attention_type", attention_type, "S2 is causal self-attention", "use it for self-attention only")
        if config.context_parallel_size != 1:
            raise S2Error("context_parallel_size", config.context_parallel_size, "is not supported by S2 attention", "set it to 1")
        if config.num_attention_heads != pattern.num_heads:
            raise S2Error("num_heads", pattern.num_heads, f"the model has {config.num_attention_heads} query heads", "give both the same")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        rank, world = get_pg_rank(pg_collection.tp), get_pg_size(pg_collection.tp)
        # Core shows a config with as many groups as ranks when the model has fewer key/value heads than ranks.
        if config.num_query_groups != max(pattern.num_kv_heads, world):
            rule = f"the model has {config.num_query_groups} key/value heads"
            raise S2Error("num_kv_heads", pattern.num_kv_heads, rule, "give both the same")
        self.layer_number = layer_number
        self.pattern = pattern.for_layer(layer_number - 1).shard(rank, world)
        self.backend = backend
        self.cache: S2Cache | None = None
        self._prompt: tuple[list[int], int] | None = None
        # Core's apply_query_key_layer_scaling divides scores by the layer number and multiplies again inside its softmax: no change.
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def start_decoding(self, lengths: list[int], capacity: int) -> None:
        """The next forward is a batch of prompts, of `lengths` tokens each and padded behind, and those after it a token of each sequence.

        A cache with room for `capacity` tokens of each is made on the way. `stop_decoding` ends this.
        """
        self.cache, self._prompt = None, (lengths, capacity)

    def stop_decoding(self) -> None:
        """Forgets the cache; the layer attends to what it is given again."""
        self.cache, self._prompt = None, None

    def _decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """The attention of new tokens over the cache; None for prompts, whose keys and values are only put into it."""
        if self.cache is not None:
            self.cache.append(k, v)
            return s2_decode(q, self.cache, scale=self.softmax_scale, backend=self.backend if self.backend in DECODE_NAMES else "auto")
        assert self._prompt is not None
        lengths, capacity = self._prompt
        self.cache = S2Cache(self.pattern, k.shape[0], k.shape[2], k.shape[3], v.shape[3], k.dtype, k.device, capacity=capacity)
        self.cache.append(k, v, lengths)
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query (s, b, heads, d), key and value (s, b, kv_heads, d) -> (s, b, heads * d).

        `attention_mask` carries the documents: None, or cu_seqlens (n + 1,) int32 over the b * s tokens, row after row.
        """
        if attention_bias is not None:
            raise S2Error("attention_bias", "given", "S2 attention adds no bias", "pass None")
        if packed_seq_params is not None:
            raise S2Error("packed_seq_params", "given", "documents travel as cu_seqlens in attention_mask", "pass None")
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        rows, length = q.shape[:2]
        if self._prompt is not None:
            if attention_mask is not None or torch.is_grad_enabled():
                raise S2Error("attention_mask", attention_mask, "decoding takes no documents and no gradients", "pass None under no_grad")
            decoded = self._decode(q, k, v)
            if decoded is not None:
                return decoded.reshape(rows, length, -1).transpose(0, 1).contiguous()
        if attention_mask is not None:
            if attention_mask.dtype != torch.int32 or attention_mask.dim() != 1:
                shape = f"{tuple(attention_mask.shape)} {attention_mask.dtype}"
                raise S2Error("attention_mask", shape, "must be None or cu_seqlens (documents + 1,) int32", "S2 needs no mask tensor")
            q, k, v = (x.reshape(1, rows * length, *x.shape[2:]) for x in (q, k, v))
        out = s2_attention(q, k, v, self.pattern, scale=self.softmax_scale, cu_seqlens_q=attention_mask, backend=self.backend)
        assert isinstance(out, torch.Tensor)
        return out.reshape(rows, length, -1).transpose(0, 1).contiguous()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Nothing is stored: the layer has no weights."""
        return {}
