"""What is exported is the run's model: the same order as a reranker, the same outputs as ONNX; what 8 bits
lose is what one counts by hand.
"""

import base64
import contextlib
import hashlib
import http.server
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import numpy as np
import pytest
import torch
import transformers
from faults import files_no_larger_than
from kdnotes.cli import main
from kdnotes.core.config import task_info
from kdnotes.core.files import sha256_file
from kdnotes.distill.architectures import weights_sha256
from kdnotes.distill.models import load_model, save_model
from kdnotes.experiment import export, onnx_files
from kdnotes.experiment.export import ExportError, OnnxModel, export_model, write_onnx
from kdnotes.experiment.predict import predict
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_record, find_run_model
from kdnotes.train.distributed import Runtime

QUESTION = 'What is iron?'
CANDIDATES = ['Iron is a metal.', 'Paris is a city.', 'Gold is a metal that does not rust.', 'Iron', 'It is.']

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ('onnx', 'onnxscript', 'onnxruntime')),
    reason='the extra `export` is not installed',
)


@pytest.mark.slow
def test_a_plain_folder_is_the_runs_model(small_run, tmp_path, capsys):
    run_id = small_run('answer_selection', 'full_kd')
    record = find_record(run_id)[0]
    assert main(['export', run_id, '--to', str(tmp_path / 'out')]) == 0
    assert 'cross-encoder/model.safetensors' in capsys.readouterr().out
    made = load_model(tmp_path / 'out', 'AutoModelForSequenceClassification', 0)
    assert weights_sha256(made) == record['model_sha256']
    said = json.loads((tmp_path / 'out' / 'export.json').read_text())
    assert said['run_id'] == run_id and 'onnx' not in said
    for name, sha256 in said['files'].items():
        assert sha256_file(tmp_path / 'out' / name) == sha256
    assert predict(str(tmp_path / 'out'), question=QUESTION, candidates=CANDIDATES).answer.values == (
        predict(run_id, question=QUESTION, candidates=CANDIDATES).answer.values
    )
    # nothing is written over
    assert main(['export', run_id, '--to', str(tmp_path / 'out')]) == 2
    assert 'is no new or empty folder' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['out']


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['baseline', 'full_kd'])
@pytest.mark.filterwarnings('ignore')
def test_a_reranker_has_the_models_order_and_scores(mode, small_run, tmp_path):
    sentence_transformers = pytest.importorskip(
        'sentence_transformers', reason='it comes with the extra `bench`'
    )
    run_id = small_run('answer_selection', mode)
    export_model(run_id, str(tmp_path / 'out'))
    ranker = sentence_transformers.CrossEncoder(str(tmp_path / 'out' / 'cross-encoder'), device='cpu')
    assert ranker.num_labels == 1
    found = ranker.rank(QUESTION, CANDIDATES)
    expected = predict(run_id, 'none', question=QUESTION, candidates=CANDIDATES).answer.values['candidates']
    assert [row['corpus_id'] for row in found] == [row['place'] for row in expected]
    assert np.allclose([row['score'] for row in found], [row['score'] for row in expected], atol=1e-5)


def by_hand(run_id: str, path, split: str) -> tuple[float, float]:
    "Accuracy of the run's model and of an ONNX file, one text at a time."
    run = RunFolder('small', run_id)
    from kdnotes.experiment.worker import encoded_task
    from kdnotes.core.parse import stored_config
    from kdnotes.tasks.sources import corpus_of

    config = stored_config(run.config()['config'])
    task = encoded_task(config, corpus_of(config), Runtime(torch.device('cpu'), 'fp32'))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run.path / 'model').eval()
    quantised = OnnxModel(path, 1)
    right = np.zeros(2)
    n = len(task.lengths(split))
    for i in range(n):
        batch = task.batch(split, np.array([i]))
        with torch.no_grad():
            both = [of(**batch.inputs).logits for of in (model, quantised)]
        right += [int(of.argmax()) == int(batch.labels) for of in both]
    return tuple(right / n)


