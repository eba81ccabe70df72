"""What the Mixture-of-Experts layers are. Pure data, importable without torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Router and experts. `experts = 0` is a dense model."""

    experts: int = 0
    """Experts in a layer; 0: no Mixture of Experts."""
    top_k: int = 2
    """Experts a token is sent to."""
    layers: Any = "all"
    """Blocks whose MLP is a Mixture of Experts: `all`, `every:N` (blocks N-1, 2N-1, ...), or a list of block numbers."""
    ffn_width: int | None = None
    """Inner width of one expert; null: the model's ffn_width."""
    shared_width: int | None = None
    """Inner width of an expert that every token passes through; null: none."""
    mode: str = "full"
    """What becomes of a token's experts that its site does not hold: `full` (every site holds all), `skip` (dropped before any
    compute), `mask` (not chosen) or `frozen` (held and not trained)."""
    gate: str = "full"
    """Gate of the experts that remain in mode skip: `full` keeps the softmax over all chosen ones, `kept` renormalises."""
    aux_coef: float = 0.01
    """Coefficient of the load-balancing loss."""
    z_coef: float = 0.0
    """Coefficient of the router's z loss."""
    bias_rate: float = 0.0
    """Step by which each expert's selection bias follows its load (balance without a loss); 0: no bias."""

    def blocks(self, layers: int) -> tuple[int, ...]:
        """Return the 0-based numbers of the Mixture-of-Experts blocks in a model of `layers` blocks; () for a dense model.

        Raises ValueError saying what is wrong with `layers`, in words that follow the key.
        """
        if not self.experts:
            return ()
        spec = self.layers
        if spec == "all":
            return tuple(range(layers))
        if isinstance(spec, str):
            kind, _, count = spec.partition(":")
            if kind != "every" or not (count.isascii() and count.isdigit()) or int(count) == 0:
                raise ValueError("is not a specification of layers")
            return tuple(range(int(count) - 1, layers, int(count)))
        if not isinstance(spec, (list, tuple)) or not all(isinstance(block, int) and not isinstance(block, bool) for block in spec):
            raise ValueError("is not a specification of layers")
        outside = [block for block in spec if not 0 <= block < layers]
        if outside:
            raise ValueError(f"block {outside[0]} is not there: the model has blocks 0 to {layers - 1}")
        if len(set(spec)) != len(spec):
            raise ValueError("names a block twice")
        return tuple(sorted(spec))
