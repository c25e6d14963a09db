"""`kdnotes predict`: what a run's model says of a text is what its evaluation said of it, whichever way the
model is named; what cannot be asked is refused in one sentence.
"""

import json
import math
import shutil
from pathlib import Path
import numpy as np
import pytest
import torch
import transformers
from tiny_lm import tiny_lm, tiny_tokenizer
from kdnotes.cli import main
from kdnotes.core.config import TASKS, task_info
from kdnotes.core.files import runs_path
from kdnotes.distill.models import save_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM
from kdnotes.experiment.export import export_model
from kdnotes.experiment.predict import predict
from kdnotes.experiment.saved_models import find_source
from kdnotes.results.schema import RecordError
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import find_record, predictions
from kdnotes.tasks.inference import INPUTS
from kdnotes.tasks.sources import load_corpus


def asked_of(task: str) -> dict:
    "Something that models of a task can be asked."
    return {
        'answer_selection': dict(question='What is iron?', candidates=['Iron is a metal.', 'Paris.']),
        'text_classification': dict(text='Iron is a metal.'),
        'sentence_pairs': dict(text='Iron is a metal.', pair='Iron melts.'),
        'masked_lm': dict(text='Iron is a [MASK] .'),
        'extractive_qa': dict(question='What is iron?', passage='Iron is a metal. Paris is a city.'),
        'token_classification': dict(text='Ada May left Ashford in April.'),
        'embeddings': dict(question='What is iron?', candidates=['Iron is a metal.', 'Paris.']),
    }[task]


def options(asked: dict) -> list[str]:
    "What is asked, as it is typed."
    typed = []
    for name, value in asked.items():
        many = isinstance(value, list)
        for text in value if many else [value]:
            typed += [f'--{name.removesuffix("s") if many else name}', text]
    return typed


def test_every_task_says_how_its_models_are_asked():
    for task in TASKS:
        use = task_info(task).use
        assert set(use.takes) <= set(INPUTS) and set(use.may_take) <= set(INPUTS)
        assert set(asked_of(task)) == set(use.takes) and use.limits


# ---- a run ----


@pytest.mark.slow
def test_candidates_get_the_scores_of_the_evaluation(small_run):
    run_id = small_run('answer_selection', 'full_kd')
    rows = load_corpus('answer_selection', 'embedded').splits['dev']
    stored = predictions('small', [run_id])
    stored = stored[stored['split'] == 'dev']
    question = stored['unit'].iloc[0]
    own = {row['sentence_id']: row for row in rows if row['question_id'] == question}
    of_unit = stored[stored['unit'] == question]
    sentences = [own[item]['sentence'] for item in of_unit['item']]
    text = next(iter(own.values()))['question']
    found = predict(run_id, question=text, candidates=sentences)
    said = {row['place']: row['score'] for row in found.answer.values['candidates']}
    expected = of_unit['score'].to_numpy()
    assert np.allclose([said[i] for i in range(len(expected))], expected, atol=1e-5)
    order = [row['place'] for row in found.answer.values['candidates']]
    assert order == np.argsort(-expected, kind='stable').tolist()
    # its teacher stands beside it, and says something else
    record = find_record(run_id)[0]
    assert found.beside.run_id == record['teacher_run_id'] and found.beside.beside is None
    assert found.beside.answer.values != found.answer.values
    assert found.latency_ms > 0 and found.parameters == record['params_total']
    assert predict(run_id, 'none', question=text, candidates=sentences).beside is None


@pytest.mark.slow
def test_answers_are_those_of_the_evaluation(small_run):
    run_id = small_run('extractive_qa')
    rows = {row['id']: row for row in load_corpus('extractive_qa', 'embedded').splits['dev']}
    stored = predictions('small', [run_id])
    some = stored[stored['split'] == 'dev'].iloc[::7]
    threshold = find_record(run_id)[0]['metrics']['test']['threshold']
    for _, of in some.iterrows():
        row = rows[of['unit']]
        found = predict(run_id, question=row['question'], passage=row['context']).answer.values
        assert f"{found['begin']}:{found['end']}" == of['item']
        assert found['log_odds'] == pytest.approx(of['score'], abs=1e-5)
        assert found['best_span'] == row['context'][found['begin'] : found['end']]
        assert found['threshold'] == threshold
        assert found['no_answer_probability'] == pytest.approx(1 / (1 + math.exp(found['log_odds'])))
        assert found['probability'] + found['no_answer_probability'] == pytest.approx(1)


