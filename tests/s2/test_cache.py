"""The cache holds what the pattern's count says, and decoding equals full attention at every length."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import inputs

import s2.decode
from s2 import Request, S2Cache, S2Pattern, explain_decode, s2_attention, s2_decode

PATTERNS: list[dict[str, Any]] = [
    {"num_heads": 4, "num_kv_heads": 2, "stride": 2, "local_blocks": 1},
    {"num_heads": 6, "num_kv_heads": 2, "stride": 3, "local_blocks": 2, "per": "q_head", "offset": 1},
    {"num_heads": 4, "num_kv_heads": 4, "stride": 3, "local_blocks": 1, "dense_heads": 1},
    {"num_heads": 6, "num_kv_heads": 2, "stride": 3, "local_blocks": 2, "per": "q_head", "dense_heads": 1},
    {"num_heads": 4, "num_kv_heads": 2, "stride": 1},
]


@pytest.mark.parametrize("fields", PATTERNS)
def test_decoding_equals_full_attention(fields: dict[str, Any]) -> None:
    pattern = S2Pattern(block_size=16, **fields)
    q, k, v, _, _ = inputs(150, 150, pattern.num_heads, pattern.num_kv_heads, 8, 12, batch=2)
    whole = s2_attention(q, k, v, pattern)
    assert isinstance(whole, torch.Tensor)
    cache = S2Cache(pattern, 2, pattern.num_kv_heads, 8, 12, torch.float64)
    cache.append(k[:, :37], v[:, :37])
    for t in range(37, 150):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        torch.testing.assert_close(s2_decode(q[:, t : t + 1], cache), whole[:, t : t + 1])
        assert cache.nbytes == 2 * int(pattern.kv_tokens(t + 1).sum()) * (8 + 12) * 8
    assert cache.lengths == [150, 150]


@pytest.mark.parametrize("fields", PATTERNS)
def test_sequences_of_different_lengths(fields: dict[str, Any]) -> None:
    pattern = S2Pattern(block_size=16, **fields)
    q, k, v, _, _ = inputs(100, 100, pattern.num_heads, pattern.num_kv_heads, 8, 8, batch=3)
    lengths = [100, 1, 63]
    cache = S2Cache(pattern, 3, pattern.num_kv_heads, 8, 8, torch.float64)
    cache.append(k, v, lengths)
    last = torch.stack([q[n, length - 1 : length] for n, length in enumerate(lengths)])
    out = s2_decode(last, cache)
    for n, length in enumerate(lengths):
        want = s2_attention(q[n : n + 1, :length], k[n : n + 1, :length], v[n : n + 1, :length], pattern)
        assert isinstance(want, torch.Tensor)
        torch.testing.assert_close(out[n : n + 1], want[:, -1:])


def test_growth_keeps_what_is_held_and_room_can_be_made_at_once() -> None:
    pattern = S2Pattern(block_size=16, num_heads=4, num_kv_heads=4, stride=4, local_blocks=1)
    _, k, v, _, _ = inputs(700, 700, 4, 4, 8, 8)
    small, roomy = S2Cache(pattern, 1, 4, 8, 8), S2Cache(pattern, 1, 4, 8, 8, capacity=700)
    buffer = roomy.keys
    for cache in (small, roomy):
        for start in range(0, 700, 70):
            cache.append(k[:, start : start + 70].float(), v[:, start : start + 70].float())
    assert roomy.keys is buffer
    assert small.capacity >= 700 == small.longest
    for head in range(4):
        for a, b in zip(small.held(0, head), roomy.held(0, head), strict=True):
            assert torch.equal(a, b)
    # A window, a strip of a quarter of the blocks, and the row for what is dropped.
    assert roomy.reserved_nbytes == (4 * (1 + 11) * 16 + 1) * 16 * 4


def test_shards_and_layers_have_caches_of_their_own() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, block_size=16, local_blocks=1, stride=4, dense_layers="first:1")
    sparse, dense = pattern.for_layer(1).shard(1, 2), pattern.for_layer(0).shard(1, 2)
    sizes = []
    for view in (sparse, dense):
        cache = S2Cache(view, 1, 2, 8, 8)
        cache.append(torch.zeros(1, 200, 2, 8), torch.zeros(1, 200, 2, 8))
        sizes.append(cache.nbytes)
        assert cache.nbytes == int(view.kv_tokens(200).sum()) * 16 * 4
    assert sizes[0] < 0.5 * sizes[1]


def test_refusals() -> None:
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    with pytest.raises(ValueError, match="num_kv_heads=1: the pattern has 2"):
        S2Cache(pattern, 1, 1, 8, 8)
    with pytest.raises(ValueError, match="batch=0"):
        S2Cache(pattern, 0, 2, 8, 8)
    cache = S2Cache(pattern, 1, 2, 8, 8)
    with pytest.raises(ValueError, match="no sequence has a token yet"):
        s2_decode(torch.zeros(1, 1, 2, 8), cache)
    with pytest.raises(ValueError, match="shapes="):
        cache.append(torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 9))
    with pytest.raises(ValueError, match=r"new=\[4\]"):
        cache.append(torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 8), [4])
    cache.append(torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 8))
    with pytest.raises(ValueError, match="q="):
        s2_decode(torch.zeros(1, 2, 2, 8), cache)
    with pytest.raises(ValueError, match="backend=triton: cannot serve this call: its kernels need a CUDA or ROCm device, not cpu"):
        s2_decode(torch.zeros(1, 1, 2, 8), cache, backend="triton")
    with pytest.raises(ValueError, match="backend=flex: is not one of auto, triton, reference"):
        s2_decode(torch.zeros(1, 1, 2, 8), cache, backend="flex")


def test_the_table_of_decoders_gives_its_reasons() -> None:
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    choice = explain_decode(Request(pattern=pattern, device="cuda", dtype="float64", kv_heads=2))
    assert choice.backend == "reference"
    assert choice.refusals == {"triton": "no kernel for float64"}


def test_the_example_in_the_docstring() -> None:
    results = doctest.testmod(s2.decode)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_program_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "s2.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    whole = s2_attention(names["q"], names["k"], names["v"], names["pattern"])
    assert isinstance(whole, torch.Tensor)
    torch.testing.assert_close(names["last"], whole[:, -1:])
