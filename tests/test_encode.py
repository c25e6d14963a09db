"""Texts as vectors: a run, its exported folder, ONNX and sentence-transformers give equal ones; what a folder
says of pooling, length and prefixes is obeyed; files are written whole.
"""

import importlib.util
import json
import re
from pathlib import Path
import numpy as np
import pandas as pd
import pytest
from small_runs import small_model
from kdnotes.api import load_run
from kdnotes.cli import main
from kdnotes.core.config import ConfigError
from kdnotes.core.files import write_json
from kdnotes.distill.models import FrozenEncoder
from kdnotes.distill.pooling import EmbeddingRules, embedding_rules, write_sentence_transformer
from kdnotes.distill.weights import ModelError
from kdnotes.experiment.encode import embed_file, load_encoder
from kdnotes.experiment.export import export_model
from kdnotes.experiment.predict import PredictError, predict
from kdnotes.tasks.retrieval_metrics import similarity_units

TEXTS = ['What is iron?', 'Iron is a metal that rusts in moist air.', 'Paris', 'so long a text ' * 40]

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec('sentence_transformers') is None, reason='the peer is in the extra `bench`'
)
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ('onnx', 'onnxscript', 'onnxruntime')),
    reason='the extra `export` is not installed',
)


def peer_of(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device='cpu')


@pytest.fixture
def folder(tmp_path):
    return small_model(tmp_path / 'model')


@needs_peer
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'rules',
    [EmbeddingRules(max_length=24), EmbeddingRules(False, 'find: ', 'this is ', 40)],
    ids=['plain', 'prefixes'],
)
def test_sentence_transformers_reads_our_folder_and_we_read_its(rules, home, folder, tmp_path):
    width = json.loads((folder / 'config.json').read_text())['hidden_size']
    write_sentence_transformer(folder, width, rules)
    peer = peer_of(folder)
    assert peer.max_seq_length == rules.max_length
    peer.save(str(tmp_path / 'again'))
    texts, queries = peer.encode_document(TEXTS), peer.encode_query(TEXTS)
    assert np.allclose(np.linalg.norm(texts, axis=1), 1) == rules.normalize
    assert np.allclose(texts, queries) == (rules.prefix_query == rules.prefix_text)
    for source in (folder, tmp_path / 'again'):
        encoder = load_encoder(str(source))
        np.testing.assert_allclose(encoder.embed(TEXTS), texts, rtol=0, atol=1e-6)
        np.testing.assert_allclose(encoder.embed(TEXTS, query=True), queries, rtol=0, atol=1e-6)
        np.testing.assert_allclose(encoder.embed(TEXTS[0]), texts[0], rtol=0, atol=1e-6)
    lengths = np.linalg.norm(encoder.embed(TEXTS, normalize=True), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-6)


@needs_peer
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_a_run_and_its_exported_folder_give_equal_vectors(small_run, tmp_path, capsys):
    run = load_run(small_run('embeddings', 'full_kd'))
    exported = export_model(run.run_id, str(tmp_path / 'out'))
    assert exported['sentence_transformer'] and 'modules.json' in exported['files']
    assert embedding_rules(tmp_path / 'out').max_length == run.record['settings']['max_length']
    vectors = run.embed(TEXTS)
    np.testing.assert_array_equal(load_encoder(str(tmp_path / 'out')).embed(TEXTS), vectors)
    np.testing.assert_allclose(peer_of(tmp_path / 'out').encode(TEXTS), vectors, rtol=0, atol=1e-6)
    assert 'sentence_transformers.SentenceTransformer' in (tmp_path / 'out' / 'README.md').read_text()
    asked = dict(question=TEXTS[0], candidates=TEXTS[1:])
    answer = predict(str(tmp_path / 'out'), **asked).answer
    assert answer.values == predict(run.run_id, 'none', **asked).answer.values
    similarities = [row['similarity'] for row in sorted(answer.values['texts'], key=lambda row: row['place'])]
    np.testing.assert_allclose(similarities, vectors[1:] @ run.embed(TEXTS[0], query=True), atol=1e-6)
    assert answer.lines[0].startswith('1. ')
    with pytest.raises(ConfigError, match='is not trained to give embeddings'):
        load_run(small_run('text_classification')).embed(TEXTS)


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_onnx_gives_equal_vectors_and_8_bits_similar_ones(home, folder):
    vectors = load_encoder(str(folder)).embed(TEXTS)
    np.testing.assert_allclose(load_encoder(str(folder), 'onnx').embed(TEXTS), vectors, rtol=0, atol=1e-5)
    rounded = load_encoder(str(folder), 'int8').embed(TEXTS)
    cosines = (rounded * vectors).sum(1)
    assert cosines.min() > 0.9 and np.abs(rounded - vectors).max() > 1e-4


