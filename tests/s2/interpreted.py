"""The Triton kernels in the interpreter, against the float64 oracle: every path of the tile arithmetic at small sizes.

Triton decides when it is imported whether it interprets, so `test_kernels.py` runs this file in a process of its own. bf16 is left to
the device tests: the interpreter's bf16 dot is not to be trusted.
"""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from oracle import dense, inputs, packed_mask, token_mask

from s2 import S2Pattern
from s2.documents import make


@pytest.fixture(scope="module")
def op() -> ModuleType:
    """The operator's module, its kernels made for the interpreter."""
    assert triton.knobs.runtime.interpret, "run through test_kernels.py"
    return importlib.import_module("s2.triton.op")


def use_tiles(op: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    """Forces small tiles, so that short sequences have many."""
    from s2.triton.config import Tile, Tiles

    tile = Tile(rows=rows, keys=keys, warps=4, stages=1)
    swapped = Tile(rows=keys, keys=rows, warps=4, stages=1)
    monkeypatch.setattr(op, "tiles", lambda *a: Tiles(forward=tile, dq=tile, dkv=swapped))


def results(
    op: ModuleType, pattern: S2Pattern, sizes: tuple[int, int, int, int], documents: tuple[list[int], list[int]] | None = None,
    dtype: torch.dtype = torch.float32, batch: int = 1,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:  # fmt: skip
    """(out, lse, dq, dk, dv) of the kernels and of the oracle, with gradients of both outputs."""
    q_len, k_len, d_k, d_v = sizes
    q, k, v, g, g_lse = inputs(q_len, k_len, pattern.local_heads, pattern.local_kv_heads, d_k, d_v, batch, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    mask = token_mask(pattern, q_len, k_len) if documents is None else packed_mask(pattern, *documents)
    want = dense(*wide, mask, d_k**-0.5)
    cu = [None, None] if documents is None else [torch.tensor(x, dtype=torch.int32) for x in documents]
    got = op.attend(*leaves, pattern, d_k**-0.5, make(*cu, batch, q_len, k_len), True)
    g_lse = g_lse.float()
    return (*got, *torch.autograd.grad(got, leaves, (g, g_lse))), (*want, *torch.autograd.grad(want, wide, (g.double(), g_lse.double())))


def check(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], tolerance: float = 1e-5) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        error = float(((a.double() - b).norm() / b.norm()).detach())
        assert error < tolerance, (name, error)


PATTERNS: dict[str, dict[str, Any]] = {
    "stripes": {"num_heads": 2, "num_kv_heads": 2, "local_blocks": 1, "stride": 2},
    "packed group": {"num_heads": 4, "num_kv_heads": 2, "local_blocks": 2, "stride": 2},
    "group of three": {"num_heads": 3, "num_kv_heads": 1, "local_blocks": 2, "stride": 2, "rotate": 2},
    "per query head, a dense one": {
        "num_heads": 6, "num_kv_heads": 2, "local_blocks": 2, "stride": 3, "per": "q_head", "offset": 1, "dense_heads": 1,
    },
    "dense head": {"num_heads": 3, "num_kv_heads": 3, "local_blocks": 1, "stride": 2, "dense_heads": 1},
    "dense": {"num_heads": 4, "num_kv_heads": 2, "stride": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rows", "keys", "length"),
    [(name, 64, 16, 98) for name in PATTERNS] + [("packed group", 16, 64, 130), ("dense head", 16, 64, 98), ("dense", 16, 64, 82)],
)
def test_patterns_and_tiles(op: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, keys: int, length: int) -> None:
    use_tiles(op, monkeypatch, rows, keys)
    pattern = S2Pattern(block_size=16, **PATTERNS[name])
    check(*results(op, pattern, (length, length, 16, 16)))


@pytest.mark.parametrize("length", [1, 16, 17, 63, 65])
def test_lengths(op: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    check(*results(op, pattern, (length, length, 16, 16)))


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 100), (17, 100), (40, 170)])
@pytest.mark.parametrize("block", [16, 64])
def test_fewer_queries_than_keys(op: ModuleType, monkeypatch: pytest.MonkeyPatch, q_len: int, k_len: int, block: int) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=1, block_size=block, local_blocks=1, stride=2, rotate=2)
    check(*results(op, pattern, (q_len, k_len, 16, 16), batch=2))


