"""A language model as teacher: a service on this machine that answers, stalls, fails and lies, and a tiny
model of transformers.
"""

import contextlib
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
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from architectures import WORDS, small_bert, write_teacher
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.processes import EXIT_STOPPED
from kdnotes.distill.scores import read_scores
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM
from kdnotes.experiment.launch import run
from kdnotes.experiment.plan import plan
from kdnotes.labelling.label import ANSWERS, label, stored_answers
from kdnotes.core.columns import Columns
from kdnotes.labelling.prompts import Options, find_options, load_prompt, prompts, read_answer
from kdnotes.labelling.services import KEY, LabelError, LocalModel
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
            if status in (429, 500):
                self.send_header('Retry-After-Ms', '1')
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


def scores_of(folder):
    "The scores that a student of a labelled corpus learns from."
    of_teacher = dict(columns='teacher=teacher', teacher_mode='scores', scores_are='probabilities')
    given = dict(task='text_classification', mode='full_kd', corpus=str(folder), smoke=True)
    config = plan(make_config(**given, **of_teacher)).config
    corpus = load_corpus('text_classification', str(folder), 'teacher=teacher')
    return read_scores(make_task(config, corpus), corpus, config)


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
    before = load_corpus('text_classification', str(reviews))
    after = load_corpus('text_classification', str(out), 'teacher=teacher')
    for split in ('train', 'dev', 'test'):
        assert list(after.splits[split]['text']) == list(before.splits[split]['text'])
        assert list(after.splits[split]['label']) == list(before.splits[split]['label'])
    scores = scores_of(out)
    p = np.exp(scores.logits['train'])
    assert p.sum(axis=1) == pytest.approx(1, abs=1e-4) and p.max(axis=1) == pytest.approx(
        0.9 / 0.98, abs=1e-4
    )


def test_samples_where_there_are_no_log_probabilities(reviews, tmp_path):
    given = dict(out=tmp_path / 'out', splits=('dev',), samples=6, concurrency=1)
    with serving(samples_only) as server:
        facts = label(reviews, 'm', endpoint=server.url, **given)
        assert len(server.calls) == 1 + 8 * 6
        again = label(reviews, 'm', endpoint=server.url, max_calls=0, **given)
        assert len(server.calls) == 1 + 8 * 6 and again['splits'] == facts['splits']
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
        calls=24, answers=8, failures=0, tokens_in=400, tokens_out=8, cost=None, seconds=0
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
        free = label(reviews, 'm', max_cost=0, price=(0, 0), **given)
        assert free['used']['cost'] == 0 and len(server.calls) == 56


def test_the_cost_that_the_service_counts_is_bounded(reviews, tmp_path):
    def long(*call):  # more tokens than were estimated
        return 200, right(*call)[1] | dict(
            usage=dict(prompt_tokens=500, completion_tokens=1, total_tokens=501)
        )

    with serving(long) as server:
        given = dict(endpoint=server.url, concurrency=1, splits=('train', 'unlabelled'))
        with pytest.raises(LabelError, match='is reached'):
            label(reviews, 'm', tmp_path / 'out', max_cost=0.004, price=(1, 1), **given)
        assert 0 < len(stored_answers(tmp_path / 'out')) == len(server.calls) < 56


def test_what_is_in_flight_when_a_bound_is_reached_is_stored_and_counts_for_the_next_command(
    reviews, tmp_path
):
    def long(*call):
        time.sleep(0.05)
        usage = dict(prompt_tokens=500, completion_tokens=1, total_tokens=501)
        return 200, right(*call)[1] | dict(usage=usage)

    given = dict(out=tmp_path / 'out', max_cost=0.004, price=(1, 1))
    with serving(long) as server:
        with pytest.raises(LabelError, match='max_cost=0.004 is reached'):
            label(reviews, 'm', endpoint=server.url, **given)
        sent = len(server.calls)
        assert 8 < sent == len(stored_answers(tmp_path / 'out')) <= 8 + 8
        with pytest.raises(
            LabelError, match=f'{sent} more are answered already, which cost .*max_cost=0.004'
        ):
            label(reviews, 'm', endpoint=server.url, **given)
        assert len(server.calls) == sent
        raised = given | dict(max_cost=0.01)
        with pytest.raises(LabelError, match='max_cost=0.01 is reached'):
            label(reviews, 'm', endpoint=server.url, **raised, concurrency=1)
        assert len(server.calls) == 20  # of 501 tokens each
        facts = label(reviews, 'm', endpoint=server.url, **given | dict(max_cost=1))
        # nothing is sent any more, so no bound is exceeded
        assert label(reviews, 'm', endpoint=server.url, **given)['splits'] == facts['splits']