@needs_peer
@pytest.mark.filterwarnings('ignore')
def test_similarity_equals_that_of_the_peers_evaluator(home, folder):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    rng = np.random.default_rng(0)
    words = 'iron gold water air metal river stone light dark old new heavy'.split()
    first, second = ([' '.join(rng.choice(words, 6)) for _ in range(60)] for _ in range(2))
    scores = rng.random(60)
    width = json.loads((folder / 'config.json').read_text())['hidden_size']
    write_sentence_transformer(folder, width, EmbeddingRules(max_length=32))
    theirs = EmbeddingSimilarityEvaluator(first, second, scores)(peer_of(folder))
    units = similarity_units(load_encoder(str(folder)), first, second, scores)
    assert units.mean() == pytest.approx(theirs['spearman_cosine'], abs=1e-9)


def test_a_folder_without_modules_says_it_in_its_config(folder):
    assert embedding_rules(folder) == EmbeddingRules()
    config = json.loads((folder / 'config.json').read_text())
    write_json(folder / 'config.json', config | dict(normalize=False, prefix_query='q: ', prefix_text='t: '))
    assert embedding_rules(folder) == EmbeddingRules(False, 'q: ', 't: ')


def test_other_poolings_and_modules_are_refused(folder):
    write_sentence_transformer(folder, 32, EmbeddingRules(max_length=32))
    pooling = folder / '1_Pooling' / 'config.json'
    for config, words in (
        (dict(pooling_mode_cls_token=True), 'pools tokens by cls'),
        (dict(pooling_mode=['mean', 'max']), 'pools tokens by mean and max'),
        (dict(pooling_mode='mean', include_prompt=False), 'without prompts'),
    ):
        write_json(pooling, config)
        with pytest.raises(ModelError, match=words):
            embedding_rules(folder)
    modules = json.loads((folder / 'modules.json').read_text())
    write_json(
        folder / 'modules.json', [*modules, dict(idx=3, name='3', path='3_Dense', type='x.models.Dense')]
    )
    with pytest.raises(ModelError, match='has the module Dense'):
        embedding_rules(folder)
    (folder / 'modules.json').write_text('{"a": 1}')
    with pytest.raises(ModelError, match='is no list of modules'):
        embedding_rules(folder)


def test_default_prompts_of_other_folders_are_prefixes(folder):
    write_sentence_transformer(folder, 32, EmbeddingRules(max_length=32))
    write_json(
        folder / 'config_sentence_transformers.json',
        dict(prompts=dict(all='x: ', query='q: '), default_prompt_name='all'),
    )
    assert embedding_rules(folder) == EmbeddingRules(True, 'q: ', 'x: ', 32)


def test_texts_that_are_none_are_refused(home, folder):
    encoder = load_encoder(str(folder))
    for wrong, words in ((['a', ''], 'number 1 of 2'), ([], 'empty list'), (['a', 3], 'a text is needed')):
        with pytest.raises(PredictError, match=words):
            encoder.embed(wrong)


