import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.data.sample_order import TokenStream, build_sample_order, count_samples, plan_epochs

# formats.md 3.2: lengths, seq_length 8, seed 1234.
LENGTHS = np.array([5, 7, 3, 9, 6], np.int32)
ONE = ([4, 0, 1, 2, 3], [[0, 0], [1, 2], [2, 5], [4, 3]], [1, 2, 0])
GOLDEN = {
    3: (1, False, *ONE),
    None: (1, False, *ONE),
    5: (
        2,
        False,
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [[0, 0], [2, 2], [3, 4], [5, 0], [5, 8], [7, 1], [8, 4], [9, 5]],
        [6, 4, 0, 5, 3, 2, 1],
    ),
    8: (
        3,
        True,
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1],
        [[0, 0], [2, 2], [3, 4], [5, 0], [5, 8], [7, 1], [8, 4], [9, 5], [10, 4], [12, 1]]
        + [[13, 0], [14, 5]],
        [1, 0, 3, 2, 5, 4, 6, 8, 9, 10, 7],
    ),
}


def starts(order, seq_length, count):
    """(position, offset) where unshuffled samples 0 to count start."""
    rows = [order.stream.pieces(number * seq_length, 1) for number in range(count)]
    return [[row.position, int(row.offsets[0])] for row in rows]


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_golden_tables(num_samples):
    epochs, separate, documents, samples, shuffle = GOLDEN[num_samples]
    order = build_sample_order(
        LENGTHS, np.arange(5), num_samples=num_samples, seq_length=8, seed=1234
    )
    assert order.plan.epochs == epochs
    assert order.plan.separate_final_epoch is separate
    if separate:
        assert order.plan.samples_before_final == 7
    assert order.document_index.dtype == np.int32
    assert order.document_index.tolist() == documents
    assert order.shuffle_index.dtype == np.uint32
    assert order.shuffle_index.tolist() == shuffle
    assert starts(order, 8, len(samples)) == samples


def walk(lengths, documents, num_samples, seq_length, seed, extra):
    """The same order, worked out the long way: token by token, as a reader of the rules would."""
    per_epoch = sum(int(lengths[document]) for document in documents)
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq_length + extra:
        epochs += 1
    before, separate = 0, False
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - extra) // seq_length
        last = num_samples - before
        separate = last < int(0.80 * ((per_epoch - extra) // seq_length))
    random = np.random.RandomState(seed)
    dealt = []
    for passes in [epochs - 1, 1] if separate else [epochs]:
        part = np.array(list(documents) * passes, np.int32)
        random.shuffle(part)
        dealt += part.tolist()
    tokens = [(d, offset) for d in dealt for offset in range(lengths[d])]
    count = (len(tokens) - extra) // seq_length
    samples = [tokens[j * seq_length : (j + 1) * seq_length + extra] for j in range(count)]
    shuffled = []
    for first, stop in [(0, before), (before, count)] if separate else [(0, count)]:
        part = np.arange(first, stop, dtype=np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return [samples[j] for j in shuffled]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=150),
    num_samples=st.one_of(st.none(), st.integers(1, 120)),
    seq_length=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
    extra=st.integers(0, 1),
    data=st.data(),
)
def test_equals_walking_the_tokens(lengths, num_samples, seq_length, seed, extra, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    documents = np.arange(first, len(lengths), dtype=np.int32)
    lengths = np.array(lengths, np.int32)
    if lengths[documents].sum() == 0:
        lengths[first] = 3
    order = build_sample_order(
        lengths,
        documents,
        num_samples=num_samples,
        seq_length=seq_length,
        seed=seed,
        extra=extra,
    )
    wanted = walk(lengths, documents.tolist(), num_samples, seq_length, seed, extra)
    assert len(order.shuffle_index) == len(wanted)
    assert num_samples is None or len(wanted) >= num_samples
    for sample, number in zip(wanted, order.shuffle_index.tolist(), strict=True):
        pieces = order.stream.pieces(number * seq_length, seq_length + extra)
        got = [
            (document, offset + step)
            for document, offset, length in zip(
                pieces.documents.tolist(),
                pieces.offsets.tolist(),
                pieces.lengths.tolist(),
                strict=True,
            )
            for step in range(length)
        ]
        assert got == sample


def test_the_last_epoch_is_separate_below_80_percent():
    # 15 samples an epoch: 100 documents of 10 tokens, seq_length 64; 31 after two epochs.
    separate = {n: plan_epochs(1000, n, 64).separate_final_epoch for n in (32, 40, 42, 43, 46)}
    assert separate == {32: True, 40: True, 42: True, 43: False, 46: False}
    assert plan_epochs(1000, 40, 64).epochs == 3


def test_every_sample_once_an_epoch_and_another_order_each_time():
    def deal(seed):
        return build_sample_order(
            np.full(100, 10, np.int32), np.arange(100), num_samples=40, seq_length=64, seed=seed
        )

    order, again, other = deal(1), deal(1), deal(2)
    for name in ("shuffle_index", "document_index"):
        first = getattr(order, name).tolist()
        assert first == getattr(again, name).tolist()
        assert first != getattr(other, name).tolist()
        assert first != sorted(first)
    # Two full passes dealt together, the last one apart: three orders, none of them another's.
    passes = [order.document_index[at : at + 100].tolist() for at in (0, 100, 200)]
    assert len(set(map(tuple, passes))) == 3
    before = order.plan.samples_before_final
    assert sorted(order.shuffle_index[:before]) == list(range(before))
    assert sorted(order.shuffle_index.tolist()) == list(range(46))
    per_pass = np.bincount(order.document_index[:200], minlength=100)
    assert per_pass.tolist() == [2] * 100
    assert sorted(order.document_index[200:].tolist()) == list(range(100))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 66])
