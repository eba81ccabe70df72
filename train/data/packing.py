"""Documents to rows: which tokens of which document a row holds in an epoch, computed without a table of rows.

In an epoch the documents of a data set are laid end to end in that epoch's order: a stream of N tokens. Row r takes the seq_len + 1
tokens from r * seq_len on: its inputs are the first seq_len, its targets the last seq_len. So each token of the epoch is an input
exactly once, except that the stream's last token may be only a target; and each is a target once, except the stream's first.
The last row is filled up with eod tokens, a piece of their own without targets: no token of an epoch is dropped.

A document cut at a row's end goes on in the next row as a piece of its own. Positions restart at each piece, and the target that
would predict a document's first token from the document before is masked; eod itself is predicted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Row:
    """One packed row. `tokens` (seq_len + 1,) int64; `pieces` (n,) int64 first position of each piece, all below seq_len;
    `valid` (seq_len,) bool, whether each target is predicted."""

    tokens: NDArray[np.int64]
    pieces: NDArray[np.int64]
    valid: NDArray[np.bool_]


def rows_in_epoch(tokens: int, seq_len: int) -> int:
    """Return the rows that a stream of `tokens` tokens fills: (tokens - 1) targets, rounded up, and at least one row."""
    return max(1, -(-(tokens - 1) // seq_len))


class EpochStream:
    """The documents of one epoch laid end to end.

    Args:
        tokens: (total,) all ids of the data set (a memory map).
        starts: (n,) int64 position in `tokens` of each document of the epoch, in the epoch's order.
        lengths: (n,) int64 tokens of each of them.
    """

    def __init__(self, tokens: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._tokens = tokens
        self._ends = np.cumsum(lengths, dtype=np.int64)
        # A token at position p of the stream lies at p + shift in the file.
        self._shift = starts - (self._ends - lengths)
        self.size = int(self._ends[-1])

    def row(self, index: int, seq_len: int, pad: int) -> Row:
        """Return row `index` of `seq_len` inputs, filled up with the id `pad` after the stream's end."""
        begin = index * seq_len
        end = min(begin + seq_len + 1, self.size)
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        bounds = self._ends[first:last]  # where documents first+1 .. last begin in the stream
        inner = bounds - begin
        counts = np.diff(np.concatenate([[0], inner, [end - begin]]))
        where = np.arange(begin, end) + np.repeat(self._shift[first : last + 1], counts)
        tokens = np.full(seq_len + 1, pad, dtype=np.int64)
        tokens[: end - begin] = self._tokens[where]
        valid = np.zeros(seq_len, dtype=np.bool_)
        valid[: end - begin - 1] = True
        valid[inner - 1] = False
        pieces = np.concatenate([[0], inner, [end - begin]])
        return Row(tokens, pieces[pieces < seq_len], valid)
