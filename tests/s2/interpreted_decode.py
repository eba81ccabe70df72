"""The decoding kernels in the interpreter, against the definition in plain torch. Run through `test_kernels.py`."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from oracle import inputs

from s2 import S2Cache, S2Pattern, s2_attention, s2_decode
from s2.triton.config import DecodeTile

PATTERNS: dict[str, dict[str, Any]] = {
    "stripes, groups of two": {"num_heads": 4, "num_kv_heads": 2, "stride": 2, "local_blocks": 1},
    "group of five": {"num_heads": 5, "num_kv_heads": 1, "stride": 2, "local_blocks": 2, "rotate": 2},
    "per query head": {"num_heads": 6, "num_kv_heads": 2, "stride": 3, "local_blocks": 2, "per": "q_head", "offset": 1},
    "dense heads": {"num_heads": 4, "num_kv_heads": 4, "stride": 3, "local_blocks": 1, "dense_heads": 1},
    "a dense query head in a group": {
        "num_heads": 6, "num_kv_heads": 2, "stride": 3, "local_blocks": 2, "per": "q_head", "offset": 1, "dense_heads": 1,
    },
    "dense": {"num_heads": 4, "num_kv_heads": 2, "stride": 1},
}  # fmt: skip
LENGTHS = ([100, 1, 0],)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The module of the kernels, made for the interpreter, on a device of one multiprocessor: every program costs milliseconds here."""
    assert triton.knobs.runtime.interpret, "run through test_kernels.py"
    module = importlib.import_module("s2.triton.decode")
    module.processors = lambda device: 1  # type: ignore[attr-defined]
    return module


def filled(
    kernels: ModuleType, pattern: S2Pattern, lengths: list[int], d_k: int = 16, d_v: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, S2Cache, S2Cache]:
    """A query and two caches of the same tokens, one written by plain torch and one by the kernel; what is not written is NaN."""
    q, k, v, _, _ = inputs(max(lengths), max(lengths), pattern.num_heads, pattern.num_kv_heads, d_k, d_v, len(lengths), dtype=dtype)
    caches = []
    for by_kernel in (False, True):
        cache = S2Cache(pattern, len(lengths), pattern.num_kv_heads, d_k, d_v, dtype)
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        if by_kernel:
            added = torch.tensor(lengths, dtype=torch.int32)
            kernels.append(cache, k, v, added)
            cache.device_lengths += added
            cache._seen = list(lengths)
        else:
            cache.append(k, v, lengths)
        caches.append(cache)
    return q[:, :1], caches[0], caches[1]


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_and_lengths(kernels: ModuleType, name: str) -> None:
    pattern = S2Pattern(block_size=16, **PATTERNS[name])
    for lengths in LENGTHS:
        q, plain, written = filled(kernels, pattern, lengths)
        want = s2_decode(q, plain, backend="reference")
        torch.testing.assert_close(kernels.attend(q, written, 0.25), want, rtol=1e-4, atol=1e-5)
        for head in range(pattern.num_kv_heads):
            for a, b in zip(plain.held(0, head), written.held(0, head), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(("d_k", "d_v"), [(24, 40), (48, 16), (80, 80)])
def test_head_widths(kernels: ModuleType, d_k: int, d_v: int) -> None:
    pattern = S2Pattern(block_size=16, num_heads=4, num_kv_heads=2, stride=2, local_blocks=2)
    q, plain, written = filled(kernels, pattern, [90, 70], d_k, d_v)
    torch.testing.assert_close(kernels.attend(q, written, 0.1), s2_decode(q, plain, scale=0.1, backend="reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("keys", "programs", "least"), [(16, 1, 1), (16, 40, 3), (32, 30, 1), (128, 7, 1)])
def test_tiles_and_chunks(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, keys: int, programs: int, least: int) -> None:
    """One chunk for everything, a chunk for every tile, and tiles smaller and larger than a block: one result, and no run differs."""
    tile = DecodeTile(keys=keys, warps=4, stages=1, programs=programs, least=least)
    monkeypatch.setattr(kernels, "choose_decode", lambda *a: tile)
    pattern = S2Pattern(block_size=32, num_heads=6, num_kv_heads=3, stride=2, local_blocks=1, dense_heads=1)
    q, plain, written = filled(kernels, pattern, [162, 1, 97])
    got = kernels.attend(q, written, 0.25)
    torch.testing.assert_close(got, s2_decode(q, plain, scale=0.25, backend="reference"), rtol=1e-4, atol=1e-5)
    if programs == 40:
        assert torch.equal(got, kernels.attend(q, written, 0.25))


def test_token_after_token_equals_full_attention(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels through the public calls, past the first capacity; every buffer is poisoned."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr("s2.decode._triton", lambda request: None)
    monkeypatch.setattr("s2.decode.DECODERS", (importlib.import_module("s2.backends").Backend("triton", lambda r: None, "triton.decode"),))
    pattern = S2Pattern(block_size=16, num_heads=4, num_kv_heads=2, stride=2, local_blocks=2)
    q, k, v, _, _ = inputs(259, 259, 4, 2, 16, 24, 1, dtype=torch.float32)
    whole = s2_attention(q, k, v, pattern, backend="reference")
    assert isinstance(whole, torch.Tensor)
    cache = S2Cache(pattern, 1, 2, 16, 24)
    cache.append(k[:, :250], v[:, :250])
    for t in range(250, 259):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        if t % 16 in (0, 15):
            torch.testing.assert_close(s2_decode(q[:, t : t + 1], cache), whole[:, t : t + 1], rtol=1e-4, atol=1e-5)


def test_float16_and_a_strided_query(kernels: ModuleType) -> None:
    pattern = S2Pattern(block_size=16, num_heads=4, num_kv_heads=2, stride=2, local_blocks=2)
    q, plain, written = filled(kernels, pattern, [150, 90], 32, 32, torch.float16)
    want = s2_decode(q.float(), plain, backend="reference")
    odd = q.transpose(0, 2).contiguous().transpose(0, 2)
    assert not odd.is_contiguous()
    for query in (q, odd):
        got = kernels.attend(query, written, 32**-0.5).float()
        assert float((got - want).norm() / want.norm()) < 3e-3


def test_past_the_capacity_there_is_no_number(kernels: ModuleType) -> None:
    """As when a recorded graph is replayed too often: the sequence is NaN, its neighbour is not, nothing is written out of bounds."""
    pattern = S2Pattern(block_size=16, num_heads=2, num_kv_heads=2, stride=2, local_blocks=1)
    q, _, cache = filled(kernels, pattern, [256, 100])
    before = cache.keys.clone()
    kernels.append(cache, torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16), torch.tensor([1, 0], dtype=torch.int32))
    cache.device_lengths += torch.tensor([1, 0])
    assert torch.equal(before.nan_to_num(7.0), cache.keys.nan_to_num(7.0))
    out = kernels.attend(q, cache, 0.25)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    with pytest.raises(ValueError, match="lengths=257: exceeds the capacity of 256"):
        _ = cache.lengths
