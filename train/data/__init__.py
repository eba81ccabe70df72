"""Text to training batches: tokenizers, Megatron's indexed format, packing, blends, order as a pure function of (seed, epoch, step).

Names are loaded on first use, so that the configuration can import `train.data.config` without numpy or the rest.
"""

import importlib
from typing import Any

_HOME = {
    "Batch": "dataset",
    "BatchSource": "dataset",
    "DataError": "errors",
    "IndexedFile": "indexed",
    "IndexedWriter": "indexed",
    "Tokenizer": "tokenizer",
    "bigram_bits_per_byte": "entropy",
    "build_dataset": "build",
    "conditional_entropy": "entropy",
    "ensure_demo_corpus": "demo",
    "load_tokenizer": "tokenizer",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` and return the object."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
