"Running text as blocks: streams that outlive kills and flipped bytes, what is no word, masks, books."

import functools
import json
import string
import tracemalloc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from tiny_lm import LENGTH, SPECIAL, WORDS, tiny_corpus, tiny_lm, tiny_lm_config, tiny_task, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from kdnotes.core import files
from kdnotes.core.cached import Writer, open_cached
from kdnotes.core.config import ConfigError
from kdnotes.core.files import FileError
from kdnotes.tasks import text_blocks
from kdnotes.tasks.documents import CORPORA, articles, read_document, without_marks
from kdnotes.tasks.lm_scores import sample_positions, text_set
from kdnotes.tasks.sources import CorpusError, load_by_rules, load_corpus
from kdnotes.tasks.text_blocks import (
    Masking,
    TextError,
    cut_blocks,
    mask_blocks,
    masked_positions,
    n_masked,
    rare_token_weights,
    token_stream,
)
from kdnotes.train import distributed as runtime
from kdnotes.train.evaluation import evaluate

# ---- tokenizers and texts ----

SIGNS = '[]<>/.,-'


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    "As BERT's, with a piece for each letter and no more."
    pieces = [*SPECIAL, *string.ascii_lowercase, *(f'##{c}' for c in string.ascii_lowercase), *SIGNS]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token='[UNK]'))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token')
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL)))


ROBERTA = dict(
    cls_token='<s>', pad_token='<pad>', sep_token='</s>', unk_token='<unk>', mask_token='<mask>'
)  # whose names are in the order of their ids


def trained_tokenizer(model, pre_tokenizer, trainer, text: str) -> PreTrainedTokenizerFast:
    "One with the special tokens of RoBERTa."
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROBERTA)


def byte_tokenizer(text: str, prefix: bool = False) -> PreTrainedTokenizerFast:
    "Byte-level, as RoBERTa's; no character is unknown to it."
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(ROBERTA.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return trained_tokenizer(models.BPE(), pre_tokenizer, trainer, text)


def unigram_tokenizer(text: str) -> PreTrainedTokenizerFast:
    "As XLM-R's, which has the names of its special tokens among its pieces."
    names = list(ROBERTA.values())
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=names, unk_token='<unk>', show_progress=False
    )
    return trained_tokenizer(models.Unigram(), pre_tokenizers.Metaspace(), trainer, text)


@functools.cache
def random_words(n: int, seed: int = 0) -> list[str]:
    "Words of one to eight letters."
    rng = np.random.default_rng(seed)
    letters = np.array(list(string.ascii_lowercase))
    return [''.join(rng.choice(letters, size)) for size in rng.integers(1, 9, n)]


# characters of a piece of text here: a group of pieces is a part on the disk
PIECE = 200


def long_documents() -> list[str]:
    "Some 150 parts; one document is longer than a piece, the others are shorter."
    words = random_words(6000)
    short = [' '.join(words[i : i + 10]) for i in range(0, 2000, 10)]
    return [*short[:100], ' '.join(words[2000:]), *short[100:]]


def few_documents() -> list[str]:
    "Eight parts or so."
    return long_documents()[:20] + [' '.join(random_words(100, seed=1))]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(text_blocks, 'PIECE', PIECE)


@pytest.fixture
def tokenised(monkeypatch):
    "How many groups were tokenised."
    groups = []
    real = text_blocks._tokens_of

    def noted(tokenizer, group, state):
        groups.append(len(group))
        return real(tokenizer, group, state)

    monkeypatch.setattr(text_blocks, '_tokens_of', noted)
    return groups


def same_stream(one, other) -> bool:
    names = ('tokens', 'word_starts', 'ends', 'words', 'pieces')
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


# ---- on disk: test_cached.py has kills, damages and full disks ----


def test_a_stream_goes_on_where_it_was_interrupted(tmp_path, small_pieces, tokenised, monkeypatch):
    expected = token_stream(spelling_tokenizer(), few_documents())
    total = len(tokenised)
    with monkeypatch.context() as patched:
        real = text_blocks._tokens_of

        def stopping(*given):
            if len(tokenised) == total + 4:
                raise KeyboardInterrupt
            return real(*given)

        patched.setattr(text_blocks, '_tokens_of', stopping)
        with pytest.raises(KeyboardInterrupt):
            token_stream(spelling_tokenizer(), few_documents(), tmp_path)
    for _ in range(2):
        assert same_stream(token_stream(spelling_tokenizer(), few_documents(), tmp_path), expected)
        assert len(tokenised) == 2 * total, 'what is missing was made, once'


