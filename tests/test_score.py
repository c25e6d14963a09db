"`kdnotes score`: figures one can check by hand, the same after a kill, a sentence for what has no score."

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from kinds import one_of_each
from tiny_lm import WORDS, tiny_lm, tiny_tokenizer
from kdnotes.cli import main
from kdnotes.core.cached import Writer
from kdnotes.core.files import cache_path
from kdnotes.experiment.score import read_text_to_score, score
from kdnotes.tasks.lm_scores import PART

LENGTH = 16


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Path:
    "A saved model with random weights."
    folder = tmp_path_factory.mktemp('model')
    tiny_lm(closed=True).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    return tmp_path / 'home'


def books(folder: Path, words: int = 60, n: int = 3) -> Path:
    "Texts of lines of different length, a few words unknown."
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for i in range(n):
        lines = []
        while words > sum(len(line.split()) for line in lines):
            names = [f'w{k}' for k in rng.integers(WORDS, size=int(rng.integers(2, 12)))]
            lines.append(' '.join([*names, 'unheard'] if len(lines) % 4 == 1 else names))
        (folder / f'book{i}.txt').write_text('\n'.join(lines) + '\n')
    return folder


def by_hand(model: Path, rows: list[list[int]], tokenizer=None) -> dict[tuple[int, int], float]:
    "(row, position) -> nats, each row by itself and each hidden token by itself."
    plain = transformers.AutoModelForMaskedLM.from_pretrained(model).eval()
    tokenizer = tokenizer or tiny_tokenizer()
    special = set(tokenizer.all_special_ids)
    found = {}
    for r, row in enumerate(rows):
        for position, token in enumerate(row):
            if token not in special:
                hidden = torch.tensor([row])
                hidden[0, position] = tokenizer.mask_token_id
                with torch.no_grad():
                    found[r, position] = -float(plain(hidden).logits[0, position].log_softmax(-1)[token])
    return found


def test_every_token_of_every_line_costs_what_it_costs_by_itself(model, tmp_path):
    texts = books(tmp_path / 'texts')
    tokenizer = tiny_tokenizer()
    ids = []
    for path in sorted(texts.glob('*.txt')):
        for line in path.read_text().splitlines():
            inside = tokenizer(line, add_special_tokens=False)['input_ids']
            for start in range(0, len(inside), LENGTH - 2):
                ids.append([2, *inside[start : start + LENGTH - 2], 3])
    expected = by_hand(model, ids)
    found, tokens = score(str(model), str(texts), by='line', length=LENGTH, budget=64)
    made = dict(zip(zip(tokens['row'], tokens['position']), tokens['nll']))
    assert made.keys() == expected.keys()
    assert all(abs(made[k] - expected[k]) < 1e-4 for k in expected)
    assert found.tokens == found.of_tokens == len(expected)
    assert found.pseudo_nll.estimate == pytest.approx(np.mean(list(expected.values())), abs=1e-4)
    # every fourth line has an unknown word: it is seen and costs nothing
    assert not (tokens['token'] == '[UNK]').any()


def test_blocks_are_those_of_the_running_text(model, tmp_path):
    texts = books(tmp_path / 'texts')
    tokenizer = tiny_tokenizer()
    running = []
    for path in sorted(texts.glob('*.txt')):
        running += [*tokenizer(path.read_text(), add_special_tokens=False)['input_ids'], 3]
    inside = LENGTH - 2
    whole = range(0, len(running) - inside + 1, inside)
    expected = by_hand(model, [[2, *running[start : start + inside], 3] for start in whole])
    found, tokens = score(str(model), str(texts), length=LENGTH)
    made = dict(zip(zip(tokens['row'], tokens['position']), tokens['nll']))
    assert made.keys() == expected.keys()
    assert all(abs(made[k] - expected[k]) < 1e-4 for k in expected)
    assert found.nll is not None and found.nll_all is not None


