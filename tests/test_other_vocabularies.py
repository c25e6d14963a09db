"""Teachers and students of other families: each reads the texts with its own tokenizer, the teacher's stored
outputs are those of plain transformers on its own tokens, and what would compare them by token is refused.
"""

import string
import numpy as np
import pytest
import torch
import transformers as hf
from pathlib import Path
from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers, processors
from architectures import WORDS, configs, random_model, write_teacher
from helpers import trained
from small_runs import train_here
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.files import cache_path
from kdnotes.core.machine import Machine
from kdnotes.distill import architectures
from kdnotes.distill.intermediate import online_teacher
from kdnotes.distill.models import load_model, save_model
from kdnotes.distill.tokenizers import load_tokenizer, tokenizer_sha256
from kdnotes.distill.weights import reading_sha256, vocabulary_sha256
from kdnotes.distill.teacher_cache import open_signal
from kdnotes.experiment.card import model_card
from kdnotes.experiment.launch import run
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.experiment.worker import encoded_task, task_of_teacher
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_run_model
from kdnotes.tasks.sources import corpus_of
from kdnotes.train.distributed import Runtime
from kdnotes.core.spec import with_values

pytestmark = pytest.mark.usefixtures('home')

CPU = Runtime(torch.device('cpu'), 'fp32', threads=1)
HEAD = 'AutoModelForSequenceClassification'


# ---- three families besides BERT's ----


def bytes_between(roles: list[str], begin: str, end: str) -> Tokenizer:
    "Bytes as tokens, between a token at the beginning and one at the end of each text."
    words = [*roles, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(token_models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    ids = [(word, words.index(word)) for word in (begin, end)]
    made.post_processor = processors.TemplateProcessing(
        single=f'{begin} $A {end}', pair=f'{begin} $A {end} {end} $B {end}', special_tokens=ids
    )
    return made


def roberta_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ['<s>', '<pad>', '</s>', '<unk>', *letters, '<mask>']
    return hf.RobertaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])


def deberta_tokenizer():
    roles = ['[PAD]', '[CLS]', '[SEP]', '[UNK]']
    letters = ['\u2581', *string.ascii_letters, *string.digits]
    pieces = [(role, 0.0) for role in roles] + [(letter, -2.0) for letter in letters] + [('[MASK]', 0.0)]
    return hf.DebertaV2Tokenizer(vocab=pieces, unk_id=3)


def modernbert_tokenizer():
    roles = dict(
        unk_token='[UNK]', cls_token='[CLS]', sep_token='[SEP]', pad_token='[PAD]', mask_token='[MASK]'
    )
    made = bytes_between(list(roles.values()), '[CLS]', '[SEP]')
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=['input_ids', 'attention_mask'], **roles
    )


TOKENIZERS = dict(roberta=roberta_tokenizer, deberta_v2=deberta_tokenizer, modernbert=modernbert_tokenizer)


def family(folder: Path, kind: str, outputs: int = 2, seed: int = 0) -> Path:
    "A random model of an architecture and a tokenizer as its family has it, without dropout."
    config = configs(2, dropout=0.0)[kind]
    config.num_labels = outputs
    if kind not in TOKENIZERS:
        return write_teacher(folder, config)
    tokenizer = TOKENIZERS[kind]()
    config.vocab_size = len(tokenizer)
    for role in ('pad', 'bos', 'eos', 'cls', 'sep'):
        setattr(config, f'{role}_token_id', getattr(tokenizer, f'{role}_token_id'))
    return save_model(random_model(config, seed), folder, tokenizer)


def asked(teacher: Path, student: Path, mode: str = 'full_kd', **given):
    small = dict(corpus='embedded', smoke=True, study='families', threads_per_rank=1, ranks=1, max_length=64)
    own = dict(teacher=str(teacher), student=str(student), student_init='hub')
    return make_config(mode=mode, **small | own | given)


def refused(config, *words) -> None:
    with pytest.raises(KdnotesError) as caught:
        plan(config, Machine('cpu', 2))
    said = str(caught.value)
    assert '\n' not in said and all(word in said for word in words), said


def logits_of(folder, texts: list[tuple[str, ...]], max_length: int = 64) -> torch.Tensor:
    "By plain transformers, one text at a time."
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    names = architectures.model_inputs(model)
    found = []
    for text in texts:
        encoded = tokenizer(*text, truncation='longest_first', max_length=max_length, return_tensors='pt')
        with torch.no_grad():
            found.append(model(**{name: value for name, value in encoded.items() if name in names}).logits)
    return torch.cat(found)