def test_a_disk_that_is_too_small_for_a_stream(tmp_path, small_pieces, tokenised, monkeypatch):
    monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10))
    with pytest.raises(FileError, match='the tokens of .* characters of text take about 0.* free some room'):
        token_stream(spelling_tokenizer(), long_documents(), tmp_path)
    assert len(tokenised) == 1 and not list(tmp_path.glob('*.stream/[!l]*'))


def test_a_stream_is_named_by_all_it_depends_on(tmp_path, monkeypatch):
    texts = ['abc def', 'ghi']

    def name(**changes) -> str:
        cache = tmp_path / str(len(list(tmp_path.iterdir())))
        tokenizer = spelling_tokenizer()
        for token, value in changes.items():
            setattr(tokenizer, token, value)
        token_stream(tokenizer, texts, cache)
        [folder] = cache.glob('*.stream')
        return folder.name

    usual = name()
    assert name() == usual
    # the same tokenizer.json, with other roles in special_tokens_map.json
    assert name(sep_token='[CLS]') != usual
    assert name(unk_token='[PAD]') != usual
    monkeypatch.setattr(text_blocks, 'PIECE', PIECE)
    assert name() != usual, 'an interrupted stream would go on at another place'


# ---- what is no word ----


@pytest.fixture(scope='module')
def prose() -> str:
    words = random_words(400, seed=3)
    lines = [' '.join(words[i : i + 9]) + ', and so on.' for i in range(0, 400, 9)]
    # two blanks, an empty line, blanks at the end and at the beginning of a line
    return '\n'.join(lines[:20]) + '  x\n\n' + '  \n   '.join(lines[20:])


def test_names_of_special_tokens_in_a_text_are_ordinary_text():
    tokenizer = spelling_tokenizer()
    text = 'a film [MASK] by [SEP] and [UNK] of [PAD] or [CLS]'
    ids = token_stream(tokenizer, [text]).tokens
    assert not np.isin(ids[:-1], tokenizer.all_special_ids).any()
    assert ids[-1] == tokenizer.sep_token_id
    pieces = tokenizer.convert_ids_to_tokens(ids[:-1].tolist())
    assert ''.join(piece.removeprefix('##') for piece in pieces) == text.replace(' ', '').lower()
    # the tokenizer is as it was for others
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert tokenizer.mask_token_id in tokenizer(text)['input_ids']


def test_no_special_token_comes_from_a_text_whatever_the_tokenizer(prose):
    text = prose + ' x<mask> </s> <s> <pad> x</s>y.'
    for tokenizer in (byte_tokenizer(text), byte_tokenizer(text, prefix=True), unigram_tokenizer(text)):
        ids = token_stream(tokenizer, [text]).tokens
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        assert not special & set(ids[:-1].tolist())


def stray_blanks(stream, tokenizer) -> int:
    "Blanks that are words by themselves."
    blank = stream.tokens[:-1] == tokenizer.get_vocab().get('Ġ', -1)
    return int((blank & stream.word_starts[1:]).sum())


def test_the_mark_of_an_unknown_word_is_the_unknown_token(prose):
    text = 'the <unk> sat, <unk> <unk> on\n<unk> a <unk>'
    for tokenizer in (spelling_tokenizer(), byte_tokenizer(prose)):
        stream = token_stream(tokenizer, [text])
        unknown = stream.tokens == tokenizer.unk_token_id
        assert unknown.sum() == 5
        assert stream.word_starts[unknown].all()
        after = np.flatnonzero(unknown[:-1]) + 1
        assert stream.word_starts[after].all(), 'what follows is no part of it'
        assert stream.words.tolist() == [4]
        assert stream.pieces.tolist() == [len(stream.tokens) - 6]
        assert not stray_blanks(stream, tokenizer)


def corpus_with_unknown_words():
    "Every third word is one."
    corpus = tiny_corpus(40)

    def changed(text: str) -> str:
        return ' '.join('<unk>' if i % 3 == 1 else word for i, word in enumerate(text.split()))

    splits = {
        split: [row | dict(text=changed(row['text'])) for row in rows]
        for split, rows in corpus.splits.items()
    }
    return replace(corpus, splits=splits)