def test_a_sample_stands_for_the_whole(model, tmp_path):
    texts = books(tmp_path / 'texts', words=600)
    whole, of_whole = score(str(model), str(texts), length=LENGTH)
    some, of_some = score(str(model), str(texts), length=LENGTH, sample=300)
    assert (some.tokens, some.of_tokens) == (300, whole.tokens)
    merged = of_some.merge(of_whole, on=['document', 'row', 'position', 'token'])
    assert np.allclose(merged['nll_x'], merged['nll_y'], atol=1e-5) and len(merged) == 300
    assert abs(some.pseudo_nll.estimate - whole.pseudo_nll.estimate) < 5 * of_whole['nll'].std() / math.sqrt(
        300
    )
    assert score(str(model), str(texts), length=LENGTH, sample=10**6)[0].tokens == whole.tokens


def test_all_models_are_asked_the_same(model, tmp_path):
    other = tmp_path / 'other'
    tiny_lm(seed=1, closed=True).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    texts = str(books(tmp_path / 'texts', words=300))
    asked = [score(str(m), texts, length=LENGTH, sample=50)[1] for m in (model, other)]
    keys = ['document', 'row', 'position', 'token']
    pd.testing.assert_frame_equal(asked[0][keys], asked[1][keys])
    assert not np.allclose(asked[0]['nll'], asked[1]['nll'])