@pytest.mark.slow
def test_classes_have_the_names_of_the_corpus_and_the_logits_of_the_evaluation(small_run):
    run_id = small_run('text_classification')
    rows = {row['id']: row for row in load_corpus('text_classification', 'embedded').splits['dev']}
    stored = predictions('small', [run_id])
    unit = stored[stored['split'] == 'dev']['unit'].iloc[0]
    of_unit = stored[stored['unit'] == unit]
    logits = torch.tensor(of_unit['score'].to_numpy())
    expected = dict(zip(of_unit['item'], logits.softmax(0).tolist()))
    found = predict(run_id, text=rows[unit]['text'])
    said = {row['label']: row['probability'] for row in found.answer.values['labels']}
    assert said == pytest.approx(expected, abs=1e-5) and list(said) == sorted(said, key=lambda k: -said[k])


@pytest.mark.slow
@pytest.mark.parametrize('task', TASKS)
def test_a_saved_model_is_what_others_load(task, small_run):
    run_id = small_run(task)
    run = RunFolder('small', run_id)
    model = run.path / 'model'
    config = json.loads((model / 'config.json').read_text())
    rules = json.loads((model / 'tokenizer_config.json').read_text())
    settings = run.record()['settings']
    assert rules['model_max_length'] == settings['max_length']
    assert not {'local_files_only', 'is_local', 'name_or_path', 'max_length'} & rules.keys()
    for name in ('config.json', 'tokenizer_config.json', 'README.md'):
        text = (model / name).read_text()
        assert str(runs_path().parent) not in text and str(Path.home()) not in text
    auto = getattr(transformers, task_info(task).auto_class)
    loaded = auto.from_pretrained(model)
    assert config['architectures'] == [type(loaded).__name__]
    assert not any(label.startswith('LABEL_') for label in config.get('id2label', {}).values())
    probe = model / 'probe'
    probe.touch()
    assert {path.stat().st_mode & 0o777 for path in model.iterdir()} == {probe.stat().st_mode & 0o777}
    probe.unlink()
    # named by its run, its folder or its model, it says the same
    asked = asked_of(task)
    said = [predict(name, **asked).answer for name in (run_id, str(run.path), str(model))]
    assert said[0] == said[1] == said[2]


@pytest.mark.slow
def test_the_command_says_what_the_function_says(small_run, capsys):
    run_id = small_run('answer_selection', 'full_kd')
    asked = asked_of('answer_selection')
    assert main(['predict', run_id, *options(asked), '--json']) == 0
    said = json.loads(capsys.readouterr().out)
    found = predict(run_id, **asked)
    assert said['answer'] == found.answer.values and said['run_id'] == run_id
    assert said['beside']['answer'] == found.beside.answer.values
    assert main(['predict', run_id, *options(asked)]) == 0
    lines = capsys.readouterr().out
    assert 'ms per call' in lines and 'log-odds' in lines and found.beside.model in lines
    middle, low, high = found.times_as_long
    assert 0 < low <= middle <= high and found.beside.times_as_long is None
    assert (
        f'{found.beside.model} takes ' in lines
        and 'median of alternating calls; interquartile range' in lines
    )


@pytest.mark.slow
def test_a_file_of_candidates(small_run, tmp_path, capsys):
    run_id = small_run('answer_selection')
    asked = asked_of('answer_selection')
    path = tmp_path / 'candidates.txt'
    path.write_text('\n'.join([*asked['candidates'], '', ' ']))
    question = ['--question', asked['question']]
    assert main(['predict', run_id, *question, '--candidates', str(path), '--json']) == 0
    said = json.loads(capsys.readouterr().out)
    assert said['answer'] == predict(run_id, **asked).answer.values