def test_unreadable_answers_in_flight_are_stored(reviews, tmp_path):
    def chatter(number, request):
        time.sleep(0.05)
        return 200, completion(['Das gefällt mir.'], {'Das': -0.01})

    with serving(chatter) as server:
        with pytest.raises(LabelError, match='none of the first 20 answers'):
            label(reviews, 'm', tmp_path / 'out', endpoint=server.url)
        assert 20 < len(server.calls) == len(stored_answers(tmp_path / 'out')) <= 20 + 8


def test_tokens_that_a_service_does_not_count_are_estimated(reviews, tmp_path):
    given = dict(out=tmp_path / 'out', price=(1, 2))
    with serving(lambda *call: (200, right(*call)[1] | dict(usage=None))) as server:
        given |= dict(endpoint=server.url)
        expected = label(reviews, 'm', splits=('dev',), dry_run=True, **given)
        used = label(reviews, 'm', splits=('dev',), **given)['used']
        assert {name: used[name] for name in ('tokens_in', 'tokens_out', 'cost')} == {
            name: expected[name] for name in ('tokens_in', 'tokens_out', 'cost')
        }
        assert used['tokens_out'] == 8 * 16
        both = dict(splits=('dev', 'test'), max_cost=1.5 * used['cost'])
        with pytest.raises(LabelError, match='8 more are answered already, which cost'):
            label(reviews, 'm', **both, **given)
        assert len(server.calls) == 8


def test_another_service_is_asked_about_a_model_of_the_same_name(reviews, tmp_path):
    given = dict(out=tmp_path / 'out', splits=('dev',))
    with serving(right) as first, serving(right) as second:
        label(reviews, 'm', endpoint=first.url, **given)
        facts = label(reviews, 'm', endpoint=second.url, **given)
        assert len(first.calls) == len(second.calls) == 8 and facts['endpoint'] == second.url
        label(reviews, 'm', endpoint=first.url.replace('//', '//me:secret@') + '/', max_calls=0, **given)
        assert len(first.calls) == 8


def test_one_refused_sample_leaves_the_others(reviews, tmp_path):
    def filtered(number, request):
        if 'logprobs' in request:
            return 400, dict(error=dict(message='logprobs is not supported'))
        text = request['messages'][0]['content']
        body = completion(['A'] + 2 * [truth(text)])
        for choice in body['choices'][: 3 if 'too long' in text else 1]:
            choice['finish_reason'] = 'content_filter'
        return 200, body

    with serving(filtered) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=3)
    assert facts['splits']['dev']['labelled'] == 6 and facts['splits']['dev']['refused'] == 2
    good = [row for row in rows_of(tmp_path / 'out', 'dev') if 'good' in row['text']]
    assert good[0]['teacher'] == pytest.approx([0.5 / 3, 2.5 / 3], abs=1e-5)


@pytest.mark.parametrize('key', ['A', 'EMPTY'])
def test_a_word_in_place_of_a_key_masks_nothing(reviews, tmp_path, monkeypatch, key):
    monkeypatch.setenv(KEY, key)

    def behaviour(number, request):
        return 200, completion([f'{truth(request["messages"][0]["content"])}. Not EMPTY.'])

    with serving(behaviour) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=1)
    assert facts['splits']['dev']['labelled'] == 8
    assert b'***' not in (tmp_path / 'out' / ANSWERS).read_bytes()


