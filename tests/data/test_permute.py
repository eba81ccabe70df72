"""The stateless permutation: a bijection for every size and key, the same on every machine and numpy version."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.permute import mix_key, permutation, permute


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_every_key_gives_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permutation(n, key)), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 2**36), key=st.integers(0, 2**64 - 1), data=st.data())
def test_one_element_is_the_same_alone_or_in_company(n: int, key: int, data: st.DataObject) -> None:
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), dtype=np.int64)
    together = permute(some, n, key)
    assert ((together >= 0) & (together < n)).all()
    assert [int(permute(some[i : i + 1], n, key)[0]) for i in range(some.size)] == together.tolist()


def test_values_that_old_runs_rely_on() -> None:
    """A change of these numbers changes what every resumed run reads: raise `ORDER_VERSION` with it."""
    assert mix_key("train", "rows", 1234, 0, 0) == 12401459923947063344
    assert permutation(10, 1).tolist() == [8, 0, 6, 7, 9, 4, 2, 5, 1, 3]
    assert permute(np.array([0, 1, 10**9]), 2**33 + 7, 2**64 - 1).tolist() == [4673571960, 6842051857, 3061496810]


def test_keys_and_positions_are_mixed() -> None:
    n = 10_000
    a, b = permutation(n, mix_key("x", 0)), permutation(n, mix_key("x", 1))
    assert (a == b).mean() < 0.01
    for order in (a, b):
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_a_small_set_reaches_all_its_orders_about_equally() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(permutation(4, mix_key("small", key)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert all(50 < count < 160 for count in counts.values())
