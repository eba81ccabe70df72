"""How a run is spread over sites. Pure data, importable without torch; the rules are in `train/config/check_federation.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """Sites, which experts each of them holds, and the outer step between them. `sites = 1` is an ordinary run."""

    sites: int = 1
    """Sites, each a torchrun world of its own with `parallel.processes` shared out over them."""
    replication: int | None = None
    """Sites that hold each expert; null: all of them."""
    policy: str = "contiguous"
    """Which site holds which experts: `contiguous`, `strided`, `random`, or `rotating`."""
    rotate_every: int | None = None
    """Rounds after which `rotating` draws the holders again."""
    sync_every: int = 32
    """Local steps between outer steps."""
    outer_lr: float = 0.7
    """Learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step; with outer_lr=1 and 0 here sites are plainly averaged."""
    weights: str = "none"
    """How sites count in a mean: `none` (alike) or `tokens` (an expert by the tokens it saw, the rest by the site's tokens)."""
    router_rows: str = "holders"
    """Who averages an expert's router row: its `holders`, or `all` sites."""
    quorum: int | None = None
    """Sites that an outer step needs; null: all of them. More than half of those that are alive must take part in any case."""
    deadline: float = 60.0
    """Seconds that a site waits for the others at an outer step; who is late then is left out of the round."""
    overlap_steps: int = 0
    """Local steps that go on while an outer step's tensors travel; its result is applied after them."""
    fragments: int = 1
    """Parts of the layers that are synchronised one after the other, each every sync_every steps."""
    transfer_dtype: str = "fp32"
    """Type on the wire: `fp32`, `bf16` or `int8`. Sums are taken in fp32."""
    probe: int = 1
    """Rows on which the sites' routers are compared at each outer step, in two passes without gradients; 0: they are not compared."""
    site: int | None = None
    """Number of this site, from 0; null: the launcher starts them all on this host."""
    endpoint: str | None = None
    """`host:port` where the sites meet; null: the launcher serves one on 127.0.0.1. Site 0 serves a given one."""
    share_gpus: bool = False
    """Let sites that start on one host share its GPUs when each process cannot have its own: for experiments, not for speed."""
