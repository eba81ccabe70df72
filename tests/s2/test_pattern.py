"""The pattern against its definition, written out by brute force."""

import doctest
import pickle
import subprocess
import sys

import numpy as np
import pytest

from s2 import S2Pattern

CASES = [
    {"num_heads": 4, "num_kv_heads": 4, "block_size": 16, "local_blocks": 2, "stride": 4},
    {"num_heads": 8, "num_kv_heads": 4, "block_size": 16, "local_blocks": 1, "stride": 3, "offset": 2},
    {"num_heads": 6, "num_kv_heads": 2, "block_size": 32, "local_blocks": 3, "stride": 2, "step": 3},
    {"num_heads": 8, "num_kv_heads": 2, "block_size": 16, "local_blocks": 2, "stride": 8, "per": "q_head", "offset": 1},
    {"num_heads": 8, "num_kv_heads": 8, "block_size": 16, "local_blocks": 2, "stride": 5, "dense_heads": 3},
    {"num_heads": 8, "num_kv_heads": 4, "block_size": 16, "local_blocks": 1, "stride": 6, "dense_heads": 2, "per": "q_head"},
    {"num_heads": 4, "num_kv_heads": 4, "block_size": 16, "local_blocks": 2, "stride": 16, "rotate": 4, "dense_layers": "first:1"},
    {"num_heads": 4, "num_kv_heads": 2, "block_size": 16, "local_blocks": 4, "stride": 1},
    {"num_heads": 4, "num_kv_heads": 4, "block_size": 16, "local_blocks": 1, "stride": 3, "dense_heads": 4},
]


def attends(case: dict, head: int, i: int, j: int, offset: int | None = None) -> bool:
    """The definition, for a global query head."""
    per, heads, kv = case.get("per", "kv_head"), case["num_heads"], case["num_kv_heads"]
    units = kv if per == "kv_head" else heads
    unit = head * kv // heads if per == "kv_head" else head
    n = case.get("dense_heads", 0)
    dense = [int((x + 0.5) * units / n) for x in range(n)]
    if j > i:
        return False
    if case["stride"] == 1 or unit in dense:
        return True
    sparse = [u for u in range(units) if u not in dense]
    step = case.get("step") or (1 if len(sparse) >= case["stride"] else case["stride"] // len(sparse))
    offset = case.get("offset", 0) if offset is None else offset
    return i - j < case["local_blocks"] or (j + sparse.index(unit) * step + offset) % case["stride"] == 0


def token_mask(pattern: S2Pattern, seq_len: int) -> np.ndarray:
    """(heads, seq_len, seq_len) from the block mask and causality."""
    blocks = -(-seq_len // pattern.block_size)
    mask = pattern.block_mask(blocks).numpy().repeat(pattern.block_size, 1).repeat(pattern.block_size, 2)[:, :seq_len, :seq_len]
    return mask & np.tril(np.ones((seq_len, seq_len), dtype=bool))


@pytest.mark.parametrize("case", CASES)
def test_the_definition(case: dict) -> None:
    pattern = S2Pattern(**case)
    blocks = 40
    expected = np.array([[[attends(case, h, i, j) for j in range(blocks)] for i in range(blocks)] for h in range(case["num_heads"])])
    assert np.array_equal(pattern.block_mask(blocks).numpy(), expected)
    assert np.array_equal(pattern.block_mask(7, blocks).numpy(), expected[:, -7:])
    one_by_one = [[[pattern.attends(h, i, j) for j in range(12)] for i in range(12)] for h in range(case["num_heads"])]
    assert np.array_equal(one_by_one, expected[:, :12, :12])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 63, 64, 65, 127, 300, 513])
def test_counts_are_exact(case: dict, seq_len: int) -> None:
    pattern = S2Pattern(**case)
    mask = token_mask(pattern, seq_len)
    assert pattern.pairs(seq_len).tolist() == mask.sum((1, 2)).tolist()
    assert pattern.density(seq_len) == pytest.approx(mask.sum() / (seq_len * (seq_len + 1) / 2) / len(mask), rel=1e-15)
    last = mask[:, -1].reshape(case["num_kv_heads"], -1, seq_len).any(1)
    assert pattern.kv_tokens(seq_len).tolist() == last.sum(-1).tolist()