@pytest.mark.slow
def test_weights_that_are_not_the_records_are_refused(small_run, tmp_path):
    run_id = small_run('text_classification')
    copy = tmp_path / 'copy'
    shutil.copytree(RunFolder('small', run_id).path, copy)
    assert find_source(str(copy)).record['run_id'] == run_id
    model = transformers.AutoModelForSequenceClassification.from_pretrained(copy / 'model')
    with torch.no_grad():
        model.classifier.bias += 1
    model.save_pretrained(copy / 'model')
    with pytest.raises(Exception, match='model.safetensors is not what its run wrote'):
        predict(str(copy), text='iron')


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.slow
def test_a_runs_folder_is_held_to_its_record_as_its_run_id_is(small_run, tmp_path):
    run_id = small_run('text_classification')
    copy = tmp_path / 'copy'
    shutil.copytree(RunFolder('small', run_id).path, copy)
    config = copy / 'model' / 'config.json'

    def exchange(content):
        labels = content['id2label']
        labels['0'], labels['1'] = labels['1'], labels['0']

    def refused(words):
        for folder in (copy, copy / 'model'):
            for use in (find_source, lambda name: export_model(name, str(tmp_path / 'out'))):
                with pytest.raises(RecordError, match=words):
                    use(str(folder))

    before = config.read_bytes()
    rewrite(config, exchange)
    refused('config.json is not what its run wrote; restore it')
    config.write_bytes(before)
    (copy / 'model' / 'added_tokens.json').write_text('{"iron": 5}')
    refused('added_tokens.json was not written by the run whose folder it is in; move it away')
    (copy / 'model' / 'added_tokens.json').unlink()
    assert predict(str(copy), text='iron').answer.values == predict(run_id, text='iron').answer.values
    # without a record it is a folder like others
    shutil.copytree(copy / 'model', tmp_path / 'alone')
    rewrite(tmp_path / 'alone' / 'config.json', exchange)
    assert find_source(str(tmp_path / 'alone')).record is None


@pytest.mark.slow
@pytest.mark.parametrize(
    'key, value, words',
    [
        *(
            ('max_length', value, "'settings.max_length': input should be")
            for value in ('64', -5, 12.5, [1], True)
        ),
        ('set', 'nowhere', "'primary.set' is none of metrics"),
    ],
)
def test_values_of_a_record_that_nobody_wrote(small_run, tmp_path, key, value, words):
    run_id = small_run('text_classification')
    copy = tmp_path / 'copy'
    shutil.copytree(RunFolder('small', run_id).path, copy)
    (copy / 'state.json').unlink()  # it would vouch for the record

    def change(record):
        if key == 'set':
            record['primary'] |= dict(set=value, value=None)
            record['reasons']['primary.value'] = 'unknown'
        else:
            record['settings'][key] = value

    rewrite(copy / 'record.json', change)
    with pytest.raises(RecordError, match=words):
        predict(str(copy), text='iron')


# ---- any model ----


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')


@pytest.fixture
def language_model(tmp_path, home) -> Path:
    return save_model(tiny_lm(closed=True), tmp_path / 'lm', tiny_tokenizer())


def test_a_gap_gets_the_pieces_that_transformers_finds(language_model):
    found = predict(str(language_model), text='w1 [MASK] w3 [MASK]').answer.values['gaps']
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([[2, *tokenizer('w1 [MASK] w3 [MASK]', add_special_tokens=False)['input_ids'], 3]])
    model = transformers.BertForMaskedLM.from_pretrained(language_model).eval()
    with torch.no_grad():
        probabilities = model(ids).logits[0, [2, 4]].softmax(-1)
    for gap, expected in zip(found, probabilities, strict=True):
        top = expected.topk(5)
        assert [piece['piece'] for piece in gap] == tokenizer.convert_ids_to_tokens(top.indices.tolist())
        assert [piece['probability'] for piece in gap] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_a_special_token_in_a_text_is_letters(language_model):
    with_sep = predict(str(language_model), text='w1 [SEP] [MASK]').answer
    unknown = predict(str(language_model), text='w1 nowhere nowhere nowhere [MASK]').answer
    assert with_sep.values.keys() == unknown.values.keys()
    said = predict(str(language_model), text='w1 [MASK]').answer
    assert said != with_sep


def classifier(folder: Path, outputs: int = 2, kind: str = 'Bert', **config) -> Path:
    tokenizer = load_tokenizer(MINILM)
    sizes = (
        dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16)
        if kind == 'DistilBert'
        else dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    made = getattr(transformers, f'{kind}Config')(
        **sizes, vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=outputs, **config
    )
    torch.manual_seed(0)
    model = getattr(transformers, f'{kind}ForSequenceClassification')(made)
    return save_model(model, folder, tokenizer, max_length=24)