@pytest.mark.parametrize('whole_words', [False, True])
def test_an_unknown_word_is_never_hidden(whole_words):
    config = tiny_lm_config('full_student', mask_share=0.4, whole_words=whole_words, rare_power=0.7)
    task = tiny_task(config, corpus_with_unknown_words())
    index = np.arange(len(task.lengths('train')))
    unknown = tiny_tokenizer().unk_token_id
    assert (task.blocks['train'].ids(index) == unknown).sum() > 100
    for epoch in range(20):
        batch = task.batch('train', index, epoch)
        assert int(batch.labels.min()) >= len(SPECIAL)
    _, positions = sample_positions(task.texts['test'], 10**6)
    ids = task.texts['test'].blocks.ids(task.texts['test'].chosen)
    assert len(positions) == (ids >= len(SPECIAL)).sum()


class NeverUnknown(torch.nn.Module):
    "All words are alike to it, and an unknown one is out of the question."

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()

    def forward(self, input_ids, attention_mask=None):
        logits = torch.zeros(*input_ids.shape, len(SPECIAL) + WORDS)
        logits[..., SPECIAL.index('[UNK]')] = -1e4
        return SimpleNamespace(logits=logits)


def test_an_unknown_word_is_never_scored():
    config = tiny_lm_config('full_student')
    task = tiny_task(config, corpus_with_unknown_words())
    here = runtime.start(config)
    metrics = evaluate(NeverUnknown(), task, ('test',), here).metrics['test']
    expected = np.log(len(SPECIAL) + WORDS - 1)
    for name in ('nll', 'nll_all', 'pseudo_nll'):
        assert metrics[name] == pytest.approx(expected, rel=1e-4)


def test_texts_beside_tables_are_no_corpus(tmp_path):
    (tmp_path / 'book.txt').write_text('A book.')
    (tmp_path / 'validation.tsv').write_text('text\nA text.\n')
    with pytest.raises(CorpusError, match=r"texts \('book.txt'\) and tables \('validation.tsv'\)"):
        load_by_rules(CORPORA, str(tmp_path))


def test_columns_are_of_tables(tmp_path):
    for i in range(3):
        (tmp_path / f'{i}.txt').write_text(f'Book {i}.')
    with pytest.raises(ConfigError, match="columns='text=x' names columns of tables"):
        load_corpus('masked_lm', str(tmp_path), 'text=x')


def test_a_book_of_blank_lines_is_read_in_time():
    mark = '*** {} OF THE PROJECT GUTENBERG EBOOK X ***'
    lines = '\n' * 300_000
    book = f'{mark.format("START")}{lines}It begins.{lines}It ends.{lines}{mark.format("END")}'
    assert without_marks(book) == f'It begins.{lines}It ends.'


def test_a_teacher_whose_ids_have_a_gap_has_a_place_for_each():
    tokenizer = tiny_tokenizer()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules['model']['vocab']['w7'] = 99
    backend = Tokenizer.from_str(json.dumps(rules))
    gap = PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token='[MASK]', sep_token='[SEP]', cls_token='[CLS]', unk_token='[UNK]'
    )
    task = tiny_task(tiny_lm_config(), tokenizer=gap)
    assert len(task.label_prior) == 100
    assert 99 in task.vocabulary and 98 not in task.vocabulary


def test_units_belong_to_the_clusters_of_the_corpus():
    corpus = tiny_corpus()
    splits = {
        split: [row | dict(cluster=f'author {i % 2}') for i, row in enumerate(rows)]
        for split, rows in corpus.splits.items()
    }
    corpus = replace(corpus, splits=splits)
    config = tiny_lm_config('full_student')
    task = tiny_task(config, corpus)
    here = runtime.start(config)
    found = evaluate(tiny_lm(), task, ('test',), here).units
    assert set(found['metric']) == {'nll', 'nll_all', 'pseudo_nll'}
    assert found.groupby('metric')['cluster'].agg(set).tolist() == [{'author 0', 'author 1'}] * 3


def test_what_an_earlier_call_asked_of_the_tokenizer_does_not_matter():
    "Truncation and padding stay behind in a tokenizer, and in the file it is saved to."
    words = ['w1 w2 w3 w4 w5 w6 w7', 'w1']
    expected = token_stream(tiny_tokenizer(), words)
    used = tiny_tokenizer()
    used(words, truncation=True, max_length=3, padding='max_length')
    assert same_stream(token_stream(used, words), expected)
    assert expected.ends.tolist() == [8, 10]