def test_a_model_that_knows_nothing_has_the_vocabularys_size_as_its_perplexity(model, tmp_path, capsys):
    knows_nothing = tmp_path / 'nothing'
    net = tiny_lm(closed=True)
    with torch.no_grad():
        net.cls.predictions.transform.dense.weight.zero_()
        net.cls.predictions.transform.dense.bias.zero_()
        net.cls.predictions.transform.LayerNorm.bias.zero_()
        net.cls.predictions.bias.zero_()
    net.save_pretrained(knows_nothing)
    tiny_tokenizer().save_pretrained(knows_nothing)
    texts = books(tmp_path / 'texts')
    assert main(['score', str(knows_nothing), str(texts), '--length', str(LENGTH), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ('perplexity', 'perplexity_all', 'pseudo_perplexity'):
        assert found[name] == pytest.approx(WORDS + 5, rel=1e-4)
    assert found['clusters'] == 'documents' and found['documents'] == 3


def test_of_one_document_the_rows_are_the_sample(model, tmp_path, capsys):
    texts = books(tmp_path / 'texts', words=300)
    assert main(['score', str(model), str(texts / 'book0.txt'), '--length', str(LENGTH)]) == 0
    said = capsys.readouterr().out
    assert 'rows of one document, which say nothing about other documents' in said


def test_sixteen_bits_change_little(model, tmp_path):
    texts = str(books(tmp_path / 'texts', words=200))
    plain = score(str(model), texts, length=LENGTH)[0]
    rounded = score(str(model), texts, length=LENGTH, dtype='bf16')[0]
    assert rounded.pseudo_nll.estimate != plain.pseudo_nll.estimate
    assert rounded.pseudo_nll.estimate == pytest.approx(plain.pseudo_nll.estimate, abs=0.02)


def command(model: Path, texts: Path) -> list[str]:
    asked = '--json --by line --length 32'.split()
    return [sys.executable, '-m', 'kdnotes.cli', 'score', str(model), str(texts), *asked]


def environment(home: Path) -> dict[str, str]:
    return dict(os.environ, KDNOTES_HOME=str(home), HF_HUB_OFFLINE='1', CUDA_VISIBLE_DEVICES='')


def parts_done(home: Path) -> int:
    ledgers = list(home.glob('runs/.cache/scores/*/ledger.json'))
    return json.loads(ledgers[0].read_text())['parts'] if ledgers else 0


@pytest.mark.exhaustive
@pytest.mark.parametrize('how', one_of_each([signal.SIGKILL, signal.SIGTERM]))
def test_an_interrupted_call_goes_on_to_the_same_figures(how, model, tmp_path, monkeypatch, capsys):
    texts = books(tmp_path / 'texts', words=9 * PART // 3)

    def in_this_process(home: Path):
        monkeypatch.setenv('KDNOTES_HOME', str(home))
        assert main(command(model, texts)[3:]) == 0
        return capsys.readouterr()

    undisturbed = in_this_process(tmp_path / 'a')
    home = tmp_path / 'b'
    # what is done is noted after each part, and not every five seconds
    often = (
        "import sys; from kdnotes.core import cached; cached.LEDGER_EVERY_S = 0; from kdnotes.cli import main"
    )
    process = subprocess.Popen(
        [sys.executable, '-c', f'{often}; sys.exit(main(sys.argv[1:]))', *command(model, texts)[3:]],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while parts_done(home) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(how)
    _, said = process.communicate()
    if how == signal.SIGTERM:
        assert process.returncode == 75
        assert said.splitlines()[-1].startswith('kdnotes: stopped; what is done is kept')
    assert 2 <= parts_done(home) < 9
    parts = []
    monkeypatch.setattr(
        Writer, 'add', lambda self, arrays, add=Writer.add: parts.append(1) or add(self, arrays)
    )
    done = parts_done(home)
    again = in_this_process(home)
    assert len(parts) == 9 - done
    assert again.out == undisturbed.out


def test_a_changed_model_or_text_is_scored_anew(model, tmp_path):
    texts = books(tmp_path / 'texts')
    first = score(str(model), str(texts), length=LENGTH)[0]
    copy = tmp_path / 'copy'
    shutil.copytree(model, copy)
    tiny_lm(seed=3, closed=True).save_pretrained(copy)
    assert score(str(copy), str(texts), length=LENGTH)[0].pseudo_nll != first.pseudo_nll
    (texts / 'book0.txt').write_text('w1 w2 w3 ' * 40)
    assert score(str(model), str(texts), length=LENGTH)[0].text_sha256 != first.text_sha256
    assert len([p for p in (cache_path() / 'scores').iterdir() if p.is_dir()]) == 3


def another_mask(copy: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = '[PAD]'
    tokenizer.save_pretrained(copy)


def another_config(copy: Path) -> None:
    config = json.loads((copy / 'config.json').read_text())
    config['num_attention_heads'] *= 2
    (copy / 'config.json').write_text(json.dumps(config))


@pytest.mark.parametrize('change', [another_mask, another_config])
def test_another_reading_of_the_same_weights_is_scored_anew(model, tmp_path, change):
    texts = books(tmp_path / 'texts')
    first = score(str(model), str(texts), length=LENGTH)[0]
    copy = tmp_path / 'copy'
    shutil.copytree(model, copy)
    change(copy)
    other = score(str(copy), str(texts), length=LENGTH)[0]
    assert other.model_sha256 == first.model_sha256
    assert other.pseudo_nll != first.pseudo_nll


def test_a_token_belongs_to_the_document_it_stands_in(model, tmp_path):
    texts = books(tmp_path / 'texts', words=25)
    _, tokens = score(str(model), str(texts), length=LENGTH)
    of_rows = tokens.groupby('row')['document'].nunique()
    assert of_rows.max() == 2
    known = {path.stem: path.read_text().split() for path in texts.glob('*.txt')}
    for document, its in tokens.groupby('document'):
        # what does not fill a block is at the end of the last book
        words = [word for word in known[document] if word != 'unheard']
        assert its.sort_values(['row', 'position'])['token'].tolist() == words[: len(its)]


def test_what_each_token_costs_can_be_had(model, tmp_path, capsys):
    texts = books(tmp_path / 'texts')
    out = tmp_path / 'tokens.csv.gz'
    assert main(['score', str(model), str(texts), '--length', str(LENGTH), '--json', '--out', str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = pd.read_csv(out)
    assert tokens['nll'].mean() == pytest.approx(found['pseudo_nll']['estimate'], abs=1e-6)
    assert list(tokens) == ['document', 'row', 'position', 'token', 'nll']


def refused(capsys, *arguments: str) -> str:
    assert main(['score', *arguments]) != 0
    return capsys.readouterr().err.strip().splitlines()[-1]


def odd_models(model: Path, folder: Path) -> tuple[Path, Path, Path]:
    "One whose tokenizer has ids beyond its embeddings, one with far too large weights, one that is GPT-2."
    gap = folder / 'gap'
    shutil.copytree(model, gap)
    rules = json.loads((gap / 'tokenizer.json').read_text())
    rules['model']['vocab']['w7'] = 99
    (gap / 'tokenizer.json').write_text(json.dumps(rules))
    huge = folder / 'huge'
    shutil.copytree(model, huge)
    too_large = tiny_lm(closed=True)
    with torch.no_grad():
        too_large.cls.predictions.bias.fill_(3e38)
        too_large.bert.embeddings.word_embeddings.weight.mul_(1e37)
    too_large.save_pretrained(huge)
    left = folder / 'left'
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=80)
    ).save_pretrained(left)
    tiny_tokenizer().save_pretrained(left)
    return gap, huge, left


def test_an_encoders_architecture_that_was_made_a_decoder_is_refused(model, tmp_path, capsys):
    "It sees nothing of what comes after a word, whatever its name."
    decoder = tmp_path / 'decoder'
    shutil.copytree(model, decoder)
    config = json.loads((decoder / 'config.json').read_text())
    (decoder / 'config.json').write_text(json.dumps(config | dict(is_decoder=True)))
    said = refused(capsys, str(decoder), str(books(tmp_path / 'texts')), '--length', '16')
    assert 'is a bert with is_decoder=true in its config, which was not made to guess hidden words' in said


def test_a_folder_does_not_take_the_place_of_a_text_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = read_text_to_score('embedded')
    books(tmp_path / 'embedded')
    assert read_text_to_score('embedded') == before
    assert {row['id'] for row in read_text_to_score('./embedded')} == {'book0', 'book1', 'book2'}


def test_what_cannot_be_scored_is_refused_in_a_sentence(model, tmp_path, capsys):
    texts = books(tmp_path / 'texts')
    empty = tmp_path / 'empty.txt'
    empty.write_text(' \n')
    binary = tmp_path / 'binary.txt'
    binary.write_bytes(b'w1 w2\0w3')
    short = tmp_path / 'short.txt'
    short.write_text('w1 w2')
    foreign = tmp_path / 'foreign.txt'
    foreign.write_text('nothing here is known ' * 50)
    nothing = tmp_path / 'nothing'
    nothing.mkdir()
    odd = tmp_path / os.fsdecode(b'\xff.txt')
    odd.write_text('w1 w2 ' * 50)
    endless = tmp_path / 'endless'
    endless.mkdir()
    os.mkfifo(endless / 'pipe.txt')
    gap, huge, left = odd_models(model, tmp_path)
    cases = {
        'there is no text': [str(model), str(tmp_path / 'nowhere')],
        'has no .txt file': [str(model), str(nothing)],
        'is empty': [str(model), str(empty)],
        'is no text': [str(model), str(binary)],
        'and a block of 16 takes 14 of them': [str(model), str(short), '--length', '16'],
        'no block of the text has': [str(model), str(foreign), '--length', '16'],
        'has no word that the tokenizer': [str(model), str(foreign), '--by', 'line', '--length', '16'],
        'use length=32 or less': [str(model), str(texts), '--length', '33'],
        'dtype=fp16 needs a GPU': [str(model), str(texts), '--length', '16', '--dtype', 'fp16'],
        'cannot be written': [str(model), str(texts), '--out', str(nothing / 'a' / 'b.csv.gz')],
        'must end in .csv.gz': [str(model), str(texts), '--out', str(texts / 'book0.txt')],
        "there is no text '~nobody/text.txt'": [str(model), '~nobody/text.txt'],
        "there is no text 'xxx": [str(model), 'x' * 300],
        'the name of the text is empty': [str(model), ''],
        "\\udcff.txt' is not written in UTF-8": [str(model), str(odd)],
        'is no ordinary file': [str(model), str(endless)],
        'smaller length': [str(model), str(short), '--length', '16'],
        'has ids up to 99': [str(gap), str(texts), '--length', '16'],
        'are not finite': [str(huge), str(texts), '--length', '16'],
        'is a gpt2, which was not made to guess hidden words': [str(left), str(texts), '--length', '16'],
        'there is no folder': [str(tmp_path / 'no model'), str(texts)],
        "there is no run 'baseline-s0-0123456789ab'": ['baseline-s0-0123456789ab', str(texts)],
    }
    for sentence, arguments in cases.items():
        said = refused(capsys, *arguments)
        assert said.startswith('kdnotes: ') and sentence in said, said


def test_a_device_is_not_replaced_by_a_file(model, tmp_path, capsys):
    texts = books(tmp_path / 'texts')
    pipe = tmp_path / 'pipe.csv.gz'
    os.mkfifo(pipe)
    (tmp_path / 'folder.csv.gz').mkdir()
    for out in (pipe, tmp_path / 'folder.csv.gz', tmp_path / 'nowhere' / 'a.csv.gz'):
        said = refused(capsys, str(model), str(texts), '--length', '16', '--out', str(out))
        assert 'is no ordinary file' in said or 'name a file in a folder that exists' in said
    assert pipe.is_fifo()


def test_a_model_without_a_head_or_a_mask_is_refused(model, tmp_path, capsys):
    texts = books(tmp_path / 'texts')
    headless = tmp_path / 'headless'
    tiny_lm(closed=True).bert.save_pretrained(headless)
    tiny_tokenizer().save_pretrained(headless)
    said = refused(capsys, str(headless), str(texts), '--length', '16')
    assert 'which would be random; give one that was trained to guess hidden words' in said
    maskless = tmp_path / 'maskless'
    shutil.copytree(model, maskless)
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(maskless)
    said = refused(capsys, str(maskless), str(texts), '--length', '16')
    assert 'has no mask_token, which this task needs' in said


def byte_level(lines: list[str]):
    "A tokenizer as RoBERTa has it."
    backend = Tokenizer(models.BPE(unk_token='<unk>'))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = dict(
        bos_token='<s>', pad_token='<pad>', eos_token='</s>', unk_token='<unk>', mask_token='<mask>'
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, cls_token='<s>', sep_token='</s>', **special)


def unigram(lines: list[str]):
    "A tokenizer as ALBERT has it."
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = dict(
        pad_token='<pad>', unk_token='<unk>', cls_token='[CLS]', sep_token='[SEP]', mask_token='[MASK]'
    )
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=[*special.values()], unk_token='<unk>')
    backend.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
EMBEDDED = SIZE | dict(embedding_size=16)
FNET = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=64, tpu_short_seq_length=64)
ESM = dict(pad_token_id=0, mask_token_id=4, position_embedding_type='rotary', token_dropout=False)
# kind -> its tokenizer, its config, and what that is given besides a vocabulary; each reads 64 tokens
KINDS = {
    'roberta': (byte_level, 'RobertaConfig', SIZE | dict(max_position_embeddings=66, pad_token_id=1)),
    'modernbert': (
        byte_level,
        'ModernBertConfig',
        SIZE | dict(pad_token_id=1, cls_token_id=0, sep_token_id=2),
    ),
    'albert': (unigram, 'AlbertConfig', EMBEDDED),
    'electra': (unigram, 'ElectraConfig', EMBEDDED),
    'distilbert': (unigram, 'DistilBertConfig', dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64)),
    'fnet': (unigram, 'FNetConfig', FNET),  # padding is not invisible to it
    'esm': (unigram, 'EsmConfig', SIZE | ESM),  # adds a bias to what its output layer gives
    'more outputs than tokens': (unigram, 'BertConfig', SIZE),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize('kind', KINDS)
def test_every_architecture_costs_what_transformers_says(kind, tmp_path, capsys):
    words = 'The quick brown fox jumps over the lazy dog. Ünïcode, 12 numbers and (signs)! '
    lines = [(words * 3)[start : start + 40 + start % 7].strip() for start in range(0, 120, 17)]
    (tmp_path / 'text.txt').write_text('\n'.join(lines))
    make_tokenizer, name, given = KINDS[kind]
    tokenizer = make_tokenizer(lines)
    n_outputs = len(tokenizer) + (11 if kind == 'more outputs than tokens' else 0)
    config = getattr(transformers, name)(**dict(vocab_size=n_outputs, max_position_embeddings=64) | given)
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / 'model')
    tokenizer.save_pretrained(tmp_path / 'model')
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    rows = [[begin, *tokenizer(line, add_special_tokens=False)['input_ids'], end] for line in lines]
    expected = list(by_hand(tmp_path / 'model', rows, tokenizer).values())
    source = str(tmp_path / 'model')
    found = score(source, str(tmp_path / 'text.txt'), by='line', length=64)[0]
    assert found.tokens == len(expected)
    assert found.pseudo_nll.estimate == pytest.approx(np.mean(expected), abs=1e-5)
    said = refused(capsys, source, str(tmp_path / 'text.txt'), '--length', '65')
    assert 'reads texts of at most 64 tokens' in said
