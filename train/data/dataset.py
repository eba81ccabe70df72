"""The batches of a run: `BatchSource` says which rows a step takes and packs them.

Order. Each data set's documents are split into train and validation once, by a shuffle that depends on nothing but their number. The train
documents are laid end to end in an order of their own for each (seed, epoch), cut into rows, and the rows are taken in a shuffled order
too, so that a batch does not hold neighbours of one long document. Samples of several data sets alternate as their weights say. Every
part is a function of (seed, epoch, position): a resumed run, also with another data-parallel size, reads what the uninterrupted one would.
"""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from train.config.errors import ConfigError
from train.data.blend import Blend
from train.data.config import DataConfig
from train.data.demo import ensure_demo_corpus
from train.data.errors import DataError
from train.data.indexed import IndexedFile
from train.data.manifest import Manifest, hash_file
from train.data.packing import EpochStream, Row, rows_in_epoch
from train.data.permute import mix_key, permutation, permute
from train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

Split = Literal["train", "validation"]

ORDER_VERSION = 1
"""Raised whenever the same settings and files would give other samples, so that a checkpoint of before is not resumed silently."""

# A sample id is data set (11 bits), epoch (16) and row (36): a positive int64 that says which text it is.
_ROW_BITS, _EPOCH_BITS, _SET_BITS = 36, 16, 11


def pack_id(dataset: int, epoch: int, row: int) -> int:
    """Return the sample id of row `row` of epoch `epoch` of data set `dataset` (all 0-based)."""
    return (dataset << (_EPOCH_BITS + _ROW_BITS)) | (epoch << _ROW_BITS) | row


def unpack_id(sample_id: int) -> tuple[int, int, int]:
    """Return data set, epoch and row of a sample id."""
    row = sample_id & ((1 << _ROW_BITS) - 1)
    epoch = (sample_id >> _ROW_BITS) & ((1 << _EPOCH_BITS) - 1)
    return sample_id >> (_EPOCH_BITS + _ROW_BITS), epoch, row


@dataclass(frozen=True)
class Batch:
    """Packed rows as torch tensors on the CPU."""

    tokens: "torch.Tensor"
    """(rows, seq_len) int64 input ids."""
    targets: "torch.Tensor"
    """(rows, seq_len) int64 the id after each input."""
    loss_mask: "torch.Tensor"
    """(rows, seq_len) float32; 0 where the target is another document's or padding."""
    positions: "torch.Tensor"
    """(rows, seq_len) int64, from 0 in each document's piece."""
    cu_seqlens: "torch.Tensor | None"
    """(n + 1,) int32 bounds of the pieces over the flattened rows * seq_len tokens; each row's end is one. None: a row is one piece."""
    sample_ids: list[int]
    """The ids that were asked for."""
    target_bytes: float
    """Bytes of text of the targets whose mask is 1."""

    def to(self, device: "torch.device | str", non_blocking: bool = False) -> "Batch":
        """Return the batch with its tensors on `device`."""
        names = ["tokens", "targets", "loss_mask", "positions"] + ["cu_seqlens"] * (self.cu_seqlens is not None)
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