@pytest.mark.parametrize(
    'text, answer',
    {
        'This is not positive.': None,
        'not positive at all': None,
        'The answer is not positive.': None,
        'I doubt that the label is positive.': None,
        'Is it positive? No.': None,
        'positive': 1,
        '"Positive."': 1,
        '**negative**': 0,
        'The film moves slowly. The classification is: **Negative**.': 0,
        'It moves.\n\nAnswer:\npositive': 1,
    }.items(),
)
def test_a_name_inside_a_sentence_is_no_answer(text, answer):
    assert read_answer(text, Options(('negative', 'positive'))) == answer


@pytest.mark.parametrize(
    'ends, names',
    [
        (('1000', '1001'), ('1000', '1000.2', '1000.4', '1000.6', '1000.8', '1001')),
        (('1900', '2020'), ('1900', '1924', '1948', '1972', '1996', '2020')),
        (('0', '5'), ('0', '1', '2', '3', '4', '5')),
        (('0', '2e7'), ('0', '4000000', '8000000', '12000000', '16000000', '20000000')),
    ],
)
def test_steps_of_a_scale_have_different_names(ends, names):
    rows = Columns.from_rows([dict(label=end) for end in ends])
    assert find_options('text_classification', rows, 'number').names == names


def test_a_dry_run_loads_no_model(reviews, tmp_path):
    estimate = label(reviews, '/nowhere', tmp_path / 'out', dry_run=True)
    assert estimate['prompts'] == estimate['calls'] == 56 and not (tmp_path / 'out').exists()


def test_an_option_that_only_a_service_uses_is_refused(reviews, tmp_path, capsys):
    words = ['label', str(reviews), '--model', '/nowhere', '--out', str(tmp_path / 'out'), '--dry-run']
    assert main(words) == 0
    options = dict(samples=2, concurrency=2, max_tokens=9, timeout_s=9, retries=1, price='1,2')
    for name, value in options.items():
        assert main([*words, f'--{name.replace("_", "-")}', str(value)]) == 2
        assert f'{name} can only be used with a service' in capsys.readouterr().err


def test_retries_count_as_calls(reviews, tmp_path):
    "`max_calls` bounds what is sent; what was answered until then is stored."
    with serving(lambda number, request: (500, {}) if number % 2 else right(number, request)) as server:
        with pytest.raises(LabelError, match='max_calls=10 is reached, retries included'):
            label(
                reviews,
                'm',
                tmp_path / 'out',
                endpoint=server.url,
                splits=('dev',),
                max_calls=10,
                concurrency=1,
            )
        assert len(server.calls) == 10 and len(stored_answers(tmp_path / 'out')) == 5


def test_an_estimate_is_shown_before_anything_is_sent(reviews, tmp_path, capsys):
    with serving(right) as server:
        words = [
            'label',
            str(reviews),
            '--model',
            'm',
            '--out',
            str(tmp_path / 'out'),
            '--endpoint',
            server.url,
        ]
        words += ['--price', '1,2']
        assert main([*words, '--dry-run']) == 0
        expected = capsys.readouterr().out
        assert not server.calls and not (tmp_path / 'out').exists()
        assert '56 prompts may take 56 calls' in expected and 'which cost about' in expected
        assert '8 times as much if the service gives no log-probabilities' in expected
        assert main([*words, '--max-calls', '55', '--retries', '0']) == 2 and not server.calls
        capsys.readouterr()
        assert main([*words, '--max-calls', '56', '--retries', '0']) == 0
        assert capsys.readouterr().out.startswith(expected)
        assert main([*words, '--dry-run', '--json']) == 0
        estimate = json.loads(capsys.readouterr().out)
        assert estimate['prompts'] == estimate['cost'] == 0 and estimate['stored'] == 56
        assert len(server.calls) == 56


def refuses(parameter, words):
    "A service that refuses a parameter, as some do."

    def behaviour(number, request):
        if parameter in request and (parameter != 'n' or request['n'] > 1):
            return 400, dict(error=dict(message=words))
        content = request['messages'][0]['content']
        return right(number, request) if 'logprobs' in request else (200, completion([truth(content)]))

    return behaviour


