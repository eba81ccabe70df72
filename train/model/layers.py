"""What each layer of a configured model is: its attention pattern and whether its MLP is a Mixture of Experts. Torch-free."""

from s2.pattern import S2Pattern
from train.config.schema import Config


def attention_pattern(config: Config) -> S2Pattern:
    """The model's pattern; dense attention is stride 1. `S2Pattern.for_layer` gives the one of a layer.

    `config` must have its derived sizes (`kv_heads`) filled in by `train.config.check`.
    """
    attention, model = config.attention, config.model
    kv_heads = model.kv_heads or model.heads
    if attention.kind == "dense":
        return S2Pattern(
            num_heads=model.heads, num_kv_heads=kv_heads, block_size=attention.block_size, local_blocks=1, stride=1
        )
    return S2Pattern(
        num_heads=model.heads,
        num_kv_heads=kv_heads,
        block_size=attention.block_size,
        local_blocks=attention.local_blocks,
        stride=attention.stride,
        offset=attention.offset,
        step=attention.step,
        dense_heads=attention.dense_heads,
        per=attention.per,
        dense_layers=attention.dense_layers if isinstance(attention.dense_layers, str) else tuple(attention.dense_layers),
        rotate=attention.rotate,
    )


def moe_layer_numbers(config: Config) -> tuple[int, ...]:
    """Global 0-based numbers of the blocks whose MLP is a Mixture of Experts. Raises ValueError on an unreadable `moe.layers`."""
    moe, count = config.moe, config.model.layers
    if not moe.experts:
        return ()
    if moe.layers == "all":
        return tuple(range(count))
    if isinstance(moe.layers, str) and moe.layers.startswith("every:") and moe.layers[6:].isdigit() and int(moe.layers[6:]) > 0:
        every = int(moe.layers[6:])
        return tuple(range(every - 1, count, every))
    if isinstance(moe.layers, (list, tuple)) and all(isinstance(n, int) and 0 <= n < count for n in moe.layers):
        return tuple(sorted(set(moe.layers)))
    raise ValueError(f"moe.layers={moe.layers}: must be all, every:N or a list of block numbers under {count}; correct moe.layers")