@pytest.mark.parametrize(("d_k", "d_v"), [(24, 40), (48, 16), (80, 80)])
def test_head_widths(op: ModuleType, monkeypatch: pytest.MonkeyPatch, d_k: int, d_v: int) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=1, block_size=16, local_blocks=1, stride=2, rotate=2)
    check(*results(op, pattern, (70, 70, d_k, d_v)))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("documents", [([0, 33, 33, 34, 115, 140],) * 2, ([0, 13, 13, 14, 60], [0, 33, 33, 64, 150]), ([0, 32, 96],) * 2])
def test_documents(op: ModuleType, monkeypatch: pytest.MonkeyPatch, documents: tuple[list[int], list[int]], stride: int) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=1, block_size=16, local_blocks=1, stride=stride, rotate=stride)
    check(*results(op, pattern, (documents[0][-1], documents[1][-1], 16, 16), documents))


def test_float16_with_the_chosen_tiles(op: ModuleType) -> None:
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=32, local_blocks=1, stride=2)
    check(*results(op, pattern, (300, 300, 32, 32), dtype=torch.float16), tolerance=3e-3)


@pytest.mark.parametrize("loads", ["pointers", "descriptors"])
def test_splits_of_a_long_stripe(op: ModuleType, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, loads: str) -> None:
    """Parts of a stripe's queries, more of them than some stripes have tiles: empty parts must not count the last tile again.

    The stripes' tiles differ from the window's.
    """
    from s2.triton.config import Tile, Tiles

    if loads == "descriptors":
        request.getfixturevalue("descriptors")

    tile = Tile(rows=16, keys=32, warps=4, stages=1)
    monkeypatch.setattr(op, "tiles", lambda *a: Tiles(forward=tile, dq=tile, dkv=tile, stripe=replace(tile, rows=32, keys=16)))
    monkeypatch.setattr(op, "_splits", lambda programs, stride: 4)
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    check(*results(op, pattern, (164, 164, 16, 16)))


def test_runs_are_bitwise_equal_and_buffers_fully_written(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer is poisoned with NaN before the kernels see it."""
    use_tiles(op, monkeypatch, 32, 32)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(x.shape, dtype=x.dtype))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: poisoned(a, dtype=k.get("dtype", x.dtype)))
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    runs = [results(op, pattern, (75, 75, 16, 16), ([0, 30, 75],) * 2) for _ in range(2)]
    check(*runs[0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def test_unattended_keys_are_never_read(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(op, monkeypatch, 16, 16)
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    q, k, v, g, _ = inputs(16, 96, 2, 2, 16, 16, dtype=torch.float32)
    seen = token_mask(pattern, 16, 96).any(1)
    k[0][~seen.T], v[0][~seen.T] = float("nan"), float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = op.attend(*leaves, pattern, 0.25, None, False)
    grads = torch.autograd.grad(out, leaves, g)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert (grads[1][0][~seen.T] == 0).all()


@pytest.fixture
def descriptors(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptor loads, as on a device with a tensor-memory accelerator: the interpreter knows them, and reads past a document too."""
    from s2.triton import descriptors

    monkeypatch.setattr(op, "_accelerated", lambda tile, *tensors: [descriptors.view(x) for x in tensors])


@pytest.mark.parametrize(("stride", "local", "rows", "keys"), [(2, 2, 16, 64), (1, 1, 64, 32)])
def test_nan_stays_in_its_document(
    op: ModuleType, descriptors: None, monkeypatch: pytest.MonkeyPatch, stride: int, local: int, rows: int, keys: int
) -> None:
    """The document between two others is NaN, in inputs and upstream gradients: the others must not notice."""
    use_tiles(op, monkeypatch, rows, keys)
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=local, stride=stride)
    bounds = [0, 53, 77, 110]
    documents = make(torch.tensor(bounds, dtype=torch.int32), None, 1, 110, 110)
    q, k, v, g, g_lse = inputs(110, 110, 4, 2, 16, 16, dtype=torch.float32)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = dense(*wide, packed_mask(pattern, bounds, bounds), 0.25)
    want = (*want, *torch.autograd.grad(want, wide, (g.double(), g_lse.double())))
    for x in (q, k, v, g, g_lse.transpose(1, 2)):
        x[:, 53:77] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = op.attend(*leaves, pattern, 0.25, documents, True)
    got = (*got, *torch.autograd.grad(got, leaves, (g, g_lse)))
    for part in (slice(0, 53), slice(77, 110)):
        mine, theirs = ([x[:, :, part] if n == 1 else x[:, part] for n, x in enumerate(xs)] for xs in (got, want))
        check(tuple(mine), tuple(theirs))