@pytest.mark.parametrize(
    'parameter, words, calls',
    [
        ('max_tokens', "'max_tokens' is not supported with this model; use 'max_completion_tokens'", 9),
        ('temperature', "'temperature' does not support 0 with this model", 9),
        ('top_logprobs', 'top_logprobs is not supported', 2 + 8 * 2),  # also not five of them
    ],
)
def test_what_services_differ_in_is_learned_from_their_refusals(reviews, tmp_path, parameter, words, calls):
    with serving(refuses(parameter, words)) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=2)
        assert len(server.calls) == calls
    assert facts['splits']['dev']['agreement']['accuracy'] == 1.0


@pytest.mark.parametrize('at_once', [8, 3, 1])
def test_samples_of_one_call_share_its_prompt_in_the_estimate(at_once, reviews, tmp_path):
    "A service that gives up to so many answers per call; the limits are compared with what it takes."

    def behaviour(number, request):
        if 'logprobs' in request:
            return 400, dict(error=dict(message='logprobs is not supported'))
        return 200, completion([truth(request['messages'][0]['content'])] * min(request['n'], at_once))

    estimates = []
    calls = -(-8 // at_once)
    given = dict(splits=('dev',), on_estimate=estimates.append, concurrency=1)
    with serving(behaviour) as server:
        label(reviews, 'm', tmp_path / 'out', endpoint=server.url, **given)
        assert len(server.calls) == 1 + 8 * calls
    first, second = estimates
    assert first['calls'] == 8 and first['samples'] == 8  # at most 8 times as much
    assert second['calls'] == 7 * calls and second['samples'] == 1
    assert second['tokens_in'] == pytest.approx(first['tokens_in'] * 7 / 8 * calls, rel=0.1)
    assert second['tokens_out'] == 7 * 8 * 16


def test_one_answer_per_call_where_a_service_refuses_more(reviews, tmp_path):
    def behaviour(number, request):
        if 'logprobs' in request:
            return 403, dict(error=dict(message='You are not allowed to request logprobs from this model'))
        return refuses('n', 'number must be at most 1')(number, request)

    with serving(behaviour) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=3)
        assert len(server.calls) == 2 + 8 * 3
    assert facts['method'] == '3 samples' and facts['splits']['dev']['labelled'] == 8


def spoken(tokens, **top):
    "A completion of several tokens; the last one has the log-probabilities."
    body = completion([''.join(tokens)])
    content = [dict(token=token, logprob=0, bytes=None, top_logprobs=[]) for token in tokens]
    content[-1]['top_logprobs'] = [
        dict(token=token, logprob=math.log(p), bytes=None) for token, p in top.items()
    ]
    body['choices'][0]['logprobs'] = dict(content=content)
    return 200, body


def test_log_probabilities_are_those_of_the_answer_and_not_of_the_thoughts(reviews, tmp_path):
    def thinks(number, request):
        text = request['messages'][0]['content']
        if 'too long' in text:
            return spoken(['A', ' film', ' I', ' liked'], liked=1.0)
        return spoken(['<think>', 'A?', '</think>', '\n\n', 'B'], B=0.8, A=0.2)

    with serving(thinks) as server:
        label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('train',))
    rows = rows_of(tmp_path / 'out', 'train')
    assert len(rows) == 18 and {tuple(row['teacher']) for row in rows} == {(0.2, 0.8)}


def test_an_answer_without_a_code_of_one_token_is_sampled(reviews, tmp_path):
    def by_name(number, request):
        name = dict(A='Negative', B='Positive')[truth(request['messages'][0]['content'])]
        return spoken([name[:3], name[3:]], tive=1.0)

    with serving(by_name) as server:
        facts = label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',), samples=2)
        assert len(server.calls) == 1 + 8 * 2
    assert facts['method'] == '2 samples' and facts['splits']['dev']['agreement']['accuracy'] == 1.0


