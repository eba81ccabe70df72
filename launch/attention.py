"""The attention part of `leantron doctor`: the back end of every layer of a configuration with the reasons, and each path run once."""

from collections.abc import Iterator, Sequence
from typing import Any

from s2.backends import Choice
from train.config.compose import compose
from train.config.schema import Config


def attention_lines(overrides: Sequence[str]) -> Iterator[str]:
    """Lines of the report, for the configuration that `overrides` make, on the first GPU or else on the CPU. Imports torch."""
    import torch

    from s2.probe import probe

    config = compose(list(overrides))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    yield from layer_lines(config, device, str(dtype).removeprefix("torch."))
    if device == "cpu":
        yield "attention paths on this CPU (the kernels need a GPU):"
        dtype = torch.float32
    else:
        yield "attention paths, compiled and run here:"
    for finding in probe(device, dtype):
        if finding.works:
            yield f"  {finding.path}: {finding.choice.backend}, error {finding.error:.1e}, first run {finding.seconds:.1f} s"
        else:
            why = finding.failure or f"its error is {finding.error:.1e}"
            yield f"  {finding.path}: {finding.choice.backend} FAILS: {why}"


def layer_lines(config: Config, device: str, dtype: str) -> Iterator[str]:
    """For training and for decoding, the stretches of layers with one choice of back end, and why not the ones before it."""
    from s2 import Request, explain_decode, table
    from train.config.check import attention_pattern

    model = config.model
    pattern, layers = attention_pattern(config), model.layers
    width = model.head_dim or model.width // model.heads
    fields: dict[str, Any] = {"device": device, "dtype": dtype, "kv_heads": pattern.num_kv_heads, "d_k": width, "d_v": width}
    length = config.train.seq_len
    training = table(pattern, layers, config.attention.backend, packed=True, q_len=length, k_len=length, **fields)
    decoding = [explain_decode(Request(pattern=pattern.for_layer(layer), q_len=1, **fields)) for layer in range(layers)]
    for what, choices in (("training", training), ("decoding", decoding)):
        yield f"attention in {what} ({dtype}, head dim {width}, {device}):"
        first = 0
        for layer in range(1, layers + 1):
            if layer < layers and _same(choices[layer], choices[first]):
                continue
            name = f"layer {first}" if layer == first + 1 else f"layers {first} to {layer - 1}"
            kind = "dense" if choices[first].request.is_dense else "s2"
            yield f"  {name}, {kind}: {choices[first].backend}"
            for other, reason in choices[first].refusals.items():
                yield f"    not {other}: {reason}"
            first = layer


def _same(a: Choice, b: Choice) -> bool:
    """Whether two choices read alike."""
    return (a.backend, a.refusals, a.request.is_dense) == (b.backend, b.refusals, b.request.is_dense)