@needs_onnx
@pytest.mark.slow
def test_onnx_and_int8_are_measured_as_one_counts(small_run, tmp_path):
    run_id = small_run('text_classification')
    found = export_model(run_id, str(tmp_path / 'out'), int8=True)
    folder = tmp_path / 'out' / 'onnx'
    assert found['onnx']['largest_difference'] <= 1e-4
    for split in ('dev', 'test'):
        plain, quantised = by_hand(run_id, folder / 'model_int8.onnx', split)
        of = found['int8'][split]
        assert (of['metric'], of['fp32']) == ('accuracy', pytest.approx(plain))
        assert of['difference'] == pytest.approx(of['int8'] - of['fp32'], abs=1e-6)
        # rounding to 8 bits depends on the whole batch
        assert of['int8'] == pytest.approx(quantised, abs=0.05)
        assert of['low'] <= of['difference'] <= of['high'] and of['units'] == 48
    assert found['bytes']['model_int8.onnx'] < found['bytes']['model.onnx'] / 2
    assert set(found['latency']) == {'fp32_torch', 'fp32_onnx', 'int8_onnx'}
    assert all(ms['batch_1_ms'] > 0 for ms in found['latency'].values())
    assert json.loads((tmp_path / 'out' / 'export.json').read_text()) == json.loads(json.dumps(found))
    card = (tmp_path / 'out' / 'README.md').read_text()
    for of in found['int8'].values():
        assert f'{of["int8"]:.3f} instead of {of["fp32"]:.3f}' in card
    assert 'a score also depends on the other texts of its batch' in card
    # no time of a busy machine
    busy = found['load_average'] > 1.5 * found['threads']
    rows = re.findall(r'^\| this model \| int8, onnx \| [^|]+ \| (.*?) \|', card, re.M)
    assert rows == ['not measured' if busy else f'{found["latency"]["int8_onnx"]["batch_1_ms"]:.3g}']
    assert ('so no times are reported' in card) == busy


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize('task', ['masked_lm', 'extractive_qa', 'token_classification'])
def test_every_head_becomes_onnx(task, small_run, tmp_path):
    run_id = small_run(task)
    found = export_model(run_id, str(tmp_path / 'out'), int8=True)
    assert found['onnx']['largest_difference'] <= 1e-4
    primary = find_record(run_id)[0]['primary']
    of = found['int8'][primary['set']]
    assert of['metric'] == primary['metric'] and of['fp32'] == pytest.approx(primary['value'], abs=1e-4)


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.slow
def test_a_teacher_is_measured_beside_its_student(small_run, tmp_path, capsys):
    run_id = small_run('answer_selection', 'full_kd')
    assert main(['export', run_id, '--to', str(tmp_path / 'out'), '--onnx']) == 0
    said = capsys.readouterr()
    found = json.loads((tmp_path / 'out' / 'export.json').read_text())
    assert found['teacher']['run_id'] == find_record(run_id)[0]['teacher_run_id']
    assert set(found['teacher']['latency']) == {'fp32_torch', 'fp32_onnx'} and 'int8' not in found
    assert found['teacher']['run_id'] in said.out and 'writing ONNX' in said.err
    # what takes minutes is said before it begins, and how to leave it out
    assert f"the teacher {found['teacher']['run_id']} is measured too" in said.err
    assert (
        'teacher: measuring' in said.err
        and '--no-teacher leaves it out (in Python teacher=False)' in said.err
    )
    # nothing of the teacher is kept
    assert sorted(path.name for path in (tmp_path / 'out' / 'onnx').iterdir()) == ['model.onnx']


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.slow
def test_without_its_teacher_a_student_is_measured_alone_and_its_card_tells_how_to_use_it(
    small_run, tmp_path, capsys
):
    run_id = small_run('answer_selection', 'full_kd')
    found = json.loads(
        (
            assert_exported(capsys, run_id, tmp_path / 'out', '--onnx', '--no-teacher') / 'export.json'
        ).read_text()
    )
    assert found['teacher'] is None
    card = (tmp_path / 'out' / 'README.md').read_text()
    [code] = [part for part in re.findall(r'```python\n(.*?)\n```', card, re.S) if 'onnxruntime' in part]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('FOLDER', str(tmp_path / 'out')), {})
    asked = task_info('answer_selection').use.example
    expected = predict(run_id, 'none', **asked).answer.values['candidates']
    scores = [row['score'] for row in sorted(expected, key=lambda row: row['place'])]
    assert np.allclose(np.fromstring(printed.getvalue().strip('[]\n '), sep=' '), scores, atol=1e-4)
    # the reranker's file has the same scores, and stands where sentence_transformers looks for it
    ranker = tmp_path / 'out' / 'cross-encoder'
    assert found['cross_encoder_onnx']['largest_difference'] <= 1e-4
    assert found['files']['cross-encoder/onnx/model.onnx'] == sha256_file(ranker / 'onnx' / 'model.onnx')
    tokenizer = transformers.AutoTokenizer.from_pretrained(ranker)
    candidates = asked['candidates']
    texts = tokenizer([asked['question']] * len(candidates), candidates, padding=True, return_tensors='pt')
    one = OnnxModel(ranker / 'onnx' / 'model.onnx', 1)(**texts).logits
    assert one.shape == (len(candidates), 1) and np.allclose(one[:, 0].numpy(), scores, atol=1e-4)
    assert 'CrossEncoder("FOLDER/cross-encoder", backend="onnx")' in card
    backend = pytest.importorskip(
        'sentence_transformers.backend.utils', reason='it comes with the extra `bench`'
    )
    looked = backend.backend_should_export(ranker, True, {}, 'model.onnx', '*.onnx', 'ONNX')
    assert looked == (False, dict(subfolder='onnx', file_name='model.onnx'))