@pytest.mark.parametrize('end', ['csv', 'jsonl', 'parquet'])
def test_the_rows_of_a_file(end, home, folder, tmp_path, capsys):
    table = pd.DataFrame(dict(id=range(4), text=TEXTS))
    path = tmp_path / f'in.{end}'
    if end == 'csv':
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient='records', lines=True) if end == 'jsonl' else table.to_parquet(path)
    vectors = load_encoder(str(folder)).embed(TEXTS)
    given = ['embed', str(folder), '--file', str(path)]
    assert main([*given, '--out', str(tmp_path / 'v.npy')]) == 0
    assert f'4 vectors of {vectors.shape[1]} numbers' in capsys.readouterr().out
    np.testing.assert_allclose(np.load(tmp_path / 'v.npy'), vectors, atol=1e-6)
    assert main([*given, '--out', str(tmp_path / 'v.parquet'), '--json']) == 0
    assert json.loads(capsys.readouterr().out)['rows'] == 4
    written = pd.read_parquet(tmp_path / 'v.parquet')
    np.testing.assert_allclose(np.stack(written['embedding']), vectors, atol=1e-6)
    assert written['text'].tolist() == TEXTS and list(map(int, written['id'])) == [0, 1, 2, 3]


def test_rows_of_json_keep_columns_that_the_first_lacks(home, folder, tmp_path):
    path, out = tmp_path / 'in.jsonl', tmp_path / 'v.parquet'
    path.write_text('{"text": "a"}\n{"text": "b", "id": 7}\n')
    embed_file(str(folder), path, out)
    assert pd.read_parquet(out)['id'].fillna(0).tolist() == [0, 7]
    path.write_text('{"text": "a", "id": 1}\n{"text": "b", "id": "n/a"}\n')
    with pytest.raises(ConfigError, match='cannot be written as Parquet'):
        embed_file(str(folder), path, out, overwrite=True)


def test_bad_files_are_refused_and_leave_nothing(home, folder, tmp_path):
    path, out = tmp_path / 'in.csv', tmp_path / 'v.npy'
    pd.DataFrame(dict(text=['a', ' '], other=['x', 'y'])).to_csv(path, index=False)
    with pytest.raises(ConfigError, match='row 2: text holds no text'):
        embed_file(str(folder), path, out)
    with pytest.raises(ConfigError, match="no column 'body'; name one of text, other"):
        embed_file(str(folder), path, out, 'body')
    with pytest.raises(ConfigError, match='must end in .npy or .parquet'):
        embed_file(str(folder), path, tmp_path / 'v.csv', 'other')
    with pytest.raises(ConfigError, match='there is no file'):
        embed_file(str(folder), tmp_path / 'none.csv', out)
    assert not out.exists()
    embed_file(str(folder), path, out, 'other')
    with pytest.raises(ConfigError, match='is there already'):
        embed_file(str(folder), path, out, 'other')


def test_a_second_call_computes_nothing(home, folder, tmp_path, monkeypatch):
    path = tmp_path / 'in.csv'
    pd.DataFrame(dict(text=TEXTS)).to_csv(path, index=False)
    embed_file(str(folder), path, tmp_path / 'a.npy')
    monkeypatch.setattr(FrozenEncoder, '_embed', lambda self, texts: pytest.fail('computed again'))
    embed_file(str(folder), path, tmp_path / 'b.npy')
    np.testing.assert_array_equal(np.load(tmp_path / 'a.npy'), np.load(tmp_path / 'b.npy'))


@needs_peer
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_the_programs_of_the_how_to_run(small_run, tmp_path, monkeypatch, capsys):
    notebook = json.loads(
        (Path(__file__).parents[1] / 'nbs/howto/embeddings.ipynb').read_text(encoding='utf-8')
    )
    text = '\n'.join(''.join(cell['source']) for cell in notebook['cells'])
    search, peer, similarity = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    run_id = small_run('embeddings', 'full_kd')
    export_model(run_id, str(tmp_path / 'exported'))
    monkeypatch.chdir(tmp_path)
    exec(search.replace('<run_id>', run_id), {})
    for program in (peer, similarity):
        exec(program, {})
    assert 'tensor(' in capsys.readouterr().out
