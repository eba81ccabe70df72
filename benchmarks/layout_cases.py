"""What must be equal on several devices, whatever they are: the cases that `tests/gpu/multi` and `benchmarks/layouts.py` share.

    cases = Cases(RankPools("cuda"), folder)          # RankPools("cpu"): gloo ranks, a smaller model, the same code
    cases.compare("TP 2 + SP", "fp32")["holds"]       # two ranks against one, from one seed checkpoint, over five steps
    cases.move("PP 2 -> EP 2", "bf16")["holds"]       # saved in one layout, loaded in another: the whole state, bit for bit

The ranks and the small engine are those of the tests: a benchmark runs from a checkout. Functions that run on ranks are at the end.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from ranks import MULTICAST_OFF as MULTICAST_OFF
from ranks import RankError as RankError
from ranks import RankPool as RankPool
from ranks import RankPools
from small_engine import MOE, Engine, Piece, assemble, build, micro_batches, pieces, small_config

Figures = list[tuple[float, float, int]]
"""Loss, gradient norm and valid tokens of each step."""

STEPS = 5
TOLERANCES = {"fp32": (1e-5, 1e-5), "bf16": (2.0**-9, 2.0**-5)}
"""Relative, of losses and gradient norms. fp32: sums in another order. bf16 rounds by 2**-9: once for a loss, 16 times for a norm."""
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "train.seq_len": 512, "model.width": 256, "model.ffn_width": 512, "model.head_dim": 64, "attention.block_size": 32,
    },
}  # fmt: skip
"""Changes to the small engine's configuration by device."""
BACKENDS = {"cpu": "auto", "cuda": "triton"}
"""Who computes the cases of S2 heads: on a GPU the kernels or nobody."""
TP, SP, PP, EP = ({"parallel.tp": 2}, {"parallel.tp": 2, "parallel.sp": True}, {"parallel.pp": 2}, {"parallel.ep": 2})
INTERLEAVED = {**PP, "parallel.vpp": 2}
HEADS = {"model.heads": 8, "attention.dense_layers": []}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": MOE,
    "stripes": {**HEADS, "model.kv_heads": 4, "attention.stride": 4},
    "dense head": {**HEADS, "model.kv_heads": 4, "attention.stride": 3, "attention.dense_heads": 1},
    "query heads": {**HEADS, "model.kv_heads": 2, "attention.stride": 8, "attention.per": "q_head"},
}
"""Changes by model. The last three have heads that differ between and within ranks."""


@dataclass(frozen=True)
class Case:
    """Two ranks that must train as one does: the group it is listed under, its model, what differs from one rank."""

    group: str
    model: str
    changes: Mapping[str, Any]


CASES: dict[str, Case] = {
    "TP 2": Case("layouts", "dense", TP),
    "TP 2 + SP": Case("layouts", "experts", SP),
    "PP 2, 1F1B": Case("layouts", "experts", PP),
    "PP 2, interleaved": Case("layouts", "experts", INTERLEAVED),
    "DP 2, distributed optimiser": Case("layouts", "experts", {}),
    "EP 2, all-to-all": Case("layouts", "experts", EP),
    "S2 stripes, TP 2": Case("heads", "stripes", TP),
    "S2 dense head, TP 2": Case("heads", "dense head", TP),
    "S2 stripes by query head, TP 2": Case("heads", "query heads", TP),
    "offload stream, DP 2": Case("offload", "experts", {"offload.mode": "stream"}),
    "offload half of it, DP 2": Case("offload", "experts", {"offload.mode": "stream", "offload.fraction": 0.5}),
    "offload cpu_step, DP 2": Case("offload", "experts", {"offload.mode": "cpu_step"}),
}
ONE: dict[str, Any] = {}
MOVES: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "TP 2 + SP -> PP 2": ((2, SP), (2, PP)),
    "PP 2, interleaved -> EP 2": ((2, INTERLEAVED), (2, EP)),
    "EP 2 -> DP 2, states on the host": ((2, EP), (2, {"offload.mode": "stream"})),
    "DP 2 -> one": ((2, {}), (1, ONE)),
    "one -> TP 2 + SP": ((1, ONE), (2, SP)),
}
"""Checkpoints of the model with experts: ranks and layout that write, ranks and layout that read."""


