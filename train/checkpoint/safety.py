"""Reading a checkpoint's pickled index without running anything that it may contain.

torch and Megatron-core load `.metadata` with plain `pickle.load`, which runs whatever a hostile file asks for. Here the file is
first unpickled by a reader that only knows the classes a real index is made of.
"""

import pickle
from pathlib import Path
from typing import Any

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
}
_DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


class _AllowListUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise ValueError(
            f"checkpoint index {self._path}: it refers to {module}.{name}, which no checkpoint needs; nothing of it was run; "
            "do not load this checkpoint"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError(f"checkpoint index {self._path}: it refers to an external object {pid!r}; do not load this checkpoint")


def read_index(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors by name. Raises ValueError, naming the offending class, for an index of anything but tensors.

    Entries that are not tensors are pickles inside the data files: their class (`BytesStorageMetadata`) is refused like any other.
    """
    return load_index(path)[1]


def load_index(path: Path) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The index itself, torch's `Metadata`, and the shapes of `read_index`, with the same refusals."""
    try:
        with path.open("rb") as file:
            index = _AllowListUnpickler(file, path).load()
        return index, {str(name): tuple(entry.size) for name, entry in index.state_dict_metadata.items()}
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ImportError) as error:
        raise ValueError(f"checkpoint index {path}: it is damaged ({error}); use an earlier checkpoint") from None
