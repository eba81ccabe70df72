"""The language model: embedding, Megatron-core's TransformerBlock, output head and loss.

A thin model of our own on core's `LanguageModule` rather than core's GPTModel (deprecated there) or HybridModel: packed
documents, padded vocabularies and rotary positions need no workaround then. Tensors are named by their dims:
b rows of a micro-batch, s tokens of a row, h width, v vocabulary, d head dim.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from train.config.schema import Config
from train.engine import rope
from train.engine.spec import block_spec
from train.model.vocabulary import padded_vocab_size


class LanguageModel(LanguageModule):
    """One pipeline stage (or model chunk) of a decoder-only language model.

    `pre_process` stages own the embedding, `post_process` stages the head. Rows of `positions` restart with each document,
    and `cu_seqlens` keeps attention inside documents, so a packed row behaves like its documents apart.
    """

    def __init__(
        self,
        config: Config,
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        rope.install()
        super().__init__(config=core, pg_collection=groups)
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = config.model.tied
        self.valid_vocab = int(config.model.vocab_size or 0)
        self.padded_vocab = padded_vocab_size(self.valid_vocab, config.parallel.tp)
        self.rope_base = config.model.rope_base

        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config=core,
                vocab_size=self.padded_vocab,
                max_sequence_length=config.train.seq_len,
                position_embedding_type="rope",
                tp_group=groups.tp,
            )
        self.decoder = TransformerBlock(
            config=core,
            spec=block_spec(config, core, vp_stage, groups.pp.rank()),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                core.hidden_size,
                self.padded_vocab,
                config=core,
                init_method=core.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=pre_process and config.model.tied,
                tp_group=groups.tp,
            )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hidden states (s, b, h) from the stage before; core's schedules pass a list of one."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Loss of each token (b, s) float32; logits (b, s, v/tp) without `targets`; hidden states (s, b, h) before the last stage.

        tokens, positions, targets: (b, s) int64. cu_seqlens: (n + 1,) int32 document bounds over the flattened b * s tokens,
        or None when each row is one document. loss_mask: (b, s), above 0 where a target counts; routers take their losses over
        the same tokens, over all of them without it.
        """
        hidden = self.embedding(input_ids=tokens, position_ids=positions) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=cu_seqlens,
            rotary_pos_emb=rope.cos_sin(positions, self.config.kv_channels, self.rope_base),
            padding_mask=self._unweighted(loss_mask),
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight)
        logits = self._mask_padding(logits)
        if targets is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(targets, logits)

    def _unweighted(self, loss_mask: Tensor | None) -> Tensor | None:
        """Tokens of this rank without weight in the loss, (b, s) bool or with sequence parallelism (b, s/tp); core's padding mask."""
        if loss_mask is None or not self.config.num_moe_experts:
            return None
        unweighted, tp = loss_mask <= 0, self.pg_collection.tp
        return unweighted.chunk(tp.size(), dim=1)[tp.rank()] if self.config.sequence_parallel else unweighted

    def _mask_padding(self, logits: Tensor) -> Tensor:
        # Padded entries must not take probability: the loss would depend on the tensor-parallel size.
        part = self.padded_vocab // self.pg_collection.tp.size()
        valid_here = self.valid_vocab - part * self.pg_collection.tp.rank()
        if valid_here >= part:
            return logits
        padding = torch.arange(part, device=logits.device) >= valid_here
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)