def test_nan_stays_in_its_sequence(op: ModuleType, descriptors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    q, k, v, g, g_lse = inputs(50, 50, 2, 2, 16, 16, batch=2, dtype=torch.float32)
    wide = [x[:1].double().requires_grad_() for x in (q, k, v)]
    want = dense(*wide, token_mask(pattern, 50, 50), 0.25)
    want = (*want, *torch.autograd.grad(want, wide, (g[:1].double(), g_lse[:1].double())))
    for x in (q, k, v, g, g_lse):
        x[1] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = op.attend(*leaves, pattern, 0.25, None, True)
    check(tuple(x[:1] for x in (*got, *torch.autograd.grad(got, leaves, (g, g_lse)))), want)


@pytest.mark.parametrize(("name", "length"), [("stripes", 64), ("packed group", 96)])
def test_descriptor_loads(op: ModuleType, descriptors: None, monkeypatch: pytest.MonkeyPatch, name: str, length: int) -> None:
    """Lengths of whole tiles, whose last tile is a descriptor load like the others."""
    use_tiles(op, monkeypatch, 32, 32)
    check(*results(op, S2Pattern(block_size=16, **PATTERNS[name]), (length, length, 16, 16)))


def test_strides_a_negative_scale_and_one_gradient_only(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    q, k, v, g, g_lse = inputs(50, 50, 2, 2, 16, 16, batch=2, dtype=torch.float32)
    strided = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in strided]
    want = dense(*wide, token_mask(pattern, 50, 50), -0.3)
    got = op.attend(*strided, pattern, -0.3, None, True)
    for n, grad in enumerate((g.transpose(1, 2).contiguous().transpose(1, 2), g_lse)):
        first = torch.autograd.grad(got[n], strided, grad, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(want[n], wide, grad.double(), retain_graph=True, allow_unused=True)
        for a, b in zip(first, second, strict=True):
            if b is None:
                assert a is None or not a.any()
            else:
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_the_operator_s_schema_fakes_and_autograd(op: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(op, monkeypatch, 32, 32)
    q, k, v, _, _ = inputs(40, 40, 2, 1, 16, 24, dtype=torch.float32)
    residues = torch.tensor([1, 1], dtype=torch.int32)
    arguments = (*(x.requires_grad_() for x in (q, k, v)), residues, None, None, 0.25, 16, 1, 2, True)
    torch.library.opcheck(op.attention, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_tiles_shrink_to_the_shared_memory() -> None:
    from s2.triton.config import _shared_bytes, choose_tiles

    for d in (16, 64, 128, 256):
        for size in (2, 4):
            for shared in (48 << 10, 99 << 10, 227 << 10):
                tiles = choose_tiles(d, d, size, shared, 64)
                if tiles is None:
                    assert d * size == 1024 and shared < 99 << 10
                    continue
                for kind in ("forward", "dq", "dkv", "stripe"):
                    assert _shared_bytes(kind, getattr(tiles, kind), d, d, size) <= shared
    assert choose_tiles(256, 256, 4, 16 << 10, 64) is None


def test_a_tile_too_wide_for_its_offsets_is_refused(op: ModuleType) -> None:
    pattern = S2Pattern(num_heads=64, num_kv_heads=64, block_size=16, local_blocks=1, stride=1 << 12, rotate=64)
    x = torch.zeros(1, 2, 64, 64)
    with pytest.raises(ValueError, match="stride=4096: makes a tile of stripe keys span"):
        op.attend(x, x, x, pattern, 1.0, None, False)
