"""Which text a run reads. Pure data, importable without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Indexed data sets, their mixture and their split."""

    paths: list[str] = field(default_factory=list)
    """Prefixes of indexed data sets (`<prefix>.bin` and `<prefix>.idx`), built by `leantron data build`."""
    weights: list[float] | None = None
    """Share of each path in the mixture; null: by its number of tokens."""
    tokenizer: str = "byte"
    """`byte`, a path to a `tokenizer.json`, or `tiktoken:<encoding>`."""
    validation: float = 0.01
    """Share of each data set's documents held out for validation (its last ones after a seeded shuffle)."""
    demo: bool = False
    """Build the demo corpus (the Python standard library's sources) on first use when `paths` is empty."""
    cache: str = "data_cache"
    """Folder where the demo corpus is built."""
