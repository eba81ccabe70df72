"""How a run is spread over processes. Pure data, importable without torch; the rules are in `layout.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; data parallelism is what remains of the processes."""

    tp: int = 1
    """Tensor parallelism: ranks that share every layer's matrices and heads."""
    pp: int = 1
    """Pipeline parallelism: stages of consecutive layers."""
    vpp: int = 1
    """Model chunks a stage holds (interleaved pipeline schedule when over 1)."""
    cp: int = 1
    """Context parallelism: ranks that share a sequence. Groups exist; its attention does not yet, so only 1 is accepted."""
    ep: int = 1
    """Expert parallelism: data-parallel ranks that share a layer's experts."""
    sp: bool = False
    """Sequence parallelism: norms and residuals split over the tensor-parallel ranks."""
    processes: int | None = None
    """Processes per host that the launcher starts, over all its sites; null: as many as the other axes and the sites ask for."""
    hosts: int = 1
    """Hosts of the run; over 1, start `torchrun` on each by hand or through Slurm."""
    distributed_optimizer: bool = True
    """Shard the optimiser's states over the data-parallel ranks."""
