"""A language model as teacher: a service on this machine that answers, stalls, fails and lies, and a tiny
model of transformers.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from architectures import WORDS, small_bert, write_teacher
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.distill.scores import read_scores
from kdnotes.experiment.launch import run
from kdnotes.experiment.plan import plan
from kdnotes.labelling.label import ANSWERS, label, stored_answers
from kdnotes.labelling.prompts import find_options, load_prompt, prompts
from kdnotes.labelling.services import KEY, LabelError
from kdnotes.experiment.compatibility import make_task
from kdnotes.tasks.sources import load_corpus

pytest.importorskip('openai')
POSITIVE = ('good', 'fine', 'great')


def truth(prompt):
    "The option that a reader of these reviews would choose: B is positive."
    return 'B' if any(word in prompt for word in POSITIVE) else 'A'


class Server(ThreadingHTTPServer):
    "A service that answers as `behaviour(number of the call, request)` says: a status and a body."

    def __init__(self, behaviour):
        self.calls = []
        self.behaviour = behaviour
        super().__init__(('127.0.0.1', 0), Handler)

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}/v1'


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        self.server.calls.append((self.headers, request))
        status, body = self.server.behaviour(len(self.server.calls), request)
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header('Content-Type', 'text/html' if isinstance(body, str) else 'application/json')
            self.send_header('Content-Length', str(len(data)))
            if status == 429:
                self.send_header('Retry-After', '0')
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # the client has given up

    def log_message(self, *_):
        pass


@contextmanager
def serving(behaviour):
    server = Server(behaviour)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def completion(texts, top=None, finish='stop'):
    "A chat completion of the protocol."
    content = (
        None
        if top is None
        else [
            dict(
                token=texts[0],
                logprob=max(top.values()),
                bytes=None,
                top_logprobs=[dict(token=token, logprob=value, bytes=None) for token, value in top.items()],
            )
        ]
    )
    choices = [
        dict(
            index=i,
            finish_reason=finish,
            message=dict(role='assistant', content=text),
            logprobs=content and dict(content=content),
        )
        for i, text in enumerate(texts)
    ]
    usage = dict(prompt_tokens=50, completion_tokens=len(texts), total_tokens=50 + len(texts))
    return dict(id='1', object='chat.completion', created=1, model='m', choices=choices, usage=usage)


def right(number, request):
    "Log-probabilities: 0.9 for the right option."
    answer = truth(request['messages'][0]['content'])
    other = 'A' if answer == 'B' else 'B'
    return 200, completion([answer], {answer: math.log(0.9), other: math.log(0.08)})


def samples_only(number, request):
    "A service without log-probabilities that ignores n; one answer of three is wrong."
    if request.get('logprobs'):
        return 400, dict(error=dict(message='logprobs is not supported'))
    answer = truth(request['messages'][0]['content'])
    return 200, completion(['AB'['BA'.index(answer)] if number % 3 == 0 else answer])


@pytest.fixture
def reviews(tmp_path):
    "A corpus of reviews with gold labels, and rows without."
    folder = tmp_path / 'reviews'
    folder.mkdir()
    words = [
        ('a good one', 'positive'),
        ('a dull one', 'negative'),
        ('fine acting', 'positive'),
        ('too long', 'negative'),
    ]
    for split, n in dict(train=24, dev=8, test=8).items():
        rows = [dict(text=f'{text} {split} {i}', label=mood) for i in range(n // 4) for text, mood in words]
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    unlabelled = [dict(text=f'{text} extra {i}') for i in range(4) for text, _ in words]
    (folder / 'unlabelled.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in unlabelled))
    return folder


def rows_of(folder, split):
    return [json.loads(line) for line in (folder / f'{split}.jsonl').read_text().splitlines()]


def test_a_service_labels_a_corpus_that_a_student_reads(reviews, tmp_path):
    out = tmp_path / 'out'
    with serving(right) as server:
        facts = label(reviews, 'm', out, endpoint=server.url, price=(1, 2), concurrency=4)
        assert len(server.calls) == 24 + 8 + 8 + 16
        again = label(reviews, 'm', out, endpoint=server.url)
        assert len(server.calls) == 56 and again['splits'] == facts['splits']
    assert facts['used']['cost'] == pytest.approx((56 * 50 + 2 * 56) / 1e6)
    assert facts['splits']['test']['agreement'] | dict(low=0, high=0) == dict(
        n=8, accuracy=1.0, low=0, high=0, kappa=1.0, calibration_error=pytest.approx(1 - 0.9 / 0.98)
    )
    assert (
        'agreement' not in facts['splits']['unlabelled'] and facts['splits']['unlabelled']['labelled'] == 16
    )
    before, after = (
        load_corpus('text_classification', str(reviews)),
        load_corpus('text_classification', str(out), 'teacher=teacher'),
    )
    for split in ('train', 'dev', 'test'):
        assert list(after.splits[split]['text']) == list(before.splits[split]['text'])
        assert list(after.splits[split]['label']) == list(before.splits[split]['label'])
    config = plan(
        make_config(
            task='text_classification',
            mode='full_kd',
            corpus=str(out),
            columns='teacher=teacher',
            teacher_mode='scores',
            scores_are='probabilities',
            smoke=True,
        )
    ).config
    scores = read_scores(make_task(config, after), after, config)
    p = np.exp(scores.logits['train'])
    assert p.sum(axis=1) == pytest.approx(1, abs=1e-4) and p.max(axis=1) == pytest.approx(
        0.9 / 0.98, abs=1e-4
    )


def test_samples_where_there_are_no_log_probabilities(reviews, tmp_path):
    with serving(samples_only) as server:
        facts = label(
            reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=6, concurrency=1
        )
        assert len(server.calls) == 1 + 8 * 6
    assert facts['method'] == '6 samples' and list(facts['splits']) == ['dev']
    assert (
        len(rows_of(tmp_path / 'out', 'train')) == 24
        and 'teacher' not in rows_of(tmp_path / 'out', 'train')[0]
    )
    assert facts['splits']['dev']['agreement']['accuracy'] == 1.0
    # four answers of six are right, each option has half an answer more
    assert {max(row['teacher']) for row in rows_of(tmp_path / 'out', 'dev')} == {round(4.5 / 7, 6)}


def test_what_a_service_does_not_answer_well_is_counted(reviews, tmp_path):
    def odd(number, request):
        text = request['messages'][0]['content']
        if 'fine acting' in text:
            return 200, completion(['Das gefällt mir.'], {'Das': -0.01})
        if 'too long' in text:
            return 200, completion([''], finish='content_filter')
        return right(number, request)

    with serving(odd) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url)
    assert facts['splits']['train'] | dict(agreement=0) == dict(
        rows=24, written=12, labelled=12, unparsable=6, refused=6, failed=0, agreement=0
    )
    assert facts['splits']['test']['written'] == 8 and facts['splits']['test']['agreement']['n'] == 4
    assert [row['teacher'] for row in rows_of(tmp_path / 'out', 'test')].count([0.5, 0.5]) == 4


def test_what_fails_for_a_time_is_tried_again(reviews, tmp_path):
    def flaky(number, request):
        return (429, {}) if number % 3 == 1 else (500, {}) if number % 3 == 2 else right(number, request)

    with serving(flaky) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('test',), concurrency=1)
        assert len(server.calls) == 24
    assert facts['used'] | dict(seconds=0) == dict(
        answers=8, failures=0, tokens_in=400, tokens_out=8, cost=None, seconds=0
    )


def test_rows_whose_call_failed_are_asked_again_by_the_next_call(reviews, tmp_path):
    seen = []

    def once(number, request):
        text = request['messages'][0]['content']
        seen.append(text)
        return (500, {}) if 'too long' in text and seen.count(text) == 1 else right(number, request)

    given = dict(out=tmp_path / 'out', splits=('test',), retries=0)
    with serving(once) as server:
        first = label(reviews, 'm', endpoint=server.url, **given)
        second = label(reviews, 'm', endpoint=server.url, **given)
    assert first['splits']['test']['failed'] == 2 and first['used']['failures'] == 2
    assert second['splits']['test']['failed'] == 0 and second['used']['answers'] == 2


@pytest.mark.parametrize(
    'behaviour, expected',
    {
        'a page': ((200, '<html><body>Sign in</body></html>'), 'which is no chat completion'),
        'another protocol': ((200, dict(result='A')), 'which is no chat completion'),
        'down': ((503, {}), 'status 503'),
        'unknown model': (
            (404, dict(error=dict(message='no such model'))),
            'correct the address or the name',
        ),
        'wrong key': ((401, dict(error=dict(message='bad key'))), f'set {KEY}'),
    }.values(),
)
def test_a_service_that_cannot_be_used_is_one_sentence(reviews, tmp_path, behaviour, expected):
    with serving(lambda *_: behaviour) as server:
        with pytest.raises(LabelError) as error:
            label(reviews, 'm', tmp_path / 'out', endpoint=server.url, retries=0)
        assert len(server.calls) <= 2
    assert expected in str(error.value) and '\n' not in str(error.value)


def test_a_service_that_stalls_is_a_time_out(reviews, tmp_path):
    with serving(lambda number, request: time.sleep(3) or right(number, request)) as server:
        with pytest.raises(LabelError, match='timed out'):
            label(reviews, 'm', tmp_path / 'out', endpoint=server.url, retries=0, timeout_s=0.3)


def test_limits_hold_before_anything_is_sent(reviews, tmp_path):
    with serving(right) as server:
        given = dict(out=tmp_path / 'out', endpoint=server.url)
        with pytest.raises(LabelError, match='56 prompts may take 56 calls, .* max_calls=0; raise it'):
            label(reviews, 'm', max_calls=0, **given)
        with pytest.raises(LabelError, match='max_cost=0; raise it'):
            label(reviews, 'm', max_cost=0, price=(1, 1), **given)
        with pytest.raises(LabelError, match='max_cost needs price'):
            label(reviews, 'm', max_cost=1, **given)
        assert not server.calls
    with serving(
        lambda *_: (
            200,
            right(*_)[1] | dict(usage=dict(prompt_tokens=500, completion_tokens=1, total_tokens=501)),
        )
    ) as server:
        given['endpoint'] = server.url
        with pytest.raises(
            LabelError, match='is reached'
        ):  # the service counts more tokens than were estimated
            label(
                reviews,
                'm',
                max_cost=0.004,
                price=(1, 1),
                concurrency=1,
                splits=('train', 'unlabelled'),
                **given,
            )
        assert 0 < len(stored_answers(tmp_path / 'out')) == len(server.calls) < 56


def test_the_key_is_sent_and_stored_nowhere(reviews, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, 'a-secret-key')
    with serving(right) as server:
        label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',))
        assert {headers['Authorization'] for headers, _ in server.calls} == {'Bearer a-secret-key'}
    with serving(lambda *_: (500, dict(error=dict(message='a-secret-key is odd')))) as server:
        with pytest.raises(LabelError) as error:
            label(reviews, 'other', tmp_path / 'out', endpoint=server.url, splits=('dev',), retries=0)
    assert 'a-secret-key' not in str(error.value) and '*** is odd' in str(error.value)
    assert all(b'a-secret-key' not in path.read_bytes() for path in (tmp_path / 'out').iterdir())


def test_kills_lose_at_most_the_calls_in_flight(reviews, tmp_path):
    out = tmp_path / 'out'
    script = (
        'import sys; from kdnotes.labelling.label import label; '
        'label(sys.argv[1], "m", sys.argv[2], endpoint=sys.argv[3], concurrency=2)'
    )
    with serving(lambda number, request: time.sleep(0.05) or right(number, request)) as server:
        for answers in (10, 30):
            process = subprocess.Popen([sys.executable, '-c', script, str(reviews), str(out), server.url])
            while len(stored_answers(out)) < answers:
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        label(reviews, 'm', out, endpoint=server.url, concurrency=2)
        assert 56 <= len(server.calls) <= 56 + 2 * 2
    assert len(stored_answers(out)) == 56 and len((out / ANSWERS).read_text().splitlines()) == 56


def tiny_causal(folder):
    "A GPT-2 with random weights that reads bytes, and the codes A and B with a blank as one token each."
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(['<end>', *alphabet, 'ĠA', 'ĠB'])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[('Ġ', 'A'), ('Ġ', 'B')]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token='<end>').save_pretrained(folder)
    torch.manual_seed(0)
    size = dict(vocab_size=len(vocabulary), n_positions=512, n_embd=32, n_layer=2, n_head=2)
    config = GPT2Config(**size, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    network = GPT2LMHeadModel(config)
    with torch.no_grad():  # it answers with a code, as a model does that follows the prompt
        network.transformer.ln_f.bias.fill_(1)
        network.lm_head.weight[-2:] += 0.25
    network.save_pretrained(folder)
    return folder


def test_a_local_model_labels_a_corpus_that_a_student_is_trained_on(reviews, tmp_path, monkeypatch, capsys):
    "By the commands; the probabilities are those of one prompt at a time."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    model = tiny_causal(tmp_path / 'model')
    out = tmp_path / 'out'
    words = ['label', str(reviews), '--model', str(model), '--out', str(out), '--json']
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts['used']['answers'] == 56 and facts['splits']['train']['written'] == 24
    assert main(words) == 0 and json.loads(capsys.readouterr().out)['used']['answers'] == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    network = GPT2LMHeadModel.from_pretrained(model).eval()
    options = find_options(
        'text_classification', load_corpus('text_classification', str(reviews)).splits['train']
    )
    rows = load_corpus('text_classification', str(reviews)).splits['dev']
    asked = prompts(load_prompt('text_classification'), 'text_classification', rows, options)
    codes = tokenizer.convert_tokens_to_ids(['ĠA', 'ĠB'])
    for prompt, row in zip(asked, rows_of(out, 'dev'), strict=True):
        with torch.inference_mode():
            logits = network(**tokenizer(f'{prompt}\n\nAnswer:', return_tensors='pt')).logits[0, -1]
        p = logits.softmax(0)[codes]
        assert row['teacher'] == pytest.approx((p / p.sum()).tolist(), abs=1e-5)
    network = write_teacher(tmp_path / 'network', small_bert(len(WORDS)))
    of_teacher = dict(columns='teacher=teacher', teacher_mode='scores', scores_are='probabilities')
    of_student = dict(teacher=str(network), student_init='teacher_pretrained', student_layers=(1,))
    size = dict(epochs=1, max_length=32, ranks=1, threads_per_rank=1)
    of_data = dict(task='text_classification', corpus=str(out))
    record = run(make_config(mode='full_kd', **of_data, **of_teacher, **of_student, **size))
    assert record['corpus'] == str(out) and record['columns'] == 'teacher=teacher'
    assert (
        record['teachers']['metrics'].keys() == {'dev', 'test'} and record['metrics']['test']['accuracy'] >= 0
    )


def test_ranking_and_numbers(tmp_path):
    def number_4(number, request):
        text = request['messages'][0]['content']
        assert 'First sentence:' in text
        return 200, completion(['E'], {'E': math.log(0.5), 'F': math.log(0.5)})

    def relevant(number, request):
        assert 'Does the sentence answer the question?' in request['messages'][0]['content']
        return 200, completion(['B'], {'B': math.log(0.75), 'A': math.log(0.25)})

    with serving(number_4) as server:
        facts = label(
            'embedded',
            'm',
            tmp_path / 'pairs',
            'sentence_pairs',
            endpoint=server.url,
            splits=('dev',),
            concurrency=4,
        )
    row = rows_of(tmp_path / 'pairs', 'dev')[0]
    assert (
        row['teacher'] == pytest.approx(sum(map(float, facts['options'][-2:])) / 2, abs=0.01)
        and {'sentence1', 'sentence2', 'score'} <= row.keys()
    )
    assert facts['splits']['dev']['agreement'] == dict(n=314, pearson=None, spearman=None)
    with serving(relevant) as server:
        label(
            'embedded',
            'm',
            tmp_path / 'ranking',
            'answer_selection',
            endpoint=server.url,
            splits=('dev',),
            concurrency=4,
        )
    row = rows_of(tmp_path / 'ranking', 'dev')[0]
    assert row['teacher'] == [0.25, 0.75] and {'Question', 'Sentence', 'Label'} <= row.keys()


def test_bad_input_is_one_sentence(reviews, tmp_path):
    (tmp_path / 'own.jinja').write_text('{{ review }}')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'thesis.txt').write_text('x')
    for given, expected in [
        (dict(prompt=tmp_path / 'own.jinja'), 'uses review'),
        (dict(prompt=tmp_path / 'none.jinja'), 'cannot be read'),
        (dict(splits=('exam',)), 'has no split exam'),
        (dict(out=tmp_path / 'full'), 'holds other files'),
        (dict(task='masked_lm', corpus='embedded'), 'no label that a language model can choose'),
        (dict(endpoint=None, model='/nowhere'), 'no text-generation model'),
    ]:
        given = (
            dict(corpus=reviews, model='m', out=tmp_path / 'out', endpoint='http://127.0.0.1:9/v1') | given
        )
        with pytest.raises(ConfigError, match=expected):
            label(**given)
    assert (tmp_path / 'full' / 'thesis.txt').read_text() == 'x'
