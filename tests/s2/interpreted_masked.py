"""The kernels of custom block masks in the interpreter, against the float64 oracle. Run through `test_kernels.py`."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from oracle import dense, inputs, packed_mask, token_mask

from s2 import BlockMask
from s2.documents import make
from s2.triton.config import Tile, Tiles


@pytest.fixture(scope="module")
def op() -> ModuleType:
    """The operator's module, its kernels made for the interpreter."""
    assert triton.knobs.runtime.interpret, "run through test_kernels.py"
    return importlib.import_module("s2.triton.op")


def random_mask(heads: int, blocks: int, seed: int = 0) -> BlockMask:
    """Half of the blocks; one row and one column of blocks empty in every head, the last head all empty."""
    mask = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, 1], mask[:, :, 2], mask[-1] = False, False, False
    mask[0, 3] = torch.arange(blocks) == 3
    return BlockMask(mask, 32)


CASES: dict[str, dict[str, Any]] = {
    "whole": {"q_len": 128},
    "odd lengths, a mask for longer ones": {"q_len": 101, "blocks": 7},
    "fewer queries": {"q_len": 41, "k_len": 100},
    "one query": {"q_len": 1, "k_len": 129},
    "groups, two sequences": {"q_len": 97, "heads": 4, "kv_heads": 2, "batch": 2},
    "documents": {"bounds": [0, 53, 53, 54, 130]},
}


@pytest.mark.parametrize(("name", "rows", "keys"), [(name, 32, 16) for name in CASES] + [("documents", 16, 64), ("fewer queries", 16, 64)])
def test_masks(op: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, keys: int) -> None:
    """Output, lse and gradients; every buffer is poisoned, and so are the neighbours of descriptor loads by what lies there."""
    case = CASES[name]
    bounds = case.get("bounds")
    q_len = bounds[-1] if bounds else case["q_len"]
    k_len, heads, kv_heads, batch = case.get("k_len", q_len), case.get("heads", 3), case.get("kv_heads", 3), case.get("batch", 1)
    mask = random_mask(heads, case.get("blocks", -(-k_len // 32)))
    q, k, v, g, g_lse = inputs(q_len, k_len, heads, kv_heads, 16, 24, batch, dtype=torch.float32)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = dense(*wide, packed_mask(mask, bounds, bounds) if bounds else token_mask(mask, q_len, k_len), 0.25)
    seen = want[1] > float("-inf")
    g_lse = g_lse * seen
    finite = want[1].masked_fill(~seen, 0.0)
    grads = torch.autograd.grad((want[0], finite), wide, (g.double(), g_lse.double()))

    tile, swapped = Tile(rows=rows, keys=keys, warps=4, stages=1), Tile(rows=keys, keys=rows, warps=4, stages=1)
    monkeypatch.setattr(op, "tiles", lambda *a: Tiles(forward=tile, dq=tile, dkv=swapped))
    empty = torch.empty

    def poisoned(*sizes: Any, **options: Any) -> torch.Tensor:
        x = empty(*sizes, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **o: poisoned(*a, dtype=o.get("dtype", x.dtype)))
    documents = None if bounds is None else make(torch.tensor(bounds, dtype=torch.int32), None, 1, q_len, k_len)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = op.attend(*leaves, mask, 0.25, documents, True)
    assert torch.equal(lse > float("-inf"), seen)
    assert not out.transpose(1, 2)[~seen].any()
    got = (out, lse.masked_fill(~seen, 0.0), *torch.autograd.grad((out, lse), leaves, (g, g_lse)))
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, (want[0], finite, *grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5, msg=lambda text, what=what: f"{what}: {text}")


def test_descriptor_loads_and_nan_in_another_document(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from s2.triton import descriptors

    monkeypatch.setattr(op, "_accelerated", lambda tile, *tensors: [descriptors.view(x) for x in tensors])
    tile = Tile(rows=32, keys=32, warps=4, stages=1)
    monkeypatch.setattr(op, "tiles", lambda *a: Tiles(forward=tile, dq=tile, dkv=tile))
    mask = BlockMask(torch.ones(2, 4, 4, dtype=torch.bool), 32)
    documents = make(torch.tensor([0, 70, 101], dtype=torch.int32), None, 1, 101, 101)
    q, k, v, g, _ = inputs(101, 101, 2, 2, 16, 16, dtype=torch.float32)
    wide = [x[:, :70].double().requires_grad_() for x in (q, k, v)]
    want = dense(*wide, token_mask(mask, 70, 70), 0.25)[0]
    grads = torch.autograd.grad(want, wide, g[:, :70].double())
    for x in (q, k, v, g):
        x[:, 70:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = op.attend(*leaves, mask, 0.25, documents, False)
    for a, b in zip((out, *torch.autograd.grad(out, leaves, g)), (want, *grads), strict=True):
        torch.testing.assert_close(a[:, :70].double(), b, rtol=1e-4, atol=2e-5)


def test_the_operator_s_schema_fakes_and_autograd(op: ModuleType) -> None:
    from s2.triton.masked_op import block_attention

    q, k, v, _, _ = inputs(40, 40, 2, 1, 16, 24, dtype=torch.float32)
    mask = BlockMask(torch.ones(2, 2, 2, dtype=torch.bool), 32)
    arguments = (*(x.requires_grad_() for x in (q, k, v)), *mask.index(q.device), None, None, 0.25, 32, 2)
    torch.library.opcheck(block_attention, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