def test_a_tiny_corpus_is_repeated(tokens):
    order = build_sample_order(
        np.array([tokens], np.int32), np.arange(1), num_samples=20, seq_length=64, seed=3
    )
    assert len(order.shuffle_index) >= 20
    pieces = order.stream.pieces(int(order.shuffle_index[0]) * 64, 65)
    assert int(pieces.lengths.sum()) == 65


def test_keeping_a_short_last_sample_rounds_up_in_float32():
    assert count_samples(31, 8) == 3
    assert count_samples(31, 8, drop_last=False) == 4
    # formats.md 3.2: 4915200253 / 4096 is over 1200000, but not in float32.
    assert count_samples(4915200254, 4096, drop_last=False) == 1200000
    assert count_samples(4915200254 + 4096, 4096) == 1200001


def test_samples_beyond_2_to_the_31_tokens():
    """A corpus of 1,000,000 tokens in 10 documents, 600,000 samples of 4,096: modular reading."""
    order = build_sample_order(
        np.full(10, 100_000, np.int32), np.arange(10), num_samples=600_000, seq_length=4096, seed=5
    )
    assert order.stream.num_tokens > 600_000 * 4096 > 2**31
    for number in (0, 524_270, 524_287, 524_288, 524_300, 599_999):
        pieces = order.stream.pieces(number * 4096, 4097)
        position, offset = divmod(number * 4096, 100_000)
        assert pieces.position == position
        assert pieces.offsets[0] == offset
        assert pieces.documents[0] == order.document_index[position]
        assert pieces.lengths.sum() == 4097


def test_documents_of_2_billion_tokens_each():
    lengths = np.full(5, 2**31 - 1, np.int32)
    order = build_sample_order(lengths, np.arange(5), num_samples=None, seq_length=2**20, seed=5)
    assert order.stream.num_tokens == 5 * (2**31 - 1)
    last = (len(order.shuffle_index) - 1) * 2**20
    pieces = order.stream.pieces(last, 2**20 + 1)
    assert pieces.position == 4
    assert pieces.offsets.tolist() == [last - 4 * (2**31 - 1)]


def test_a_stream_is_cut_at_its_end():
    stream = TokenStream(LENGTHS, np.array([4, 0, 1, 2, 3], np.int32))
    pieces = stream.pieces(24, 9)
    assert pieces.documents.tolist() == [3]
    assert pieces.offsets.tolist() == [3]
    assert pieces.lengths.tolist() == [6]
    assert stream.pieces(30, 9).lengths.tolist() == []