class _SplitSet:
    """One data set's documents of one split, with its epochs' orders; keeps the last two epochs' streams."""

    def __init__(self, prefix: str, index: int, config: DataConfig, tokenizer: Tokenizer, seq_len: int, seed: int, split: Split) -> None:
        self.file = IndexedFile(prefix)
        self.index, self._seq_len, self._pad = index, seq_len, tokenizer.eod
        self._seed, self._split = seed, split
        self.manifest = Manifest.read(prefix)
        if self.manifest is not None:
            self.manifest.check_tokenizer(prefix, tokenizer.name, tokenizer.vocab_size)
            self.manifest.check_files(prefix, len(self.file), self.file.total_tokens)
        self._vocab_size = tokenizer.vocab_size
        self.documents = _split_documents(len(self.file), config.validation, prefix, split)
        self.total_tokens = int(self.file.lengths[self.documents].sum())
        self.rows = rows_in_epoch(self.total_tokens, seq_len)
        if self.rows >= 1 << _ROW_BITS:
            raise DataError(prefix, f"under 2^{_ROW_BITS} rows an epoch", str(self.rows), "split the data set or raise train.seq_len")
        self._streams: OrderedDict[int, EpochStream] = OrderedDict()

    def _key(self, what: str, epoch: int) -> int:
        """Return the key of an epoch's shuffle; validation has one order for all seeds, so that runs can be compared."""
        if self._split == "validation":
            return mix_key("validation", what, self.index)
        return mix_key("train", what, self._seed, self.index, epoch)

    def ids(self, positions: NDArray[np.int64]) -> list[int]:
        """Return the sample ids at `positions` (n,) of this set's endless sequence of rows."""
        epochs, within = np.divmod(positions, self.rows)
        out = np.empty(positions.size, dtype=np.int64)
        for epoch in np.unique(epochs):
            if epoch >= 1 << _EPOCH_BITS:
                raise DataError(self.file.prefix, f"under {1 << _EPOCH_BITS} epochs", f"epoch {epoch}", "give more data")
            at = epochs == epoch
            out[at] = permute(within[at], self.rows, self._key("rows", int(epoch))) | (int(epoch) << _ROW_BITS)
        return [int(i) | pack_id(self.index, 0, 0) for i in out]

    def row(self, epoch: int, index: int) -> Row:
        """Return row `index` of epoch `epoch`, its ids checked against the vocabulary."""
        row = self._stream(epoch).row(index, self._seq_len, self._pad)
        low, high = int(row.tokens.min()), int(row.tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                self.file.bin_path, f"token ids from 0 to {self._vocab_size - 1}", f"id {high if low >= 0 else low}",
                "the data set was built with another tokenizer or is damaged: name that tokenizer in data.tokenizer or build it again",
            )  # fmt: skip
        return row

    def _stream(self, epoch: int) -> EpochStream:
        if self._split == "validation":
            epoch = 0
        if epoch not in self._streams:
            order = self.documents[permutation(self.documents.size, self._key("documents", epoch))]
            self._streams[epoch] = EpochStream(self.file.tokens, self.file.starts[order], self.file.lengths[order])
            if len(self._streams) > 2:  # a batch reaches over at most the end of one epoch, unless an epoch is tiny
                self._streams.popitem(last=False)
        return self._streams[epoch]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what the data set is: its path, counts and hashes."""
        manifest = self.manifest
        return {
            "path": self.file.prefix,
            "documents": len(self.file),
            "tokens": self.file.total_tokens,
            "bin_sha256": manifest.bin_sha256 if manifest is not None else _sampled_hash(self.file),
            "idx_sha256": manifest.idx_sha256 if manifest is not None else hash_file(self.file.idx_path),
        }


def _sampled_hash(file: IndexedFile) -> str:
    """Return a hash of the first and last MiB of a .bin that came without hashes: reading all of a large one would take minutes."""
    digest = hashlib.sha256()
    with open(file.bin_path, "rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, file.bin_path.stat().st_size - (1 << 20)))
        digest.update(stream.read())
    return f"ends:{digest.hexdigest()}"


def _split_documents(count: int, share: float, prefix: str, split: Split) -> NDArray[np.int64]:
    """Return the documents of `split`: validation takes the last round(share * count) of a fixed shuffle, at least one, never all."""
    if not 0 <= share < 1:
        raise ConfigError(
            "data.validation", share, "must be 0 or more and below 1", "give the share of documents to hold out, such as 0.01"
        )
    order = permutation(count, mix_key("split", count))
    if share == 0:
        if split == "validation":
            raise ConfigError(
                "data.validation", share, "no document is held out for validation", "give a share above 0, or train.eval_steps=0"
            )
        return np.sort(order)
    if count < 2:
        raise ConfigError(
            "data.validation", share, f"{prefix} has {count} document and each split needs one", "build it from more documents or give 0"
        )  # fmt: skip
    held_out = min(max(1, round(share * count)), count - 1)
    return np.sort(order[count - held_out :] if split == "validation" else order[: count - held_out])


class BatchSource:
    """The samples of one split and their order.

    Args:
        config: the run's data settings.
        tokenizer: the tokenizer that the data sets were built with.
        seq_len: tokens of a row.
        seed: seed of the training order (validation does not depend on it).
        split: `train` or `validation`.

    Raises:
        ConfigError, DataError: in one line, for settings or files that cannot be used.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seq_len: int, seed: int, split: Split) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split={split}: must be train or validation; give one of these")
        if seq_len < 1:
            raise ConfigError("train.seq_len", seq_len, "must be 1 or more", "give the tokens of a row")
        paths = list(config.paths) or ([ensure_demo_corpus(config)] if config.demo else [])
        if not paths:
            raise ConfigError("data.paths", [], "names no data set", "give prefixes built by `leantron data build`, or data=demo")
        if len(paths) >= 1 << _SET_BITS:
            raise ConfigError("data.paths", len(paths), f"at most {(1 << _SET_BITS) - 1} data sets", "join some of them")
        self.split: Split = split
        self._tokenizer, self._seq_len, self._seed, self._config = tokenizer, seq_len, seed, config
        self._sets = [_SplitSet(str(path), i, config, tokenizer, seq_len, seed, split) for i, path in enumerate(paths)]
        self._blend = _blend(config, [data.total_tokens for data in self._sets])

    @property
    def total_tokens(self) -> int:
        """Tokens of this split over all data sets."""
        return sum(data.total_tokens for data in self._sets)

    @property
    def total_rows(self) -> int:
        """Rows of one epoch of this split over all data sets."""
        return sum(data.rows for data in self._sets)

    @property
    def shares(self) -> list[float]:
        """Share of each data set in the samples, as realised."""
        return [weight / self._blend.period for weight in self._blend.weights]

    def sample_ids(self, step: int, global_batch: int) -> list[int]:
        """Return the ids of the `global_batch` samples of `step` (0-based), over all data-parallel ranks and sites.

        Training goes on from step to step through all epochs. Validation steps count from 0 in each evaluation, which so reads the
        same rows each time.
        """
        samples = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
        sets, positions = self._blend.locate(samples)
        out = [0] * global_batch
        for index in np.unique(sets):
            at = np.flatnonzero(sets == index)
            for place, sample_id in zip(at, self._sets[index].ids(positions[at]), strict=True):
                out[place] = sample_id
        return out

    def rows(self, ids: Sequence[int]) -> Batch:
        """Return the packed rows of sample ids, in the order given (at least one)."""
        import torch

        rows = []
        for sample_id in ids:
            dataset, epoch, row = unpack_id(sample_id)
            if not (0 <= dataset < len(self._sets) and row < self._sets[dataset].rows):
                raise ValueError(f"sample_id={sample_id}: no such row in this source; take ids from sample_ids")
            rows.append(self._sets[dataset].row(epoch, row))
        seq_len, count = self._seq_len, len(rows)
        tokens = np.stack([row.tokens for row in rows])
        valid = np.stack([row.valid for row in rows])
        bounds = np.concatenate([row.pieces + i * seq_len for i, row in enumerate(rows)] + [[count * seq_len]])
        positions = np.arange(count * seq_len) - np.repeat(bounds[:-1], np.diff(bounds))
        targets = np.ascontiguousarray(tokens[:, 1:])
        return Batch(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            targets=torch.from_numpy(targets),
            loss_mask=torch.from_numpy(valid.astype(np.float32)),
            positions=torch.from_numpy(positions.reshape(count, seq_len)),
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            sample_ids=[int(i) for i in ids],
            target_bytes=float(self._tokenizer.token_bytes[targets[valid]].sum()),
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the samples, for checkpoints: compare `digest`, which leaves out where the files lie."""
        identities = [data.identity for data in self._sets]
        facts: dict[str, Any] = {
            "order": ORDER_VERSION,
            "tokenizer": self._tokenizer.name,
            "seq_len": self._seq_len,
            "seed": self._seed,
            "validation": self._config.validation,
            "weights": self._blend.weights,
            "datasets": identities,
        }
        placeless = facts | {"datasets": [{k: v for k, v in identity.items() if k != "path"} for identity in identities]}
        digest = hashlib.sha256(json.dumps(placeless, sort_keys=True).encode()).hexdigest()
        return facts | {"digest": digest}


def _blend(config: DataConfig, tokens: list[int]) -> Blend:
    """Return the blend of the configured weights, or of the data sets' tokens when there are none."""
    if config.weights is None:
        floor = sum(tokens) / (1 << 15)  # a very small data set still takes part
        return Blend([max(float(count), floor) for count in tokens])
    if len(config.weights) != len(tokens):
        raise ConfigError("data.weights", config.weights, f"needs one weight for each of the {len(tokens)} data sets", "give as many")
    if any(not math.isfinite(weight) or weight < 0 for weight in config.weights) or not any(config.weights):
        raise ConfigError("data.weights", config.weights, "each must be 0 or more, and one above 0", "correct the weights")
    try:
        return Blend(config.weights)
    except ValueError as error:
        raise ConfigError("data.weights", config.weights, str(error), "raise the smallest weight") from None
