"""What a run will be, in numbers known before it starts: layout, parameters, tokens, each layer's attention, and a model of its memory.

Everything is closed form; nothing is measured. The memory is a model and is labelled so wherever it is shown.
"""

from dataclasses import asdict
from typing import Any

from moe.cost import Sizes
from train.config.check import attention_pattern
from train.config.schema import Config
from train.engine.layout import ParallelLayout, processes_of_host
from train.federation.planning import federation_plan
from train.federation.residency import residency_plan
from train.offload.machine import cores
from train.offload.plan import every_mode, place
from train.offload.rates import current

GIB = 2**30


def make_plan(config: Config, world: int) -> dict[str, Any]:
    """Return the plan of a checked `config` whose site has `world` processes; the content of `plan.json`."""
    layout = ParallelLayout.build(config, world)
    parameters = count_parameters(config)
    tokens = config.train.global_batch * config.train.seq_len
    return {
        "run": config.run.name,
        "layout": {
            "processes": layout.world, "dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp,
            "ep": layout.ep, "edp": layout.edp, "sp": layout.sp, "micro_batches": layout.micro_batches(config),
            "description": layout.describe(),
        },
        "parameters": parameters,
        "tokens_per_step": tokens,
        "tokens": tokens * config.train.steps,
        "layers": layer_table(config),
        "memory_model": memory_model(config, layout),
        "offload": offload_plan(config, layout),
        "federation": federation_plan(config, class_sizes(config), "the configuration"),
    }  # fmt: skip


def count_parameters(config: Config) -> dict[str, int]:
    """Return the numbers of parameters: `total`, `active` (that one token passes through) and `embedding`, vocabulary padding excluded."""
    model, moe = config.model, config.moe
    vocabulary = (model.vocab_size or 0) * model.width
    embedding = vocabulary if model.tied else 2 * vocabulary
    moe_blocks = len(moe.blocks(model.layers))
    shared = _block_parameters(config) * model.layers + model.width
    dense = 3 * model.width * (model.ffn_width or 0) * (model.layers - moe_blocks)
    expert = expert_parameters(config)
    every_token = moe_blocks * (model.width * moe.experts + 3 * model.width * (moe.shared_width or 0))
    rest = shared + dense + every_token + embedding
    return {
        "total": rest + moe_blocks * moe.experts * expert,
        "active": rest + moe_blocks * min(moe.top_k, moe.experts) * expert,
        "embedding": embedding,
    }


def _block_parameters(config: Config) -> int:
    """Attention and the two norms of one block."""
    model = config.model
    head, kv_heads = model.head_dim or 0, model.kv_heads or model.heads
    return model.width * (2 * model.heads + 2 * kv_heads) * head + 2 * model.width


def expert_parameters(config: Config) -> int:
    """Parameters of one expert (SwiGLU: three matrices)."""
    return 3 * config.model.width * (config.moe.ffn_width or 0)


def class_sizes(config: Config) -> Sizes:
    """Parameters by what an outer step does with them, of the whole model, vocabulary padding excluded; see `moe.cost.Sizes`.

    Selection biases of the routers count as dense: they are no parameters, but sites average them.
    """
    blocks = config.moe.blocks(config.model.layers)
    in_experts = len(blocks) * config.moe.experts * (expert_parameters(config) + config.model.width)
    biases = len(blocks) * config.moe.experts if config.moe.bias_rate else 0
    return Sizes.uniform(
        dense=count_parameters(config)["total"] - in_experts + biases,
        expert=expert_parameters(config),
        router_row=config.model.width,
        layers=blocks,
    )


def layer_table(config: Config) -> list[dict[str, Any]]:
    """Return, for each block, its attention, the share of the causal pairs that it keeps at `train.seq_len`, and its MLP."""
    pattern = attention_pattern(config)
    experts = config.moe.blocks(config.model.layers)
    table = []
    for layer in range(config.model.layers):
        view = pattern.for_layer(layer)
        table.append(
            {
                "layer": layer,
                "attention": "dense" if view.is_dense else "s2",
                "density": view.density(config.train.seq_len),
                "mlp": "moe" if layer in experts else "dense",
            }
        )
    return table