class Cases:
    """Runs cases on pools of ranks; what one rank does is computed once for each model and precision."""

    def __init__(self, pools: RankPools, folder: Path) -> None:
        self._pools, self._folder = pools, folder
        self._references: dict[tuple[str, str], tuple[str, Figures]] = {}

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._pools.device

    def settings(self, model: str, precision: str) -> dict[str, Any]:
        """Changes to the small engine's configuration for one rank."""
        changes = {**SIZES[self.device], **MODELS[model], "train.precision": precision}
        if self.device == "cuda" and model == "experts":
            changes["moe.ffn_width"] = 128
        return changes if MODELS[model].keys() & HEADS.keys() == set() else {**changes, "attention.backend": BACKENDS[self.device]}

    def reference(self, model: str, precision: str, left: Callable[[], float]) -> tuple[str, Figures]:
        """A checkpoint after one step, so that Adam's moments count too, and the figures of one rank that goes on from there."""
        key = model, precision
        if key not in self._references:
            changes, folder = self.settings(model, precision), self._folder / f"{model}-{precision}".replace(" ", "-")
            (seed,) = self._pools(1).run(write_seed, changes, str(folder), timeout=left())
            (figures,) = self._pools(1).run(train, changes, seed, timeout=left())
            self._references[key] = seed, figures
        return self._references[key]

    def compare(self, name: str, precision: str, seconds: float = 120.0) -> dict[str, Any]:
        """`loss` and `grad_norm`: the largest relative difference between the ranks of a case and one rank; `holds`: within TOLERANCES.

        Raises RankError when a rank fails, ValueError when the ranks disagree, count other tokens or learn nothing.
        """
        case, left = CASES[name], countdown(seconds)
        seed, wanted = self.reference(case.model, precision, left)
        results = self._pools(2).run(train, {**self.settings(case.model, precision), **case.changes}, seed, timeout=left())
        if results[1] != results[0]:
            raise ValueError(f"{name}: the ranks report different figures: {results}")
        loss, norm = deviations(results[0], wanted)
        most_loss, most_norm = TOLERANCES[precision]
        return {
            "loss": loss, "grad_norm": norm, "tolerance_loss": most_loss, "tolerance_grad_norm": most_norm,
            "holds": loss <= most_loss and norm <= most_norm, "losses": [step[0] for step in results[0]],
        }  # fmt: skip

    def move(self, name: str, precision: str, seconds: float = 120.0) -> dict[str, Any]:
        """Train two steps and save in one layout, load in another; `differ`: tensors of the whole state that are not the same bits."""
        (writers, writing), (readers, reading) = MOVES[name]
        base, left = self.settings("experts", precision), countdown(seconds)
        folder = self._folder / f"{name}-{precision}".translate(_PLAIN)
        written = self._pools(writers).run(save, {**base, **writing}, str(folder), timeout=left())
        found = self._pools(readers).run(load, {**base, **reading}, written[0][0], timeout=left())
        wanted, got = assemble([parts for _, parts in written]), assemble(found)
        differ = sorted(key for key in wanted.keys() | got.keys() if not _same(wanted.get(key), got.get(key)))
        return {"tensors": len(wanted), "differ": differ, "holds": not differ}


def countdown(seconds: float) -> Callable[[], float]:
    """A function that says what is left of `seconds`, one at least."""
    end = time.monotonic() + seconds
    return lambda: max(1.0, end - time.monotonic())


_PLAIN = str.maketrans({" ": "-", ",": "", ">": ""})


def deviations(got: Figures, wanted: Figures) -> tuple[float, float]:
    """Largest relative differences of losses and of gradient norms. Raises ValueError when tokens differ or the loss does not fall."""
    if [step[2] for step in got] != [step[2] for step in wanted]:
        raise ValueError(f"other numbers of tokens than on one rank: {got} and {wanted}")
    if not got[-1][0] < got[0][0] < float("inf"):
        raise ValueError(f"the loss did not fall: {got}")
    pairs = list(zip(got, wanted, strict=True))
    loss, norm = (max(abs(one[place] - other[place]) / abs(other[place]) for one, other in pairs) for place in (0, 1))
    return loss, norm


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def take_step(engine: Engine, step: int) -> Any:
    """One optimiser step on the rows of `step`, on the engine's device."""
    from train.engine.step import train_step
    from train.loop import on_device

    train, batches = engine.config.train, [on_device(batch, engine.ranks.device) for batch in micro_batches(engine, step)]
    result = train_step(
        engine.chunks, engine.optimizer, lambda: iter(batches), engine.ranks,
        micro_batches=engine.micro_batches, rows=train.micro_batch, seq_len=train.seq_len, lr=engine.config.optim.lr,
    )  # fmt: skip
    if not result.updated:
        raise ValueError(f"step {step}: loss or gradient is not finite: {result}")
    return result


def full_fp32() -> None:
    """fp32 products in fp32: TF32 keeps 10 bits, and what is compared here is the last of 23."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def start(changes: Mapping[str, Any], load: str | None = None) -> Engine:
    """The engine of `changes` on this rank."""
    full_fp32()
    return build(small_config(changes), load)


def write_seed(changes: Mapping[str, Any], folder: str) -> str:
    """Take a step and save; the checkpoint's path."""
    return _save(start(changes), [100], folder)


def train(changes: Mapping[str, Any], seed: str) -> Figures:
    """Go on from the checkpoint `seed`."""
    engine = start(changes, seed)
    results = [take_step(engine, step) for step in range(STEPS)]
    return [(result.loss, result.grad_norm, result.tokens) for result in results]


def save(changes: Mapping[str, Any], folder: str) -> tuple[str, list[Piece]]:
    """Take two steps and save; the checkpoint's path and this rank's parts of the state."""
    engine = start(changes)
    path = _save(engine, [0, 1], folder)
    return path, on_host(pieces(engine))


def load(changes: Mapping[str, Any], path: str) -> list[Piece]:
    """This rank's parts of the state after loading."""
    return on_host(pieces(start(changes, path)))


def _save(engine: Engine, steps: Sequence[int], folder: str) -> str:
    from train.engine import checkpoint

    for step in steps:
        take_step(engine, step)
    return str(checkpoint.save(Path(folder), len(steps), engine.chunks, engine.optimizer, {}))


def on_host(parts: Sequence[Piece]) -> list[Piece]:
    """The parts with their data in host memory, to be sent and put together."""
    return [Piece(part.name, part.shape, part.offset, part.data.cpu()) for part in parts]
