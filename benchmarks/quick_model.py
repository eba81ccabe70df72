"""The engine's model with weights drawn on the device, for benchmarks of billions of parameters.

The engine draws each parameter whole on the CPU, so that every parallel layout begins from the same model: minutes for such sizes.
"""

from typing import Any

import torch

from train.config.schema import Config
from train.engine import build
from train.engine.init import standard_deviation


def build_model(config: Config, ranks: Any, *, trainable: bool = True) -> list[Any]:
    """`train.engine.build.build_model` of a world of one, with the same distribution of weights, from torch's generator for the device."""
    drawn, build.initialize = build.initialize, lambda *_: None
    try:
        chunks = build.build_model(config, ranks, trainable=trainable)
    finally:
        build.initialize = drawn
    torch.manual_seed(config.train.seed)
    with torch.no_grad():
        for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, standard_deviation(name, config))
    return chunks
