"""The error of a data file that cannot be read, built or used: one line that names the file, what was expected and what was found."""

from pathlib import Path


class DataError(ValueError):
    """A damaged, empty, missing or mismatched data file; renders as `path: expected ..., found ...; remedy` on one line."""

    def __init__(self, path: str | Path, expected: str, found: str, remedy: str) -> None:
        self.path = str(path)
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(" ".join(f"{path}: expected {expected}, found {found}; {remedy}".split()))

    def __reduce__(self) -> tuple[type["DataError"], tuple[str, str, str, str]]:
        """Pickle by the four arguments: tokenising processes pass errors to their parent."""
        return type(self), (self.path, self.expected, self.found, self.remedy)
