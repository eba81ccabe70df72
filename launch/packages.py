"""Our folders have common names: make sure that a user's own `train.py` or `configs/` is not taken for one of them."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "s2", "moe", "launch", "configs")


class ForeignPackage(ImportError):
    """One of our names leads to somebody else's package."""


def shadowed() -> dict[str, str]:
    """Return, for each of our packages that an import would not take from beside this file, where it would be taken from."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None or Path(origin).resolve().parent != ROOT / name:
            found[name] = origin or "nowhere"
    return found


def use_own_packages() -> None:
    """Put the folder of our packages first on the path, ahead of the working directory that `python -m` puts there.

    Raises ForeignPackage naming the one that is imported from elsewhere all the same.
    """
    if str(ROOT) != sys.path[0]:
        sys.path.insert(0, str(ROOT))
    for name, origin in shadowed().items():
        raise ForeignPackage(f"{name}={origin}: this is not the {name} of leantron in {ROOT}; rename it, or import leantron first")
