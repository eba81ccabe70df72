"""S2: sparsely sharded attention. Each head attends to a local window and to its own shard of the past.

Usable without the rest of the repository: `S2Pattern` says who attends to whom, `s2_attention` computes it with the best back end
that can, `explain` says which one and why. Names are loaded on first use, so that `import s2` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import BACKENDS, explain, s2_attention, table
    from .blockmask import BlockMask
    from .cache import S2Cache
    from .decode import explain_decode, s2_decode
    from .errors import S2Error
    from .pattern import S2Pattern
    from .request import Request

_HOME = {
    "S2Pattern": "pattern",
    "S2Error": "errors",
    "BlockMask": "blockmask",
    "S2Cache": "cache",
    "s2_decode": "decode",
    "explain_decode": "decode",
    "Request": "request",
    "s2_attention": "attention",
    "explain": "attention",
    "table": "attention",
    "BACKENDS": "attention",
}

__all__ = [
    "BACKENDS",
    "BlockMask",
    "Request",
    "S2Cache",
    "S2Error",
    "S2Pattern",
    "explain",
    "explain_decode",
    "s2_attention",
    "s2_decode",
    "table",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
