"""Exact conditional entropies from counts: what a table of n-grams can reach, the line that a model has to get below."""

import numpy as np
from numpy.typing import NDArray

from train.data.indexed import IndexedFile
from train.data.tokenizer import Tokenizer

_DENSE_LIMIT = 1 << 24


def _counts(keys: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Return how often each key that occurs does, by a table when the keys are below a small `bound`, else by sorting."""
    if bound <= _DENSE_LIMIT:
        counts = np.bincount(keys)
        return counts[counts > 0].astype(np.int64)
    return np.unique(keys, return_counts=True)[1].astype(np.int64)


def _plogp(counts: NDArray[np.int64]) -> float:
    """Return the sum of c log2 c."""
    return float((counts * np.log2(counts)).sum())


def conditional_entropy(ids: NDArray[np.integer], order: int, starts: NDArray[np.integer] | None = None) -> float:
    """Return the empirical entropy, in bits per token, of a token given the `order` tokens before it (0: none, 1: a bigram table).

    H = (sum over contexts of c log2 c - sum over n-grams of c log2 c) / number of n-grams, with the counts of this very text: the mean
    code length of the best table of that order, fitted to the text that it is measured on.

    Args:
        ids: (n,) token ids, 0 or more, n > order.
        order: tokens of context.
        starts: positions where documents begin; n-grams that reach over a beginning are left out. None: one document.

    Raises:
        ValueError: if no n-gram remains or `order` is negative.

    Example:
        >>> conditional_entropy(np.array([0, 1] * 50), order=1)
        0.0
    """
    if order < 0:
        raise ValueError(f"order={order}: must be 0 or more; give 1 for bigrams")
    tokens = np.asarray(ids).astype(np.int64).ravel()
    grams = tokens.size - order
    if grams <= 0:
        raise ValueError(f"order={order}: {tokens.size} tokens hold no n-gram; give more text")
    keep = np.ones(grams, dtype=np.bool_)
    if starts is not None:
        begins = np.zeros(tokens.size, dtype=np.bool_)
        begins[np.asarray(starts, dtype=np.int64)] = True
        for lag in range(1, order + 1):
            keep &= ~begins[lag : lag + grams]
        if not keep.any():
            raise ValueError(f"order={order}: no document holds an n-gram; give longer documents")
    base = int(tokens.max()) + 1
    context, bound = np.zeros(grams, dtype=np.int64), 1
    for lag in range(order):
        context, bound = context * base + tokens[lag : lag + grams], bound * base
        if bound * base > _DENSE_LIMIT:  # renumber, so that the keys of long contexts stay small
            names, context = np.unique(context, return_inverse=True)
            bound = int(names.size)
    context = context[keep]
    full = context * base + tokens[order:][keep]
    return (_plogp(_counts(context, bound)) - _plogp(_counts(full, bound * base))) / full.size


def bigram_bits_per_byte(prefix: str, tokenizer: Tokenizer) -> float:
    """Return the bigram conditional entropy of a whole data set in bits per byte of its text.

    Counted as the validation loss is: each token given the one before within its document, eod included, divided by the
    bytes that the predicted tokens stand for.
    """
    data = IndexedFile(prefix)
    bits = conditional_entropy(data.tokens, 1, data.starts) * (data.total_tokens - len(data))
    predicted = np.bincount(data.tokens, minlength=tokenizer.vocab_size) - np.bincount(
        np.asarray(data.tokens[data.starts]), minlength=tokenizer.vocab_size
    )
    return bits / float(predicted @ tokenizer.token_bytes)
