"""A checkpoint tensor by tensor, in one process without a process group: for tools that put checkpoints together.

Nothing of a file is run: the index goes through the allow-list of `train.checkpoint.safety`, the data through torch's
`weights_only` reader, and both only from the files that the manifest names.
"""

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from train.checkpoint.directory import manifest_of
from train.checkpoint.safety import load_index

INDEX = ".metadata"
_DATA = "__0_0.distcp"


class StoredTensors:
    """The tensors of one complete checkpoint. Raises ValueError, naming the checkpoint, for what is incomplete, damaged or hostile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = manifest_of(path)
        """Step, progress and files."""
        self._index, self.shapes = load_index(path / INDEX)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers, as the index has it."""
        dtype = self._index.state_dict_metadata[name].properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"checkpoint {self.path}: {name} has no type of numbers; use an earlier checkpoint")
        return dtype

    def read(self, name: str) -> Tensor:
        """One tensor whole, on the CPU, whatever shards it was written in."""
        try:
            return self._read(name)
        except FileNotFoundError:
            raise ValueError(f"checkpoint {self.path}: it was deleted while {name} was read; use a newer checkpoint") from None
        except (AttributeError, IndexError, KeyError, TypeError, EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            words = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {words[0] if words else ''}"
            raise ValueError(f"checkpoint {self.path}: {name} is damaged ({reason}); use an earlier checkpoint") from None

    def _read(self, name: str) -> Tensor:
        entry = self._index.state_dict_metadata[name]
        shape, dtype = torch.Size(entry.size), self.dtype(name)
        if len(entry.chunks) == 1 and torch.Size(entry.chunks[0].sizes) == shape:
            return self._shard(name, entry.chunks[0], dtype)
        whole = torch.empty(shape, dtype=dtype)
        filled = 0
        for chunk in entry.chunks:
            place = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                place = place.narrow(dim, start, size)
            place.copy_(self._shard(name, chunk, dtype))
            filled += place.numel()
        if filled != whole.numel():
            raise ValueError(f"checkpoint {self.path}: {name} has {filled} of {whole.numel()} numbers; use an earlier checkpoint")
        return whole

    def _shard(self, name: str, chunk: Any, dtype: torch.dtype) -> Tensor:
        place = self._index.storage_data[MetadataIndex(name, chunk.offsets)]
        size = self.manifest["files"].get(place.relative_path)
        if size is None or not 0 <= place.offset <= place.offset + place.length <= size:
            raise ValueError(f"checkpoint {self.path}: {name} lies outside its files; do not load this checkpoint")
        with (self.path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        tensor = torch.load(data, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(chunk.sizes) or tensor.dtype != dtype:
            raise ValueError(f"checkpoint {self.path}: {name} is not what its index says; use an earlier checkpoint")
        return tensor


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write named CPU tensors and their index into an empty `folder`, in torch's format, one at a time; returns how many.

    torch's own writer keeps every tensor until the last is written; here an iterator that makes them needs the memory of one.
    """
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    with (folder / _DATA).open("wb") as file:
        for name, tensor in tensors:
            start = file.tell()
            # torch saves the whole memory that a view looks into.
            torch.save(tensor.clone(memory_format=torch.contiguous_format), file)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)
            entries[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.shape, [whole])
            places[MetadataIndex(name, whole.offsets, 0)] = _StorageInfo(_DATA, start, file.tell() - start)
    with (folder / INDEX).open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta()), file)
    return len(entries)