def assert_exported(capsys, run_id, folder, *more):
    "The folder of an export that went well."
    assert main(['export', run_id, '--to', str(folder), *more]) == 0
    assert 'is measured too' not in capsys.readouterr().err
    return folder


@needs_onnx
@pytest.mark.filterwarnings('ignore')
def test_an_architecture_that_no_graph_holds_is_refused_in_a_sentence(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = transformers.BertConfig(**sizes, vocab_size=20, max_position_embeddings=32)
    save_model(transformers.BertForSequenceClassification(config), tmp_path / 'm')

    write = ('AutoModelForSequenceClassification', tmp_path / 'm.onnx')
    monkeypatch.setattr(
        'torch.onnx.export', lambda *a, **k: (_ for _ in ()).throw(RuntimeError('no graph\nat all'))
    )
    with pytest.raises(ExportError) as error:
        write_onnx(tmp_path / 'm', *write)
    assert 'BertForSequenceClassification cannot be written as ONNX' in str(error.value)
    assert '(RuntimeError: no graph)' in str(error.value) and '\n' not in str(error.value)


def test_without_the_packages_their_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(onnx_files, 'NEEDED', ('onnx', 'no_such_package'))
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    assert main(['export', 'baseline-s0-0123456789ab', '--to', str(tmp_path / 'out'), '--onnx']) == 2
    said = capsys.readouterr().err
    assert 'no_such_package is not installed; run pip install "kdnotes[export]"' in said
    assert said.count('\n') == 1 and not (tmp_path / 'out').exists()


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.slow
def test_a_graph_that_gives_something_else_is_not_kept(small_run, tmp_path, monkeypatch):
    run_id = small_run('text_classification')
    monkeypatch.setattr(export, 'TOLERANCE', 0.0)
    with pytest.raises(ExportError, match='gives other outputs than the model'):
        export_model(run_id, str(tmp_path / 'out'), onnx=True)
    assert list(tmp_path.iterdir()) == []


@needs_onnx
@pytest.mark.exhaustive
@pytest.mark.filterwarnings('ignore')
def test_a_disk_that_is_full_is_told_and_leaves_no_folder(small_run, tmp_path, capsys):
    run_id = small_run('text_classification')
    size = (find_run_model(run_id) / 'model.safetensors').stat().st_size
    for room in (size // 2, size + 2**12):  # for half of the weights; for them, and not for a graph beside
        with files_no_larger_than(room):
            assert main(['export', run_id, '--to', str(tmp_path / 'out'), '--onnx', '--no-teacher']) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert str(tmp_path) in said and 'start the same command again' in said and 'as ONNX by' not in said
        assert list(tmp_path.iterdir()) == []


KILLED = '''
import os, signal, sys, torch
from kdnotes.cli import main
from kdnotes.core.parse import stored_config

def dies(model, f, **more):
    f.write_bytes(b'the beginning')
    os.kill(os.getpid(), signal.SIGKILL)

torch.onnx.export = dies
main(['export', sys.argv[1], '--to', sys.argv[2], '--onnx', '--no-teacher'])
'''


@pytest.mark.exhaustive
@needs_onnx
@pytest.mark.slow
def test_a_kill_while_onnx_is_written_leaves_no_half_folder_and_nothing_for_good(small_run, tmp_path):
    run_id = small_run('text_classification')
    done = subprocess.run([sys.executable, '-c', KILLED, run_id, str(tmp_path / 'out')], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    [left] = tmp_path.iterdir()  # of a process that is gone
    alive = tmp_path / f'.out-{os.getpid()}-abc'
    alive.mkdir()
    assert left.name.startswith('.out-') and list(left.rglob('model.onnx'))
    export_model(run_id, str(tmp_path / 'out'))
    assert sorted(tmp_path.iterdir()) == sorted([alive, tmp_path / 'out'])


# ---- the hub ----


class Hub(http.server.BaseHTTPRequestHandler):
    "A stand-in that takes small files into one commit and keeps what it was sent."

    def log_message(self, *_):
        pass

    def answer(self, obj: dict) -> None:
        content = json.dumps(obj).encode()
        self.send_response(200)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        self.server.asked.append((self.path, body, self.headers.get('Authorization')))
        if self.server.breaks and '/commit/' in self.path:
            return self.server.breaks(self)
        address = f'http://127.0.0.1:{self.server.server_port}/me/mine'
        if self.path.endswith('/preupload/main'):
            files = json.loads(body)['files']
            modes = [dict(path=f['path'], uploadMode='regular', shouldIgnore=False) for f in files]
            self.answer(dict(files=modes))
        elif '/commit/' in self.path:
            self.answer(dict(commitUrl=f'{address}/commit/c0ffee', commitOid='c0ffee', success=True))
        else:
            self.answer(dict(url=address, name='me/mine', warnings=[], errors=[]))


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.asked = []
    server.breaks = None  # what happens instead of a commit
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', f'http://127.0.0.1:{server.server_port}')
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setenv('HF_TOKEN', 'hf_not_a_token')
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_what_is_pushed_is_what_is_exported_and_nothing_without_yes(small_run, hub, monkeypatch, capsys):
    run_id = small_run('text_classification')
    monkeypatch.delenv('HF_HUB_OFFLINE')
    assert main(['push', run_id, 'me/mine']) == 2
    assert 'nothing was sent' in capsys.readouterr().err and hub.asked == []
    assert main(['push', run_id, 'me/mine', '--yes']) == 0
    assert capsys.readouterr().out.strip().endswith('/commit/c0ffee')
    made = json.loads(next(body for path, body, _ in hub.asked if path.endswith('/repos/create')))
    assert made.get('private') or made.get('visibility') == 'private'
    commit = next(body for path, body, _ in hub.asked if '/commit/' in path)
    lines = [json.loads(line) for line in commit.splitlines()]
    files = {line['value']['path']: line['value'] for line in lines if line['key'] == 'file'}
    wanted = {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}
    assert set(files) == wanted | {'export.json'}
    said = json.loads(base64.b64decode(files['export.json']['content']))
    for name in wanted:
        content = base64.b64decode(files[name]['content'])
        assert hashlib.sha256(content).hexdigest() == said['files'][name]


def hangs_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def refuses(handler):
    handler.send_response(403)
    handler.send_header('Content-Length', '0')
    handler.end_headers()


def talks_nonsense(handler):
    handler.send_response(200)
    handler.send_header('Content-Length', '5')
    handler.end_headers()
    handler.wfile.write(b'<html')


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_a_push_that_fails_half_way_says_so_and_can_be_done_again(small_run, hub, monkeypatch, capsys):
    run_id = small_run('text_classification')
    monkeypatch.delenv('HF_HUB_OFFLINE')
    monkeypatch.setattr('huggingface_hub.utils._http.time.sleep', lambda seconds: None)
    before = files_under(find_run_model(run_id).parent)
    for breaks, told in (
        (hangs_up, 'holds all of them or none: start the same command again'),
        (talks_nonsense, 'holds all of them or none: start the same command again'),
        (refuses, 'log in with `hf auth login`'),
    ):
        hub.breaks = breaks
        assert main(['push', run_id, 'me/mine', '--yes']) == 2
        said = capsys.readouterr()
        assert (
            'me/mine could not be written' in said.err.splitlines()[-1] and told in said.err.splitlines()[-1]
        )
        assert 'Traceback' not in said.err and said.out == ''
    assert files_under(find_run_model(run_id).parent) == before
    hub.breaks = None
    assert main(['push', run_id, 'me/mine', '--yes']) == 0


def files_under(folder) -> dict[str, str]:
    return {str(path): sha256_file(path) for path in folder.rglob('*') if path.is_file()}