def texts_of(task, split: str) -> list[tuple[str, ...]]:
    if task.name == 'answer_selection':
        return [(row['question'], row['sentence']) for row in task.rows[split]]
    return [(row['text'],) for row in task.rows[split]]


# ---- trained ----

FAMILIES = [
    ('roberta', 'bert', 'answer_selection'),
    ('deberta_v2', 'bert', 'text_classification'),
    ('modernbert', 'distilbert', 'text_classification'),
    ('bert', 'roberta', 'answer_selection'),
    ('bert', 'modernbert', 'text_classification'),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize('of_teacher, of_student, task', FAMILIES)
def test_a_student_of_another_family_learns_what_its_teacher_says_of_its_own_tokens(
    of_teacher, of_student, task, tmp_path, rank_here
):
    teacher = family(tmp_path / 'teacher', of_teacher)
    student = family(tmp_path / 'student', of_student, seed=1)
    config = asked(teacher, student, task=task)
    planned = plan(config)
    assert str(student) in str(planned.tokens) and str(teacher) in str(planned.tokens)
    assert f'tokens: {planned.tokens}' in planned.explain()
    assert planned.vocabulary_sha256 == vocabulary_sha256(student) != planned.teacher.vocabulary_sha256
    assert planned.initial['reading_sha256'] == reading_sha256(student)
    record = run(config)
    assert record['steps'] > 0 and record['models']['vocabulary_sha256'] == vocabulary_sha256(student)
    # what is saved reads as the student does
    saved = find_run_model(record['run_id'])
    assert load_tokenizer(saved).get_vocab() == load_tokenizer(student).get_vocab()
    taught = find_run_model(record['teacher_run_id'])
    assert load_tokenizer(taught).get_vocab() == load_tokenizer(teacher).get_vocab()
    # the teacher's outputs are named by its tokenizer, and are those of its own tokens
    [folder] = (path for path in (cache_path() / 'signals').iterdir() if path.is_dir())
    signal = open_signal(folder)
    assert signal.meta['key_parts']['tokenizer_sha256'] == tokenizer_sha256(load_tokenizer(teacher))
    own = encoded_task(planned.config, corpus_of(planned.config), CPU)
    index = np.arange(0, len(own.lengths('train')), 5)
    texts = texts_of(own, 'train')
    batch = own.batch('train', index)
    said = logits_of(taught, [texts[i] for i in index])
    torch.testing.assert_close(signal(batch)['logits'], said, atol=2e-5, rtol=1e-4)
    as_read = task_of_teacher(planned.config, corpus_of(planned.config), CPU, own)
    asks = online_teacher(as_read, load_model(taught, HEAD, 0), planned.config, as_read is not own)
    torch.testing.assert_close(asks(batch)['logits'], said, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(
        said, logits_of(find_run_model(record['run_id']), [texts[i] for i in index]), atol=1e-2
    )
    # its scores are those of the folder that was saved
    tested = own.batch('test', np.arange(len(own.lengths('test'))))
    by_hand = own.scores(type('', (), dict(logits=logits_of(saved, texts_of(own, 'test')))), tested)
    kept = RunFolder('families', record['run_id']).table('predictions')
    kept = kept[kept['split'] == 'test']['score'].to_numpy().reshape(by_hand.shape)
    np.testing.assert_allclose(kept, by_hand.numpy(), atol=1e-4)
    answers = predict(
        record['run_id'],
        **{'text': 'a metal'}
        if task == 'text_classification'
        else {'question': 'What is it?', 'candidates': ['a metal']},
    )
    assert answers.beside is not None and answers.beside.model == record['teacher_run_id']
    card = model_card(record['run_id']).text
    assert '- Weights start from: a local folder (pretrained model)' in card


def as_trained(teacher: Path, student: Path, folder=None, stop_after=None, signal: str = 'online'):
    "A student's run, in this process."
    config = plan(
        asked(teacher, student, task='text_classification', signal=signal), Machine('cpu', 1)
    ).config
    config = with_values(config, epochs=2, checkpoint_steps=1)
    corpus = corpus_of(config)
    task = encoded_task(config, corpus, CPU)
    as_read = task_of_teacher(config, corpus, CPU, task)
    assert as_read is not task
    model, its_teacher = (load_model(of, HEAD, 0, **task.model_kwargs) for of in (student, teacher))
    asks = online_teacher(as_read, its_teacher, config, teacher_tokens=True)
    return trained(task, config, model, CPU, asks, folder, stop_after)


def test_a_stopped_training_with_two_vocabularies_goes_on_to_the_last_bit(tmp_path):
    teacher = family(tmp_path / 'teacher', 'roberta')
    student = family(tmp_path / 'student', 'bert', seed=1)
    whole = as_trained(teacher, student)
    assert as_trained(teacher, student, tmp_path / 'checkpoints', stop_after=1).result is None
    again = as_trained(teacher, student, tmp_path / 'checkpoints')
    assert again.result.resumed_at == [1] and np.array_equal(again.weights, whole.weights)


def weights_of(record: dict) -> dict[str, torch.Tensor]:
    folder = find_run_model(record['run_id'])
    return hf.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_online_is_cached_and_two_ranks_are_one(tmp_path):
    "The ranks are processes: each encodes for both networks."
    teacher = family(tmp_path / 'teacher', 'roberta')
    student = family(tmp_path / 'student', 'bert', seed=1)
    given = dict(teacher_mode='given', learning_rate=1e-3)
    with pytest.MonkeyPatch.context() as patched:
        train_here(patched)
        cached, online = (
            weights_of(run(asked(teacher, student, signal=signal, **given)))
            for signal in ('cached', 'online')
        )
    two = weights_of(run(asked(teacher, student, signal='online', ranks=2, **given)))
    start = load_model(student, HEAD, 0).state_dict()
    for name, value in cached.items():
        torch.testing.assert_close(online[name], value, atol=2e-5, rtol=1e-4)
        if 'key.bias' not in name:  # its gradient is 0 but for rounding, which AdamW makes as large as any
            torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-4)
    moved = max((cached[name] - start[name]).abs().max().item() for name in cached)
    assert moved > 1e-3, 'it was trained'


# ---- what stays as it was ----


def test_where_both_have_one_vocabulary_the_teachers_tokenizer_reads_and_names_the_run(tmp_path):
    teacher = write_teacher(tmp_path / 'teacher', configs(2)['bert'])
    student = write_teacher(tmp_path / 'student', configs(2)['distilbert'])
    (student / 'vocab_note.txt').write_text('a file that the teacher does not have')
    alike = plan(asked(teacher, student))
    assert vocabulary_sha256(student) != vocabulary_sha256(teacher) == alike.vocabulary_sha256
    assert alike.initial['reading_sha256'] == reading_sha256(student, teacher)
    assert not alike.tokens and 'tokens: of' not in alike.explain()
    task = encoded_task(alike.config, corpus_of(alike.config), CPU)
    assert task_of_teacher(alike.config, None, CPU, task) is task


# ---- refusals ----


def test_what_is_compared_by_token_needs_one_vocabulary(tmp_path):
    teacher = family(tmp_path / 'teacher', 'roberta')
    student = family(tmp_path / 'student', 'bert')
    both = (str(teacher), str(student), 'another vocabulary', 'token by token', 'choose')
    intermediate = dict(signal='online', hidden_loss='mse', hidden_layers=(1,))
    refused(asked(teacher, student, **intermediate), 'hidden_loss', *both)
    refused(asked(teacher, student, signal='online', relation_loss='values'), 'relation_loss', *both)
    refused(asked(teacher, student, task='extractive_qa', stride=16), 'task=extractive_qa', *both)
    refused(asked(teacher, student, task='masked_lm', max_length=32), 'task=masked_lm', *both)


@pytest.mark.parametrize('whose', ['teacher', 'student'])
def test_a_folder_without_its_tokenizer_is_refused_in_the_plan(whose, tmp_path):
    folders = dict(
        teacher=family(tmp_path / 'teacher', 'roberta'), student=family(tmp_path / 'student', 'bert')
    )
    for path in folders[whose].iterdir():
        if path.name not in ('config.json', 'model.safetensors'):
            path.unlink()
    refused(asked(**folders), str(folders[whose]), 'has no tokenizer', 'save_pretrained')


def test_texts_longer_than_the_student_reads_are_refused_in_the_plan(tmp_path):
    teacher = family(tmp_path / 'teacher', 'modernbert')
    student = tmp_path / 'student'
    config = configs(2)['bert']
    config.max_position_embeddings = 40
    write_teacher(student, config)
    assert len(load_tokenizer(student)) == len(WORDS)
    refused(asked(teacher, student), str(student), 'at most 40 tokens', 'max_length=40')
    assert plan(asked(teacher, student, max_length=40)).config.data.max_length == 40
