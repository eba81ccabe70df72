"""The table of tiles: the shipped one is whole, a machine's own comes first, damage is an error, and nothing exceeds the shared memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from s2.triton import config, tuning


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine's own file, not there yet."""
    monkeypatch.setenv("S2_TILES", str(tmp_path / "tiles"))
    tuning._read.cache_clear()
    config.choose_tiles.cache_clear()
    config.choose_decode.cache_clear()
    yield tuning.own_file((9, 0))
    tuning._read.cache_clear()
    config.choose_tiles.cache_clear()
    config.choose_decode.cache_clear()


def entry(**change: Any) -> dict[str, Any]:
    fields = {"kernel": "dkv", "bytes": 2, "width": 128, "block": 64, "length": None}
    return {**fields, "rows": 64, "keys": 64, "warps": 4, "stages": 2, "tma": True, **change}


def test_the_shipped_table_serves_every_call(own: Path) -> None:
    for size in (2, 4):
        for width in (16, 64, 128, 256):
            for block in (16, 64, 128, 512):
                assert config.choose_tiles(width, width, size, 227 << 10, block) is not None
                for shared in (64 << 10, 99 << 10, 227 << 10):
                    tile = config.choose_decode(width, width, size, shared, block)
                    assert tile is not None
                    assert (16 * width + (tile.stages - 1) * tile.keys * 2 * width) * size <= shared
    # What the figures in docs/log.md were measured with.
    tiles = config.choose_tiles(128, 128, 2, 227 << 10, 64)
    assert tiles is not None and tiles.stripe is not None
    assert [(tile.rows, tile.keys, tile.warps) for tile in (tiles.forward, tiles.dkv, tiles.stripe)] == [
        (64, 64, 4),
        (64, 64, 4),
        (64, 128, 8),
    ]
    # Where the stripes have no tile of their own they have that of the window.
    tiles = config.choose_tiles(128, 128, 2, 227 << 10, 128)
    assert tiles is not None and tiles.stripe == tiles.dkv


def test_a_machine_s_own_table_comes_first_by_length_width_and_block(own: Path) -> None:
    short, long = entry(length=8192, stages=2), entry(stages=1)
    tuning.write(own, [long, short], {"device": "test"})
    tuning.write(own, [entry(length=8192, stages=4)], {"device": "test"})
    assert len(json.loads(own.read_text())["tiles"]) == 2

    def stages(width: int, block: int, length: int, capability: tuple[int, int] = (9, 0)) -> int:
        tiles = config.choose_tiles(width, width, 2, 227 << 10, block, length, capability)
        assert tiles is not None
        return tiles.dkv.stages

    assert stages(128, 64, 4096) == 4
    assert stages(64, 32, 8193) == 1
    assert (stages(128, 128, 4096), stages(128, 64, 4096, (10, 0))) == (3, 2)
    assert [path.name for path in own.parent.iterdir()] == ["sm90.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a table of tiles"),
        ('{"format": 2, "tiles": []}', "has format 2, this is 1"),
        (json.dumps({"format": 1, "tiles": [entry(rows=48)]}), "rows is 48"),
        (json.dumps({"format": 1, "tiles": [entry(stages="3")]}), "stages is '3'"),
        (json.dumps({"format": 1, "tiles": [entry(kernel="other")]}), "kernel, bytes or block is unknown"),
        (json.dumps({"format": 1, "tiles": [{**entry(), "more": 1}]}), "fields are not"),
    ],
)
def test_a_damaged_table_is_an_error_with_the_remedy(own: Path, text: str, message: str) -> None:
    own.parent.mkdir()
    own.write_text(text)
    with pytest.raises(ValueError, match=message) as info:
        config.choose_tiles(128, 128, 2, 227 << 10, 64)
    assert "delete the file" in str(info.value)
    assert "\n" not in str(info.value)


def test_a_tile_that_is_not_allowed_is_not_written(own: Path) -> None:
    with pytest.raises(ValueError, match="warps is 3"):
        tuning.write(own, [entry(warps=3)], {})
    assert not own.exists()