def test_a_long_text_is_cut_and_that_is_said(tmp_path, home):
    folder = str(classifier(tmp_path / 'm'))
    found = predict(folder, text='iron ' * 100).answer
    assert dict(found.notes[0].details)['max_length'] == 24 and not predict(folder, text='iron').answer.notes
    assert found.values == predict(folder, text='iron ' * 22).answer.values
    ranked = predict(folder, question='iron', candidates=['iron', 'iron ' * 90]).answer
    assert str(ranked.notes[0]).startswith('1 of 2 candidates have more tokens')


def test_a_cross_encoder_with_one_output_ranks_too(tmp_path, home):
    folder = str(classifier(tmp_path / 'm', outputs=1))
    found = predict(folder, question='iron', candidates=['a', 'b', 'c']).answer.values['candidates']
    assert [row['rank'] for row in found] == [1, 2, 3]
    assert found[0]['score'] >= found[1]['score'] >= found[2]['score']


def test_a_number_is_in_the_unit_of_its_labels(tmp_path, home):
    known = dict(problem_type='regression', target_mean=10.0, target_deviation=2.0)
    folder = str(classifier(tmp_path / 'm', outputs=1, **known))
    tokenizer = load_tokenizer(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        z = model(**tokenizer('iron', return_tensors='pt')).logits.item()
    assert predict(folder, text='iron').answer.values['value'] == pytest.approx(10 + 2 * z, abs=1e-5)


def test_a_tokenizer_gives_what_its_model_takes(tmp_path, home):
    folder = classifier(tmp_path / 'm', kind='DistilBert')
    rules = json.loads((folder / 'tokenizer_config.json').read_text())
    assert rules['model_input_names'] == ['input_ids', 'attention_mask']
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model(**tokenizer('iron', 'rusts', return_tensors='pt')).logits.shape == (1, 2)


def refused(capsys, *typed: str) -> tuple[int, str]:
    code = main(['predict', *typed])
    said = capsys.readouterr()
    assert said.out == '' and said.err.count('\n') == 1
    return code, said.err


def test_what_cannot_be_asked_is_refused_in_a_sentence(tmp_path, home, language_model, capsys):
    model = str(classifier(tmp_path / 'm'))
    three = str(classifier(tmp_path / 'three', outputs=3))
    lm = str(language_model)
    nothing = tmp_path / 'nothing'
    nothing.mkdir()
    begun = tmp_path / 'begun'
    begun.mkdir()
    (begun / 'state.json').write_text('{}')
    bare = tmp_path / 'bare'
    tokenizer = load_tokenizer(MINILM)
    whole = transformers.BertForNextSentencePrediction(transformers.AutoConfig.from_pretrained(model))
    save_model(whole, bare, tokenizer)
    cases = {
        "there is no folder '/no/such'": ['/no/such', '--text', 'a'],
        'has no config.json': [str(nothing), '--text', 'a'],
        'is the folder of a run that is not done': [str(begun), '--text', 'a'],
        "there is no run 'baseline-s0-0123456789ab'": ['baseline-s0-0123456789ab', '--text', 'a'],
        'was saved as BertForNextSentencePrediction': [str(bare), '--text', 'a'],
        'nothing is asked': [model],
        'the text is empty': [model, '--text', ' '],
        'the question is empty': [model, '--question', '', '--candidate', 'a'],
        'the candidate is empty': [model, '--question', 'a', '--candidate', ''],
        'is empty; remove it or put a text there': [
            model,
            '--question',
            'a',
            '--candidates',
            str(tmp_path / 'empty.txt'),
        ],
        'is no ordinary file': [model, '--candidates', str(nothing)],
        'passage is not read': [model, '--question', 'a', '--passage', 'b'],
        'candidates is missing': [model, '--question', 'a'],
        'the model has 3 outputs': [three, '--question', 'a', '--candidate', 'b'],
        'the text has no gap': [lm, '--text', 'w1'],
        'the model takes 32 at once; shorten it': [lm, '--text', 'w1 ' * 90 + '[MASK]'],
        'answers task=': [model, '--text', 'w1 [MASK]', '--beside', lm],
    }
    (tmp_path / 'empty.txt').write_text('\n \n')
    for words, typed in cases.items():
        code, said = refused(capsys, *typed)
        assert words in said and code == 2, (words, code, said)