@pytest.mark.parametrize('prefix', [False, True], ids=['plain', 'prefix'])
def test_a_cut_leaves_no_blank_behind(monkeypatch, prose, prefix):
    "Wherever a piece ends, the tokens are those of the whole."
    tokenizer = byte_tokenizer(prose, prefix)
    whole = token_stream(tokenizer, [prose])
    assert stray_blanks(whole, tokenizer) == 1, 'where there are two'
    assert '\n' in tokenizer.decode(whole.tokens)
    for piece in range(30, 330):
        monkeypatch.setattr(text_blocks, 'PIECE', piece)
        found = token_stream(tokenizer, [prose])
        assert found.tokens.tolist() == whole.tokens.tolist(), piece
        assert found.word_starts.tolist() == whole.word_starts.tolist(), piece
        assert (found.words.tolist(), found.pieces.tolist()) == (whole.words.tolist(), whole.pieces.tolist())


@pytest.mark.parametrize('text', ['x' * 70, 'xy\n' * 30, '\n' * 70, ' ' * 70, '', ' x'])
def test_a_text_without_borders_is_cut_nonetheless(monkeypatch, prose, text):
    monkeypatch.setattr(text_blocks, 'PIECE', 16)
    pieces = list(text_blocks._pieces(['a', text, 'b']))
    assert ''.join(piece.text for piece in pieces if piece.document == 1) == text
    assert max(len(piece.text) for piece in pieces) <= 16
    assert [piece.document for piece in pieces if piece.last] == [0, 1, 2]
    tokenizer = byte_tokenizer(prose)
    assert tokenizer.decode(token_stream(tokenizer, [text]).tokens[:-1]) == text


# ---- blocks ----


@pytest.fixture(scope='module')
def spelt():
    "The stream of some documents and their tokenizer, with words of many pieces."
    documents = [' '.join(random_words(n, seed=n)) for n in (300, 40, 2, 700)]
    tokenizer = spelling_tokenizer()
    return token_stream(tokenizer, documents), tokenizer


