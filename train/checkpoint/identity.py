"""Is the data that a run goes on with the data that it was trained on? Torch-free.

The fingerprint of a `BatchSource` holds all that its samples follow from. Where the files lie may change, what is in them may not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_KEYS = {
    "tokenizer": "data.tokenizer",
    "seq_len": "train.seq_len",
    "seed": "train.seed",
    "validation": "data.validation",
    "weights": "data.weights, as realised",
    "order": "the version of the order of samples",
}
_FACTS = {"documents": "documents", "tokens": "tokens", "bin_sha256": "hash of the .bin", "idx_sha256": "hash of the .idx"}


def data_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, a phrase each, `stored` value first; [] when the samples are the same."""
    if stored["digest"] == now["digest"]:
        return []
    return [*_settings(stored, now), *_data_sets(stored["datasets"], now["datasets"])]


def _settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, name in _KEYS.items():
        if stored.get(key) != now.get(key):
            yield f"{name}: {stored.get(key)} then, {now.get(key)} now"


def _data_sets(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterator[str]:
    if len(stored) != len(now):
        yield f"data sets: {[one['path'] for one in stored]} then, {[one['path'] for one in now]} now"
        return
    for then, this in zip(stored, now, strict=True):
        where = str(this["path"]) if this["path"] == then["path"] else f"{this['path']} (then {then['path']})"
        for key, name in _FACTS.items():
            if then[key] != this[key]:
                yield f"{where}: {name} {_short(then[key])} then, {_short(this[key])} now"


def _short(value: Any) -> str:
    """Hashes by their first letters."""
    return f"{value[:17]}..." if isinstance(value, str) and len(value) > 20 else str(value)