def memory_model(config: Config, layout: ParallelLayout) -> dict[str, float]:
    """Return a *model* of the GiB that the fullest process needs: weights, gradients, optimiser states, activations and logits.

    Parameters are taken as evenly spread over stages and tensor-parallel ranks; an activation checkpoint is one residual row, a block
    without recomputation keeps its linear layers' inputs and outputs. Allocator waste and communication buffers are left out.
    """
    model, train = config.model, config.train
    ordinary, expert = _parameters_of_a_process(config, layout)
    low = train.precision == "bf16"
    states = place(optimizer_parts(config, layout), low, config.offload.mode, config.offload.fraction, 1)
    tokens = train.micro_batch * train.seq_len
    kept = _activation_numbers(config, layout) * tokens * (2 if low else 4)
    in_flight = layout.pp if layout.pp > 1 else 1
    logits = tokens * (model.vocab_size or 0) / layout.tp * 4 * 2
    parts = {
        "weights": (ordinary + expert) * (2 if low else 4) / GIB,
        "gradients": (ordinary + expert) * 4 / GIB,
        "optimizer": states.device_bytes / GIB,
        "activations": kept * in_flight / GIB,
        "logits": logits / GIB,
    }
    return {**parts, "total": sum(parts.values())}


def _parameters_of_a_process(config: Config, layout: ParallelLayout) -> tuple[float, float]:
    """(Ordinary parameters, those of experts) that a process of the site with most experts holds."""
    plan, expert = residency_plan(config), expert_parameters(config)
    every = len(config.moe.blocks(config.model.layers)) * config.moe.experts
    held = every
    if plan is not None and config.moe.mode != "frozen":
        held = max(sum(len(plan.resident(site, layer)) for layer in plan.layers) for site in range(plan.sites))
    ordinary = count_parameters(config)["total"] - every * expert
    return ordinary / (layout.pp * layout.tp), held * expert / (layout.pp * layout.ep)


def optimizer_parts(config: Config, layout: ParallelLayout) -> list[int]:
    """Parameters in a process's shard of each optimiser: of the ordinary ones and, where there are any, of the experts."""
    ordinary, expert = _parameters_of_a_process(config, layout)
    sharded = config.parallel.distributed_optimizer
    parts = [ordinary / (layout.dp if sharded else 1), expert / (layout.edp if sharded else 1)]
    return [round(part) for part in parts if part]


def offload_plan(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Return what each place of the optimiser's states takes of a process and adds to a step, with the assumptions behind the seconds."""
    offload, threads = config.offload, max(1, cores() // processes_of_host(config))
    low = config.train.precision == "bf16"
    rates = current()
    modes = every_mode(optimizer_parts(config, layout), low, offload.fraction, threads, rates)
    return {"mode": offload.mode, "modes": [asdict(each) for each in modes], "assumptions": {**rates.assumptions(), "threads": threads}}


def _activation_numbers(config: Config, layout: ParallelLayout) -> float:
    """Numbers that a stage keeps for each token of a micro-batch."""
    model, moe = config.model, config.moe
    layers = model.layers / layout.pp
    residual = model.width / (layout.tp if layout.sp else 1)
    if config.train.recompute == "full":
        return layers * residual
    kv_heads, head = model.kv_heads or model.heads, model.head_dim or 0
    attention = 2 * (2 * model.heads + 2 * kv_heads) * head / layout.tp
    experts = len(moe.blocks(model.layers)) / model.layers
    inner = (1 - experts) * 3 * (model.ffn_width or 0) / layout.tp + experts * moe.top_k * 3 * (moe.ffn_width or 0)
    return layers * (4 * residual + attention + inner)