@pytest.mark.parametrize('length', [3, 16, 33])
def test_blocks_tile_the_stream(spelt, length):
    stream, tokenizer = spelt
    blocks = cut_blocks(stream, tokenizer, length, 0)
    inside = length - 2
    ids = blocks.ids(np.arange(len(blocks)))
    n = len(stream.tokens) // inside
    assert ids.shape == (n, length)
    np.testing.assert_array_equal(ids[:, 1:-1].ravel(), stream.tokens[: n * inside])
    assert len(stream.tokens) - n * inside < inside
    assert set(ids[:, 0]) == {tokenizer.cls_token_id}
    assert set(ids[:, -1]) == {tokenizer.sep_token_id}
    starts = blocks.word_starts(np.arange(n))
    np.testing.assert_array_equal(starts[:, 1:-1].ravel(), stream.word_starts[: n * inside])
    # each token's document, from the separators
    document = np.cumsum(np.r_[0, stream.tokens[:-1] == tokenizer.sep_token_id])
    np.testing.assert_array_equal(blocks.documents, document[np.arange(n) * inside + inside // 2])


def test_a_block_with_too_little_to_hide_is_left_out():
    known = 'w1 w2 w3 w4 w5 w6 w7 w8'
    stream = token_stream(tiny_tokenizer(), [' '.join([known, 'w1 ' + '<unk> ' * 7, known])])
    blocks = cut_blocks(stream, tiny_tokenizer(), 10, 2)
    assert blocks.starts.tolist() == [0, 16]
    np.testing.assert_array_equal(blocks.ids([1])[0, 1:-1], stream.tokens[16:24])
    assert len(cut_blocks(stream, tiny_tokenizer(), 10, 1)) == 3


def test_arrays_are_mapped_and_not_read_whole(tmp_path):
    n = 4_000_000
    rng = np.random.default_rng(0)
    writer = Writer(tmp_path / 'x.stream')
    tokens = rng.integers(len(SPECIAL), len(SPECIAL) + WORDS, n, dtype=np.int32)
    writer.add(dict(tokens=tokens, word_starts=np.ones(n, dtype=bool), documents=np.array([[n, n, n]])))
    writer.finish()
    tracemalloc.start()  # numpy tells it of its arrays, those on the disk left out
    try:
        stream = text_blocks._as_stream(open_cached(tmp_path / 'x.stream').arrays)
        blocks = cut_blocks(stream, tiny_tokenizer(), 34, 4)
        found = mask_blocks(blocks, np.array([7, len(blocks) - 1]), Masking(whole_words=True), 0, 0, 4)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not stream.tokens.flags.writeable and not stream.word_starts.flags.writeable
    assert most < tokens.nbytes / 2
    np.testing.assert_array_equal(found[2][0], tokens[7 * 32 - 1 + found[1][0]])


# ---- masks ----

ALL_MASKINGS = [
    Masking(),
    Masking(0.5),
    Masking(0.01),
    Masking(0.3, whole_words=True),
    Masking(0.3, whole_words=True, rare_power=0.7),
    Masking(rare_power=1.0),
]


def masked(spelt, masking: Masking, index=None, seed: int = 0, epoch: int = 0, length: int = 34):
    "Blocks with hidden letters, and the blocks."
    stream, tokenizer = spelt
    blocks = cut_blocks(stream, tokenizer, length, n_masked(length, masking.share))
    weights = None
    if masking.rare_power:
        counts = np.bincount(stream.tokens, minlength=len(tokenizer))
        weights = rare_token_weights(counts, masking.rare_power)
    index = np.arange(len(blocks)) if index is None else index
    words = np.arange(len(SPECIAL), len(tokenizer))
    mask = tokenizer.mask_token_id
    return blocks, mask_blocks(blocks, index, masking, seed, epoch, mask, words, weights)


@pytest.mark.parametrize('masking', ALL_MASKINGS, ids=str)
def test_each_block_hides_the_same_number_of_tokens(spelt, masking):
    blocks, (ids, places, labels) = masked(spelt, masking)
    n = max(1, round(masking.share * 32))
    assert places.shape == labels.shape == (len(blocks), n)
    whole = blocks.ids(np.arange(len(blocks)))
    for row, (there, truth) in enumerate(zip(places, labels)):
        assert (np.diff(there) > 0).all(), 'rising, so none is hidden twice'
        assert whole[row, there].tolist() == truth.tolist()
        assert truth.min() >= len(SPECIAL)
        visible = np.setdiff1d(np.arange(34), there)
        assert (ids[row, visible] == whole[row, visible]).all()


@pytest.mark.parametrize('rare_power', [0.0, 0.7])
def test_whole_words_are_hidden_but_for_the_last(spelt, rare_power):
    partly = 0
    rows = 0
    for epoch in range(10):
        blocks, (_, places, _) = masked(spelt, Masking(0.3, True, rare_power), epoch=epoch)
        starts = blocks.word_starts(np.arange(len(blocks)))
        maskable = blocks.maskable(np.arange(len(blocks)))
        for row, there in enumerate(places):
            word = np.cumsum(starts[row])
            hidden = np.zeros(34, dtype=bool)
            hidden[there] = True
            cut = []
            for number in set(word[there]):
                pieces = np.flatnonzero((word == number) & maskable[row])
                if not hidden[pieces].all():
                    cut.append(number)
                    # its first pieces, and no others
                    k = int(hidden[pieces].sum())
                    assert hidden[pieces[:k]].all()
            assert len(cut) <= 1
            partly += len(cut)
            rows += 1
    assert 0 < partly < rows


def test_a_word_that_begins_with_an_unknown_piece_is_no_part_of_the_one_before():
    maskable = np.array([True, True, False, True, True, True])
    # two pieces; an unknown one and two more; another word
    starts = np.array([True, False, True, False, False, True])
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(masked_positions(rng, maskable, 2, None, starts).tolist()) for _ in range(600))
    assert set(drawn) == {(0, 1), (3, 4), (0, 5), (3, 5)}


def within(counts: np.ndarray, chances: np.ndarray, draws: int, sigmas: float = 5.0) -> bool:
    "Do counts agree with what is expected of so many draws?"
    spread = np.sqrt(draws * chances * (1 - chances))
    return bool((np.abs(counts - draws * chances) <= sigmas * spread + 1).all())


def test_rare_tokens_are_hidden_in_proportion_to_their_count_to_the_power():
    counts = np.zeros(len(SPECIAL) + WORDS, dtype=int)
    counts[5:13] = [1, 3, 10, 30, 100, 300, 1000, 0]
    weights = rare_token_weights(counts, 0.7)
    stream = token_stream(tiny_tokenizer(), ['w0 w1 w2 w3 w4 w5 w6 w7'])
    blocks = cut_blocks(stream, tiny_tokenizer(), 10, 1)
    draws = 10_000
    hidden = np.zeros(8, dtype=int)
    for epoch in range(draws):
        _, places, _ = mask_blocks(blocks, [0], Masking(0.1), 0, epoch, 4, None, weights)
        hidden[places[0, 0] - 1] += 1
    power = np.array([1, 3, 10, 30, 100, 300, 1000, 1]) ** -0.7
    assert within(hidden, power / power.sum(), draws)
    near = np.array([1, 3, 10, 30, 100, 300, 1000, 1]) ** -0.6
    assert not within(hidden, near / near.sum(), draws), 'too few draws to tell .7 from .6'


def test_rare_tokens_are_counted_in_what_is_trained_on():
    corpus = tiny_corpus(40)
    task = tiny_task(tiny_lm_config('full_student', rare_power=0.7), corpus)
    text = ' [SEP] '.join(row['text'] for row in corpus.splits['train']).split() + ['[SEP]']
    used = Counter(text[: len(task.trained) * (LENGTH - 2)])
    for word, i in tiny_tokenizer().get_vocab().items():
        assert task.weights[i] == pytest.approx(max(1, used[word]) ** -0.7)
    assert len(set(used.values())) > 5


def test_hidden_tokens_are_masked_exchanged_or_left(spelt):
    said = []
    truth = []
    for epoch in range(40):
        _, (ids, places, labels) = masked(spelt, Masking(0.5), epoch=epoch)
        said.append(np.take_along_axis(ids, places, 1).ravel())
        truth.append(labels.ravel())
    said = np.concatenate(said)
    truth = np.concatenate(truth)
    tokenizer = spelt[1]
    n = len(said)
    words = len(tokenizer) - len(SPECIAL)
    assert n > 50_000
    is_mask = said == tokenizer.mask_token_id
    exchanged = ~is_mask & (said != truth)
    shares = np.array([is_mask.sum(), exchanged.sum(), n - is_mask.sum() - exchanged.sum()])
    # a token may be exchanged for itself
    assert within(shares, np.array([0.8, 0.1 * (1 - 1 / words), 0.1 + 0.1 / words]), n)
    others = np.bincount(said[exchanged], minlength=len(tokenizer))
    assert others[: len(SPECIAL)].sum() == 0
    # all are equally likely; the true one is rarer by a little
    assert within(others[len(SPECIAL) :], np.full(words, 1 / words), int(exchanged.sum()), sigmas=6)


@pytest.mark.parametrize('masking', ALL_MASKINGS, ids=str)
def test_masks_do_not_depend_on_the_batch(spelt, masking):
    blocks, expected = masked(spelt, masking, seed=3, epoch=2)
    order = np.random.default_rng(0).permutation(len(blocks))
    for index in (order, order[:7], order[:1], np.array([5, 5])):
        _, found = masked(spelt, masking, index, seed=3, epoch=2)
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other[index])