def test_density_of_the_published_shape() -> None:
    pattern = S2Pattern(num_heads=32, num_kv_heads=32, block_size=64, local_blocks=16, stride=16)
    assert pattern.density(8192) == pytest.approx(0.276, abs=5e-4)
    assert pattern.density(131072) == pytest.approx(0.077, abs=5e-4)
    assert pattern.density(1 << 30) == pytest.approx(1 / 16, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shards_are_slices_of_the_global_pattern(case: dict, world: int) -> None:
    heads, kv = case["num_heads"], case["num_kv_heads"]
    pattern = S2Pattern(**case)
    if heads % world or (kv % world and world % kv):
        with pytest.raises(ValueError, match="world="):
            pattern.shard(0, world)
        return
    whole = pattern.block_mask(20).numpy()
    shards = [pattern.shard(rank, world) for rank in range(world)]
    assert np.array_equal(np.concatenate([shard.block_mask(20).numpy() for shard in shards]), whole)
    assert np.array_equal(np.concatenate([shard.pairs(200) for shard in shards]), pattern.pairs(200))
    for rank, shard in enumerate(shards):
        assert shard.local_heads == heads // world
        assert shard.local_kv_heads == max(1, kv // world)
        assert shard.first_head == rank * heads // world
        assert shard.first_kv_head == rank * heads // world * kv // heads
    if kv >= world:
        assert np.array_equal(np.concatenate([shard.kv_tokens(200) for shard in shards]), pattern.kv_tokens(200))


def test_more_ranks_than_kv_heads_replicate_the_head() -> None:
    pattern = S2Pattern(num_heads=8, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    shards = [pattern.shard(rank, 4) for rank in range(4)]
    assert [shard.first_kv_head for shard in shards] == [0, 0, 1, 1]
    assert [shard.residues() for shard in shards] == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_dense_heads_are_spread() -> None:
    pattern = S2Pattern(num_heads=16, num_kv_heads=16, block_size=16, local_blocks=1, stride=4, dense_heads=4)
    assert pattern.dense_units() == (2, 6, 10, 14)
    assert all(sum(r == -1 for r in pattern.shard(rank, 4).residues()) == 1 for rank in range(4))


def test_missing_residues_and_rotation() -> None:
    with pytest.raises(ValueError, match=r"stride=16: residues 1, 3, 5, 7, 9, 11, 13, 15 modulo 16 .* rotate=2"):
        S2Pattern(num_heads=8, num_kv_heads=8, stride=16)
    pattern = S2Pattern(num_heads=8, num_kv_heads=8, stride=16, rotate=2)
    assert len(pattern.missing_residues()) == 8
    assert pattern.missing_residues(all_layers=True) == ()
    layers = [pattern.for_layer(layer) for layer in range(4)]
    assert set(layers[0].residues()) | set(layers[1].residues()) == set(range(16))
    assert set(layers[0].missing_residues()) == set(layers[1].residues())
    assert [layer.residues() for layer in layers[2:]] == [layer.residues() for layer in layers[:2]]
    ones = S2Pattern(num_heads=8, num_kv_heads=8, stride=16, rotate=2, step=1)
    assert set(ones.for_layer(0).residues()) | set(ones.for_layer(1).residues()) == set(range(16))
    with pytest.raises(ValueError, match=r"residues 1 modulo 4 .* 3 sparse heads"):
        S2Pattern(num_heads=4, num_kv_heads=4, stride=4, dense_heads=1)
    assert S2Pattern(num_heads=4, num_kv_heads=4, stride=4).missing_residues() == ()


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("stride", [2, 3, 7, 8, 12])
def test_the_proposed_rotation_covers(heads: int, stride: int) -> None:
    try:
        S2Pattern(num_heads=heads, num_kv_heads=heads, stride=stride)
    except ValueError as error:
        proposed = int(str(error).rsplit("rotate=", 1)[1])
        pattern = S2Pattern(num_heads=heads, num_kv_heads=heads, stride=stride, rotate=proposed)
        union = {r for layer in range(proposed) for r in pattern.for_layer(layer).residues()}
        assert union == set(range(stride))
        with pytest.raises(ValueError, match="stride"):
            S2Pattern(num_heads=heads, num_kv_heads=heads, stride=stride, rotate=proposed - 1)
    else:
        assert heads >= stride or stride % heads == 0 == stride // heads - 1


@pytest.mark.parametrize(
    ("spec", "dense"),
    [("first:2", [0, 1]), ("first:0", []), ("every:2", [1, 3, 5, 7]), ("every:3", [2, 5]), ("every:1", list(range(8))), ([5, 0], [0, 5])],
)
def test_dense_layers(spec: object, dense: list[int]) -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=8, rotate=2, dense_layers=spec)
    assert [layer for layer in range(8) if pattern.is_dense_layer(layer)] == dense
    assert [layer for layer in range(8) if pattern.for_layer(layer).is_dense] == dense
    sparse = [pattern.for_layer(layer).residues() for layer in range(8) if layer not in dense]
    assert sparse == [sparse[n % 2] for n in range(len(sparse))]
    assert len(sparse) < 2 or sparse[0] != sparse[1]


def test_check_layers() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=8, rotate=2, dense_layers=[0, 2])
    pattern.check_layers(4)
    with pytest.raises(ValueError, match="only 1 sparse layers"):
        pattern.check_layers(3)
    with pytest.raises(ValueError, match=r"dense_layers=\[0, 2\]: the model has blocks 0 to 1"):
        pattern.check_layers(2)


BAD = [
    ({"num_heads": 0}, "num_heads=0"),
    ({"num_heads": 4.0}, "num_heads=4.0"),
    ({"num_heads": True}, "num_heads=True"),
    ({"num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
    ({"block_size": 8}, "block_size=8"),
    ({"block_size": 48}, "block_size=48: must be a power of two"),
    ({"local_blocks": 0}, "local_blocks=0"),
    ({"stride": 0}, "stride=0"),
    ({"stride": None}, "stride=None"),
    ({"offset": -1}, "offset=-1"),
    ({"step": 0}, "step=0"),
    ({"step": 4}, "stride=4: residues"),
    ({"dense_heads": 5}, "dense_heads=5: exceeds the 4 heads"),
    ({"per": "head"}, "per=head"),
    ({"rotate": 0}, "rotate=0"),
    ({"rotate": 5}, "rotate=5: exceeds stride=4"),
    ({"dense_layers": "last:2"}, "dense_layers=last:2"),
    ({"dense_layers": "every:0"}, "dense_layers=every:0"),
    ({"dense_layers": "first:-1"}, "dense_layers=first:-1"),
    ({"dense_layers": [1, 1]}, "names a layer twice"),
    ({"dense_layers": [-1]}, "dense_layers=-1"),
    ({"dense_layers": 3}, "dense_layers=3"),
    ({"world": 3}, "world=3"),
    ({"rank": 2, "world": 2}, "rank=2"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_values_are_one_line_with_rule_and_remedy(change: dict, message: str) -> None:
    with pytest.raises(ValueError) as info:
        S2Pattern(**({"num_heads": 4, "num_kv_heads": 4, "stride": 4} | change))
    text = str(info.value)
    assert message in text
    assert "\n" not in text
    assert ": " in text
    assert "; " in text


def test_views_do_not_nest_but_repeat() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=8, rotate=2)
    assert pattern.for_layer(1).for_layer(1) == pattern.for_layer(1)
    assert pattern.shard(1, 2).for_layer(1) == pattern.for_layer(1).shard(1, 2)
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    with pytest.raises(ValueError, match="already rank 1 of 2"):
        pattern.shard(1, 2).shard(0, 2)


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, s2; s2.S2Pattern(num_heads=2, num_kv_heads=2, stride=2).density(100); s2.Request; import s2.backends; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_examples_in_the_docstrings() -> None:
    import s2.attention
    import s2.pattern

    for module in (s2.pattern, s2.attention):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0
