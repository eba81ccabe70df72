"""Packed rows against a construction token by token."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.packing import EpochStream, rows_in_epoch

PAD = 999


def naive_rows(documents: list[list[int]], seq_len: int) -> list[tuple[list[int], list[int], list[bool], list[int]]]:
    """Return inputs, targets, valid and positions of each row, from the rules of the module's docstring."""
    stream = [(token, place) for doc in documents for place, token in enumerate(doc)]
    rows = []
    for begin in range(0, max(1, len(stream) - 1), seq_len):
        inputs, targets, valid, positions = [], [], [], []
        for offset in range(seq_len):
            at = begin + offset
            inside, ahead = at < len(stream), at + 1 < len(stream)
            inputs.append(stream[at][0] if inside else PAD)
            targets.append(stream[at + 1][0] if ahead else PAD)
            valid.append(inside and ahead and stream[at + 1][1] != 0)
            new_piece = offset == 0 or (inside and stream[at][1] == 0) or at == len(stream)
            positions.append(0 if new_piece else positions[-1] + 1)
        rows.append((inputs, targets, valid, positions))
    return rows


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=15), seq_len=st.integers(1, 20), seed=st.integers(0, 99))
def test_equals_the_naive_rows(lengths: list[int], seq_len: int, seed: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    order = np.random.default_rng(seed).permutation(len(lengths))
    stream = EpochStream(tokens, starts[order].astype(np.int64), np.array(lengths, dtype=np.int64)[order])
    want = naive_rows([tokens[starts[i] : starts[i] + lengths[i]].tolist() for i in order], seq_len)
    assert rows_in_epoch(stream.size, seq_len) == len(want)
    for index, (inputs, targets, valid, positions) in enumerate(want):
        row = stream.row(index, seq_len, PAD)
        assert row.tokens[:-1].tolist() == inputs and row.tokens[1:].tolist() == targets
        assert row.valid.tolist() == valid
        bounds = [*row.pieces.tolist(), seq_len]
        assert bounds[0] == 0 and all(a < b for a, b in pairwise(bounds))
        assert [i - max(p for p in row.pieces if p <= i) for i in range(seq_len)] == positions


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), seq_len=st.integers(1, 64))
def test_each_token_is_an_input_once_and_predicted_once(lengths: list[int], seq_len: int) -> None:
    size = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    stream = EpochStream(np.arange(size, dtype=np.int32), starts, np.array(lengths, dtype=np.int64))
    inputs, predicted = [], []
    for index in range(rows_in_epoch(size, seq_len)):
        row = stream.row(index, seq_len, -1)
        inputs += [t for t in row.tokens[:-1].tolist() if t >= 0]
        predicted += row.tokens[1:][row.valid].tolist()
    # The last token of the stream is an input only when the last row is not full: it predicts nothing.
    assert inputs in (list(range(size)), list(range(size - 1)))
    assert predicted == sorted(set(range(size)) - set(starts.tolist()))