# ---- books, articles, and files that are neither ----

BOOK = 'It was a dark night.\n\n*** stars ***\n\nThe end of the project was near.'


def in_marks(start: str, end: str) -> str:
    return f'The Project Gutenberg EBook of X\n\n{start}\n\n\n{BOOK}\n\n\n{end}\n\nThis licence goes on.\n'


@pytest.mark.parametrize(
    'mark',
    [
        '*** START OF THE PROJECT GUTENBERG EBOOK X ***',
        '*** START OF THIS PROJECT GUTENBERG EBOOK X ***',
        '***START OF THE PROJECT GUTENBERG EBOOK X***',
        '*** Start of the Project Gutenberg eBook X ***',
        '*** START OF THE PROJECT GUTENBERG EBOOK X',
        '  *** START OF THE PROJECT GUTENBERG EBOOK, X* Y ***',
        '*** START OF THE PROJECT GUTENBERG ETEXT X ***',
        '*** START OF THE COPYRIGHTED PROJECT GUTENBERG EBOOK X ***',
        '*** START OF THE PROJECT GUTENBERG EBOOK THE LONG AND\nWINDING TITLE OF\nX ***',
    ],
)
@pytest.mark.parametrize('line_end', ['\n', '\r\n', '\r'], ids=['lf', 'crlf', 'cr'])
def test_a_book_is_what_stands_between_the_marks(tmp_path, mark, line_end):
    path = tmp_path / 'x.TXT'
    end = mark.replace('START', 'END').replace('Start', 'End')
    path.write_bytes(b'\xef\xbb\xbf' + in_marks(mark, end).replace('\n', line_end).encode())
    assert read_document(path) == BOOK