def test_answers_that_were_cut_are_asked_again_with_more_tokens(reviews, tmp_path):
    def long(number, request):
        cut = request['max_tokens'] < 100 and 'too long' in request['messages'][0]['content']
        return (
            (200, completion(['<think>positive'], {'<think>': 0.0}, 'length'))
            if cut
            else right(number, request)
        )

    given = dict(out=tmp_path / 'out', splits=('dev',))
    with serving(long) as server:
        first = label(reviews, 'm', endpoint=server.url, **given)
        assert first['splits']['dev']['unparsable'] == 2
        second = label(reviews, 'm', endpoint=server.url, max_tokens=200, **given)
        assert len(server.calls) == 8 + 2 and second['splits']['dev']['unparsable'] == 0


def test_a_service_of_another_language_is_stopped_early(reviews, tmp_path):
    "All of its answers are stored; the first of them are enough to see it."
    with serving(lambda *_: (200, completion(['Das gefällt mir.'], {'Das': -0.01}))) as server:
        with pytest.raises(LabelError, match='none of the first 20 answers .*Das gefällt mir'):
            label(reviews, 'm', tmp_path / 'out', endpoint=server.url, concurrency=1)
        assert 20 <= len(server.calls) <= 21
        with pytest.raises(LabelError, match=r'no row of train was labelled \(24 unparsable\)'):
            for _ in range(3):
                with contextlib.suppress(LabelError):
                    label(reviews, 'm', tmp_path / 'out', endpoint=server.url, concurrency=1)
            label(reviews, 'm', tmp_path / 'out', endpoint=server.url)
    assert not (tmp_path / 'out' / 'train.jsonl').exists()