@pytest.mark.parametrize(
    'line',
    [
        'End of the Project Gutenberg EBook of X, by Y',
        "End of Project Gutenberg's X, by Y",
        'End of Project Gutenberg’s X, by Y',
        '     END OF THE PROJECT GUTENBERG EBOOK X,\nby Y',
    ],
)
def test_the_line_that_says_the_book_ends_is_no_part_of_it(line):
    marks = '*** START OF THIS PROJECT GUTENBERG EBOOK X ***', '*** END OF THIS PROJECT GUTENBERG EBOOK X ***'
    whole = in_marks(*marks)
    assert without_marks(whole.replace(BOOK, f'{BOOK}\n\n\n{line}')) == BOOK
    # in the middle it is the book's own
    middle = f'{line}\n\nsaid the printer.\n\n{BOOK}'
    assert without_marks(whole.replace(BOOK, middle)) == middle.strip()


def test_a_file_of_several_books_keeps_them_all(tmp_path):
    marks = (
        '*** START OF THIS PROJECT GUTENBERG EBOOK {} ***',
        '*** END OF THIS PROJECT GUTENBERG EBOOK {} ***',
    )
    books = [in_marks(*(mark.format(i) for mark in marks)).replace('dark', f'dark ({i})') for i in range(3)]
    (tmp_path / 'train.txt').write_text('\n'.join(books))
    expected = '\n\n'.join(BOOK.replace('dark', f'dark ({i})') for i in range(3))
    assert read_document(tmp_path / 'train.txt') == expected


def test_a_book_without_marks_is_taken_whole():
    text = f'A sentence on *** START OF THE PROJECT GUTENBERG EBOOK within a line.\n{BOOK}'
    assert without_marks(f'\n {text}\n\n') == text


@pytest.mark.parametrize(
    'start,end,there',
    [
        ('*** START OF THE PROJECT GUTENBERG EBOOK X ***', '', 'START and no END'),
        ('', '*** END OF THE PROJECT GUTENBERG EBOOK X ***', 'END and no START'),
        # a whole book before it, or after it
        (
            '*** START OF THE PROJECT GUTENBERG EBOOK X ***\nx\n*** END OF THE PROJECT GUTENBERG EBOOK X ***',
            '*** END OF THE PROJECT GUTENBERG EBOOK Y ***',
            'END and no START',
        ),
        (
            '*** START OF THE PROJECT GUTENBERG EBOOK X ***',
            '*** START OF THE PROJECT GUTENBERG EBOOK Y ***\n\n*** END OF THE PROJECT GUTENBERG EBOOK Y ***',
            'START and no END',
        ),
    ],
)
def test_half_a_book_is_refused(tmp_path, start, end, there):
    (tmp_path / 'half.txt').write_text(in_marks(start, end))
    with pytest.raises(CorpusError, match=f'half.txt has a mark {there}.*fetch it again') as e:
        read_document(tmp_path / 'half.txt')
    assert '\n' not in str(e.value)


@pytest.mark.parametrize(
    'content,words',
    [
        (b' \r\n\t\n', 'bad.txt is empty; remove it or put a text there'),
        (b'\xef\xbb\xbf', 'bad.txt is empty'),
        (b'some\ntext\n\x89PNG\r\n', r'bad.txt, line 3: byte 0x89 is not UTF-8'),
        (b'text with a \0 in it', 'bad.txt is no text: it holds a zero byte'),
        (
            b'*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***',
            'bad.txt is empty',
        ),
    ],
)
def test_a_file_that_is_no_text_is_named_in_one_sentence(tmp_path, content, words):
    for i in range(3):
        (tmp_path / f'{i}.txt').write_text(f'Book {i}.')
    (tmp_path / 'bad.txt').write_bytes(content)
    with pytest.raises(CorpusError, match=words) as e:
        load_corpus('masked_lm', str(tmp_path))
    assert '\n' not in str(e.value)


def test_a_folder_without_texts_is_named(tmp_path):
    (tmp_path / 'book.pdf').write_text('text')
    with pytest.raises(
        CorpusError, match='holds no corpus: looked for train, dev and test as .* or .txt files'
    ) as e:
        load_corpus('masked_lm', str(tmp_path))
    assert str(tmp_path) in str(e.value)
    assert '\n' not in str(e.value)


def test_three_files_named_after_the_splits_are_those(tmp_path):
    for name in ('train', 'valid', 'test'):
        (tmp_path / f'{name}.txt').write_text(f'The text of {name}.')
    found = load_by_rules(CORPORA, str(tmp_path)).splits
    assert {split: [row['text'] for row in rows] for split, rows in found.items()} == dict(
        train=['The text of train.'], dev=['The text of valid.'], test=['The text of test.']
    )


@pytest.mark.parametrize(
    'names,words',
    [
        (('train', 'test'), r"'test\.txt', 'train\.txt'; put train"),
        (('train', 'dev', 'test', 'README'), r"'README\.txt'.*put train"),
        (('train', 'dev', 'valid', 'test'), r"'valid\.txt'; put train"),
        (('dev', 'one', 'two', 'three'), r"'dev\.txt'.*put train"),
    ],
)
def test_some_files_named_after_splits_are_no_corpus(tmp_path, names, words):
    for name in names:
        (tmp_path / f'{name}.txt').write_text(f'The text of {name}.')
    with pytest.raises(CorpusError, match=words):
        load_by_rules(CORPORA, str(tmp_path))


def test_a_text_shorter_than_a_block_and_one_of_unknown_words():
    tokenizer = tiny_tokenizer()
    short = token_stream(tokenizer, ['w1 w2 w3'])
    with pytest.raises(TextError, match='the text has 4 tokens, and a block of 16 takes 14') as e:
        cut_blocks(short, tokenizer, 16, 2)
    assert '\n' not in str(e.value)
    foreign = token_stream(tokenizer, ['nothing known here ' * 20])
    with pytest.raises(TextError, match='no block of the text has 2 known words to hide'):
        cut_blocks(foreign, tokenizer, 16, 2)
    with pytest.raises(TextError, match='there is no document to tokenise'):
        token_stream(tokenizer, [])


# ---- real texts ----


def test_nothing_of_the_licence_is_left_in_real_books(corpora):
    paths = sorted((corpora / 'gutenberg').glob('*.txt'))
    if not paths:
        pytest.skip(f"{corpora / 'gutenberg'} holds no books")
    for path in paths:
        text = read_document(path)
        whole = path.read_text().replace('\r\n', '\n').removeprefix('\ufeff')
        assert 'START OF TH' not in text and 'END OF THE PROJECT' not in text.upper()
        assert 'Project Gutenberg' not in text[-300:] and 'www.gutenberg.org' not in text
        # a part of the file, and most of it
        assert text in whole and len(text) > 0.85 * len(whole)


def test_every_unknown_word_of_wikitext_is_one_token(corpora):
    path = corpora / 'wikitext2' / 'test.txt'
    if not path.exists():
        pytest.skip(f'{path} is not here')
    rows = articles(path.read_text(), 'test')[:10]
    tokenizer = byte_tokenizer(rows[0]['text'])
    stream = token_stream(tokenizer, [row['text'] for row in rows])
    marks = sum(row['text'].count('<unk>') for row in rows)
    assert marks > 100
    assert (stream.tokens == tokenizer.unk_token_id).sum() == marks
    assert not stray_blanks(stream, tokenizer)
    words = [word for row in rows for word in row['text'].split() if word != '<unk>']
    assert stream.words.sum() == len(words)
    blocks = cut_blocks(stream, tokenizer, 128, n_masked(128, 0.15))
    labels = mask_blocks(blocks, np.arange(len(blocks)), Masking(), 0, 0, tokenizer.mask_token_id)[2]
    assert not np.isin(labels, tokenizer.all_special_ids).any()
    text = text_set('wikitext2', blocks, [row['id'] for row in rows])
    assert text.pieces_a_word == stream.pieces.sum() / len(words)


def knows_little():
    "A tokenizer to which a word that is not in its vocabulary is unknown as a whole."
    words = [*SPECIAL, 'iron', 'rusts', '.']
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='[UNK]'))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token')
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: f'[{name[:-6].upper()}]' for name in names}
    )


@pytest.mark.parametrize(
    'text, words, pieces',
    [
        ('iron rusts .', 3, 3),
        ('iron oxidises .', 2, 2),
        # a piece of the last word is known
        ('gold glitters, iron rusts.', 2, 3),
        ('iron glitters.', 2, 2),
        ('iron <unk> rusts', 2, 2),
        ('gold glitters', 0, 0),
    ],
)
def test_words_without_a_known_piece_are_not_counted(text, words, pieces):
    "A score a word divides by these: what is never asked for must not make words easier."
    found = token_stream(knows_little(), [text])
    assert (found.words.tolist(), found.pieces.tolist()) == ([words], [pieces])