def test_ctrl_c_does_not_wait_for_a_service_that_stalls(reviews, tmp_path):
    answered = threading.Event()

    def stalls(number, request):
        if number > 5:
            answered.wait(300)
        return right(number, request)

    words = ['label', str(reviews), '--model', 'm', '--out', str(tmp_path / 'out'), '--concurrency', '2']
    with serving(stalls) as server:
        command = [sys.executable, '-m', 'kdnotes', *words, '--endpoint', server.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(server.calls) < 7:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        answered.set()
    assert process.returncode == EXIT_STOPPED and 'stopped' in errors and 'Traceback' not in errors
    assert len(stored_answers(tmp_path / 'out')) == 5


@pytest.fixture
def tickets(tmp_path):
    "A file of texts without labels."
    path = tmp_path / 'tickets.csv'
    kinds = ['invoice is wrong', 'app crashes', 'when do you open']
    rows = [f'{kinds[i % 3]}, number {i}' for i in range(60)]
    path.write_text('message\n' + ''.join(f'"{row}"\n' for row in rows))
    return path


def kind(number, request):
    "A: billing, B: bug, C: other, D: praise."
    text = request['messages'][0]['content']
    answer = 'A' if 'invoice' in text else 'B' if 'crashes' in text else 'C'
    assert 'D: praise' in text
    rest = dict.fromkeys(set('ABCD') - {answer}, math.log(0.1))
    return 200, completion([answer], {answer: math.log(0.7)} | rest)


def test_a_file_of_texts_without_labels_becomes_a_corpus(tickets, tmp_path, monkeypatch, capsys):
    "The model's own labels; a class that it never chooses is left out."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    out = tmp_path / 'out'
    with serving(kind) as server:
        words = ['label', str(tickets), '--columns', 'text=message', '--classes', 'billing,bug,other,praise']
        assert main([*words, '--model', 'm', '--endpoint', server.url, '--out', str(out)]) == 0
    assert 'no row of train was labelled praise' in capsys.readouterr().out
    rows = {split: rows_of(out, split) for split in ('train', 'dev', 'test')}
    assert {split: len(part) for split, part in rows.items()} == dict(train=48, dev=6, test=6)
    for row in [row for part in rows.values() for row in part]:
        expected = 'billing' if 'invoice' in row['text'] else 'bug' if 'crashes' in row['text'] else 'other'
        assert row['label'] == expected
        assert row['teacher'] == pytest.approx(
            [0.7 / 0.9 if c == expected else 0.1 / 0.9 for c in ('billing', 'bug', 'other')], abs=1e-5
        )
    scores = scores_of(out)
    assert np.exp(scores.logits['train']).max(axis=1) == pytest.approx(0.7 / 0.9, abs=1e-5)


def test_questions_and_pairs_without_labels(tmp_path):
    pairs = tmp_path / 'pairs.csv'
    pairs.write_text('question,sentence\n' + ''.join(f'q{i // 3},s{i}\n' for i in range(60)))
    with serving(lambda *_: (200, completion(['B'], {'B': math.log(0.75), 'A': math.log(0.25)}))) as server:
        label(pairs, 'm', tmp_path / 'ranking', 'answer_selection', endpoint=server.url)
        scale = dict(columns='text=question,second=sentence', classes=['0', '5'], endpoint=server.url)
        label(pairs, 'm', tmp_path / 'numbers', 'sentence_pairs', **scale)
    rows = {split: rows_of(tmp_path / 'ranking', split) for split in ('train', 'dev', 'test')}
    assert {(row['Label'], tuple(row['teacher'])) for row in rows['train']} == {(1, (0.25, 0.75))}
    questions = [{row['Question'] for row in part} for part in rows.values()]
    assert [len(part) for part in questions] == [16, 2, 2] and len(set.union(*questions)) == 20
    row = rows_of(tmp_path / 'numbers', 'dev')[0]
    assert row['score'] == row['teacher'] == pytest.approx(0.75, abs=0.01)


def test_files_of_texts_that_cannot_be_labelled(tickets, tmp_path):
    given = dict(out=tmp_path / 'out', endpoint='http://127.0.0.1:9/v1', columns='text=message')
    with pytest.raises(ConfigError, match='has no labels; name the classes'):
        label(tickets, 'm', **given)
    with pytest.raises(ConfigError, match='all of its splits are labelled'):
        label(tickets, 'm', classes=['a', 'b'], splits=('dev',), **given)
    with serving(lambda *_: (200, completion(['A'], {'A': 0.0}))) as server:
        with pytest.raises(LabelError, match='answers a for all 48 rows of train'):
            label(tickets, 'm', classes=['a', 'b'], **given | dict(endpoint=server.url))


def test_the_key_is_sent_and_stored_nowhere(reviews, tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv(KEY, 'a-secret-key')
    with serving(right) as server:
        label(reviews, 'm', tmp_path / 'out', endpoint=server.url, splits=('dev',))
        assert {headers['Authorization'] for headers, _ in server.calls} == {'Bearer a-secret-key'}

    def repeats(number, request):
        return 200, completion([f'{truth(request["messages"][0]["content"])}. Your key is a-secret-key'])

    with serving(repeats) as server:
        address = server.url.replace('//', '//someone:a-p@ssword@')
        label(reviews, 'repeats', tmp_path / 'out', endpoint=address, splits=('dev',))
    with serving(lambda *_: (500, dict(error=dict(message='a-secret-key is odd')))) as server:
        with pytest.raises(LabelError) as error:
            label(reviews, 'other', tmp_path / 'out', endpoint=server.url, splits=('dev',), retries=0)
    assert 'a-secret-key' not in str(error.value) and '*** is odd' in str(error.value)
    written = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert {'answers.jsonl', 'label.json', 'dev.jsonl'} <= {path.name for path in written}
    for secret in (b'a-secret-key', b'a-p', b'ssword'):
        assert [path for path in written if secret in path.read_bytes()] == []
    assert b'Your key is ***' in (tmp_path / 'out' / ANSWERS).read_bytes()


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
        facts = label(reviews, 'm', out, endpoint=server.url, concurrency=2, price=(1, 1))
        assert 56 <= len(server.calls) <= 56 + 2 * 2
    assert len(stored_answers(out)) == 56 and len((out / ANSWERS).read_text().splitlines()) == 56
    assert facts['total'] == dict(answers=56, tokens_in=56 * 50, tokens_out=56, cost=56 * 51 / 1e6)
    assert facts['used']['answers'] < 56


def tiny_causal(folder, bias=0.25):
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
        network.lm_head.weight[-2:] += bias
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


def test_a_local_model_that_answers_no_code_is_refused_by_their_probability(reviews, tmp_path):
    model = tiny_causal(tmp_path / 'model', bias=-0.25)
    expected = (
        'the codes A, B have less than 1% of the probability together, for each of the first 20 prompts'
    )
    with pytest.raises(LabelError, match=expected) as refused:
        label(reviews, str(model), tmp_path / 'out')
    assert 'names one of the options' not in str(refused.value)


def test_codes_of_a_tokenizer_without_capitals(reviews, tmp_path):
    "BERT's tokenizer reads A as a; a causal model with random weights."
    tokenizer = load_tokenizer(MINILM)
    tokenizer.save_pretrained(tmp_path / 'model')
    size = dict(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    network = BertLMHeadModel(BertConfig(**size, intermediate_size=8, is_decoder=True))
    network.save_pretrained(tmp_path / 'model')
    codes = LocalModel(str(tmp_path / 'model'), Options(('bad', 'good')))._codes
    assert codes == dict(zip('AB', tokenizer.convert_tokens_to_ids(['a', 'b'])))


def test_ranking_and_numbers(tmp_path):
    def number_4(number, request):
        text = request['messages'][0]['content']
        assert 'First sentence:' in text
        return 200, completion(['E'], {'E': math.log(0.5), 'F': math.log(0.5)})

    def relevant(number, request):
        assert 'Does the sentence answer the question?' in request['messages'][0]['content']
        return 200, completion(['B'], {'B': math.log(0.75), 'A': math.log(0.25)})

    def labelled(task, behaviour):
        with serving(behaviour) as server:
            out = tmp_path / task
            facts = label('embedded', 'm', out, task, endpoint=server.url, splits=('dev',), concurrency=4)
        return facts, rows_of(out, 'dev')[0]

    facts, row = labelled('sentence_pairs', number_4)
    assert row['teacher'] == pytest.approx(sum(map(float, facts['options'][-2:])) / 2, abs=0.01)
    assert {'sentence1', 'sentence2', 'score'} <= row.keys()
    assert facts['splits']['dev']['agreement'] == dict(n=314, pearson=None, spearman=None)
    _, row = labelled('answer_selection', relevant)
    assert row['teacher'] == [0.25, 0.75] and {'Question', 'Sentence', 'Label'} <= row.keys()


def test_bad_input_is_one_sentence(reviews, tmp_path):
    (tmp_path / 'own.jinja').write_text('{{ review }}')
    (tmp_path / 'constant.jinja').write_text('Which mood? {{ options }}')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'thesis.txt').write_text('x')
    for given, expected in [
        (dict(prompt=tmp_path / 'own.jinja'), 'uses review'),
        (dict(prompt=tmp_path / 'none.jinja'), 'cannot be read'),
        (dict(splits=('exam',)), 'has no split exam'),
        (dict(out=tmp_path / 'full'), 'holds other files'),
        (dict(task='masked_lm', corpus='embedded'), 'no label that a language model can choose'),
        (dict(endpoint=None, model='/nowhere'), 'no text-generation model'),
        (dict(endpoint='localhost:9/v1'), 'begins with http'),
        (dict(classes=['good', 'bad']), 'has labels; leave it out'),
        (dict(prompt=tmp_path / 'constant.jinja'), 'uses no text of a row'),
        (
            dict(endpoint=None, samples=3, price=(1, 1)),
            'samples, price can only be used with a service; .*them',
        ),
        (dict(endpoint=None, max_cost=1), 'max_cost can only be used with a service; .* leave it out'),
    ]:
        given = (
            dict(corpus=reviews, model='m', out=tmp_path / 'out', endpoint='http://127.0.0.1:9/v1') | given
        )
        with pytest.raises(ConfigError, match=expected):
            label(**given)
    assert (tmp_path / 'full' / 'thesis.txt').read_text() == 'x'
