"""The thesis is made from the committed evidence and nothing else:
a lost run, an unknown key or a null stops the build by name, and a changed value changes the text.
"""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
import numpy as np
import pytest
from scipy import stats
from thesis import build as th
from thesis.measured import gpu_facts
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.files import read_json, sha256_file, write_json
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.core.run_id import settings

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / 'thesis' / 'chapters').glob('*.typ'))
PLAN = read_json(ROOT / 'thesis' / 'plan.json')
MAIN = PLAN['parts']['main']['study']
typst = pytest.importorskip('typst', reason='the PDF is set by the typst package, which is not installed')


def copy_of(folder: Path) -> Path:
    "A checkout with what a build reads."
    shutil.copytree(ROOT / 'thesis', folder / 'thesis', ignore=shutil.ignore_patterns('thesis.pdf'))
    shutil.copytree(ROOT / 'figures', folder / 'figures')
    return folder


@pytest.fixture
def copy(tmp_path) -> Path:
    return copy_of(tmp_path)


def made_of(where: Path) -> dict[str, bytes]:
    "Every generated file."
    studies = [p['study'] for p in PLAN['parts'].values()] + ['scaling']
    files = [
        where / 'thesis' / 'thesis.pdf',
        *(where / 'thesis' / 'generated').rglob('*'),
        *(f for s in studies for f in (where / 'figures' / s).rglob('*')),
    ]
    return {str(f.relative_to(where)): f.read_bytes() for f in files if f.is_file()}


def lines(where: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (where / 'thesis' / 'data' / f'{MAIN}.records.jsonl').read_text().splitlines()
    ]


def write_lines(where: Path, found: list[dict]) -> None:
    (where / 'thesis' / 'data' / f'{MAIN}.sha256').unlink(missing_ok=True)  # as of older evidence
    (where / 'thesis' / 'data' / f'{MAIN}.records.jsonl').write_text(
        ''.join(json.dumps(r, sort_keys=True, separators=(',', ':')) + '\n' for r in found)
    )


def shown(where: Path) -> list[tuple[str, str]]:
    "(key, text) of every generated value in the order of the document's pages."
    return [
        (v['key'], str(v['text']))
        for v in json.loads(
            typst.query(
                str(where / 'thesis' / 'thesis.typ'),
                '<shown>',
                field='value',
                root=str(where),
                ignore_system_fonts=True,
            )
        )
    ]


@pytest.mark.exhaustive
def test_a_rebuild_is_what_is_tracked(copy):
    "With `make thesis` the tracked files stay as they are: what is tracked was one build, this is another."
    before = os.environ.get('KDNOTES_HOME')
    th.build(copy)
    assert os.environ.get('KDNOTES_HOME') == before
    tracked = made_of(ROOT)
    again = made_of(copy)
    assert sorted(tracked) == sorted(again)
    assert [name for name in tracked if tracked[name] != again[name]] == [], 'run `make thesis`'


def test_a_missing_run_is_named_and_nothing_old_is_left(copy):
    found = lines(copy)
    planned = {i: (arm, seed) for arm, seed, i in th.planned(PLAN, 'main')}
    lost = next(r for r in found if r['run_id'] in planned)
    write_lines(copy, [r for r in found if r is not lost])
    arm, seed = planned[lost['run_id']]
    with pytest.raises(th.ThesisError, match=re.escape(f"{lost['run_id']} (arm {arm}, seed {seed})")) as e:
        th.build(copy)
    assert '\n' not in str(e.value) and made_of(copy) == {}


@pytest.mark.exhaustive
def test_first_weights_that_the_plan_does_not_name_stop_the_build(copy):
    found = lines(copy)
    found[0]['initial']['transfer_run_id'] = 'mixed_baseline-s0-ffffffffffff'
    write_lines(copy, found)
    with pytest.raises(
        th.ThesisError,
        match='starts from mixed_baseline-s0-ffffffffffff, which thesis/plan.json does not name',
    ):
        th.build(copy)


def test_runs_that_the_plan_does_not_name_stay_out(copy):
    extra = lines(copy)[0] | dict(run_id='baseline-s99-0123456789ab', seed=99)
    write_lines(copy, [*lines(copy), extra])
    with th.evidence_alone(copy):
        found = th.part_records(PLAN, 'main')
    assert extra['run_id'] not in {r['run_id'] for r in found} and len(found) == len(th.planned(PLAN, 'main'))


def test_pin_takes_what_the_evidence_holds(copy):
    th.pin(copy, {'main': MAIN})
    again = read_json(copy / 'thesis' / 'plan.json')
    assert (
        sorted(i for *_, i in th.planned(again, 'main')) == sorted(r['run_id'] for r in lines(copy))
        and again['aims'] == PLAN['aims']
    )
    with pytest.raises(th.ThesisError, match="no part 'side'"):
        th.pin(copy, {'side': MAIN})
    with pytest.raises(th.ThesisError, match="study 'nowhere'"):
        th.pin(copy, {'main': 'nowhere'})
    assert read_json(copy / 'thesis' / 'plan.json') == again  # nothing is written


def test_an_unknown_command_prints_the_usage(capsys):
    assert (th.main(['bake']), th.main(['--help'])) == (1, 0)
    printed = capsys.readouterr()
    assert printed.err == printed.out and printed.out.startswith('usage: python -m thesis')


@pytest.mark.parametrize(
    'wrong, words',
    [
        (dict(complete=False), 'was interrupted'),
        (dict(settings=dict(smoke=True, device='cuda')), 'rehearsal'),
    ],
)
def test_results_of_a_gpu_check_that_are_not_whole_are_no_facts(wrong, words):
    whole = dict(
        began='2026',
        settings=dict(smoke=False, device='cuda'),
        complete=True,
        failed=[],
        parts=dict(machine=dict(gpu=dict(name='a GPU'))),
    )
    assert gpu_facts(whole)['device'] == 'a GPU'
    with pytest.raises(th.ThesisError, match=words):
        gpu_facts(whole | wrong)


@pytest.mark.parametrize(
    'text, words',
    [
        ('#v("main.no_such_key")', "'main.no_such_key', which was not generated"),
        ('#n("lesson.nothing")', "'lesson.nothing', which is null"),
        ('#text(font: "No Such Font")[x]', 'unknown font family: no such font'),
        ('#by("main.steps.kd.verdict", never: [x])', "'main.steps.kd.verdict' is '"),
    ],
)
def test_what_typst_cannot_set_is_named(copy, text, words):
    values = copy / 'thesis' / 'generated' / 'values.json'
    write_json(values, read_json(values) | {'lesson.nothing': None})
    with open(copy / 'thesis' / 'chapters' / '16_conclusion.typ', 'a') as f:
        f.write('\n' + text)
    with pytest.raises(th.ThesisError, match=re.escape(words)) as e:
        th.compiled(copy)
    assert '\n' not in str(e.value)


def test_the_home_comes_back_after_a_failure(monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', '/somewhere')
    with pytest.raises(ZeroDivisionError), th.evidence_alone(ROOT):
        raise ZeroDivisionError
    assert os.environ['KDNOTES_HOME'] == '/somewhere'


# What may stand in a chapter as a digit: names of formats and measures, the constants of equations are in
# $...$, keys and code in strings.
NAMES = re.compile(
    r'\b(?:fp|bf|TF|tf)\d+\b|P\\@1|\bF1\b|P@1|SHA-?256|sha256|\b95 %|\b5 %'
    r'|\b[Ww]iki[Tt]ext-?2\b|\bSQuAD [12]\.\d|\bBM25\b'
)


def prose(path: Path) -> str:
    "A chapter without code, equations, strings, labels, lengths and arguments."
    text = path.read_text(encoding='utf-8')
    for pattern in (
        r'//.*',
        r'\$[^$]*\$',
        r'"(?:[^"\\]|\\.)*"',
        r'`[^`]*`',
        r'@[\w-]+',
        r'<[\w-]+>',
        r'#(?:set|show|let)\b.*',
        (
            r'\b(?:d|size|columns|width|below|above|left|right|inset|x|y|depth|level|scale|null): '
            r'*\(?[\d.]+(?:mm|em|pt|%)?'
        ),
        r'#v-space\([^)]*\)',
        r'#columns\(\d|\bx in \(\d, \d\)',
        r'[\d.]+(?:mm|em|pt|fr)\b',
        r'rgb\([^)]*\)',
        r'\b(?:x|level|columns)\s*[<=]+\s*\d',
        r'len\(\) *[=<>]+ *\d|< \d',
        r'width: \d+%',
    ):
        text = re.sub(pattern, ' ', text)
    return NAMES.sub(' ', text)


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_no_number_is_typed_by_hand(path):
    found = [line.strip()[:120] for line in prose(path).splitlines() if re.search(r'\d', line)]
    assert found == []


def test_a_number_typed_by_hand_would_be_seen(tmp_path):
    (tmp_path / 'x.typ').write_text(
        'The MAP: 0.756 with `x = 3` and $T = 2$, #n("a.b", d: 3), "95" of 13 runs.'
    )
    assert re.findall(r'[\d.]*\d', prose(tmp_path / 'x.typ')) == ['0.756', '13']


def end_of_group(text: str, start: int) -> int:
    "Where the bracket that opens there is closed, strings apart."
    closing, quoted, i = [], False, start
    while i < len(text):
        c = text[i]
        if quoted or c == '\\':
            i += c == '\\'
            quoted = quoted and c != '"'
        elif c == '"' and closing[-1] == ')':
            quoted = True
        elif c in '([':
            closing.append(')' if c == '(' else ']')
        elif closing and c == closing[-1]:
            closing.pop()
            if not closing:
                return i
        i += 1
    return len(text)


def swallowed(text: str) -> list[str]:
    "Semicolons right behind an expression: typst takes them for the end of the code, and prints nothing."
    found = []
    for m in re.finditer(r'(?<!\\)#(?!let|set|show|import|assert)[a-zA-Z][\w-]*', text):
        i = m.end()
        while i < len(text) and text[i] in '([':
            i = end_of_group(text, i) + 1
        if text[i : i + 1] == ';' and i > m.end():
            found.append(text[max(0, i - 40) : i + 1])
    return found


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_no_semicolon_is_swallowed(path):
    assert swallowed(path.read_text(encoding='utf-8')) == []
    assert swallowed('a #n("x;y", d: 3); b') and not swallowed('a #n("x")\\; b (c #n("x"), d); e')


def test_no_package_of_the_network_and_every_source_is_cited():
    text = ''.join(p.read_text(encoding='utf-8') for p in (ROOT / 'thesis').rglob('*.typ'))
    assert '@preview' not in text and '@local' not in text
    entries = re.findall(
        r'^@\w+\{(\w+),', (ROOT / 'thesis' / 'references.bib').read_text(encoding='utf-8'), re.M
    )
    assert len(entries) == len(set(entries)) and [e for e in entries if f'@{e}' not in text] == []


def test_every_figure_is_bound_to_its_runs():
    values = read_json(ROOT / 'thesis' / 'generated' / 'values.json')
    # those of a search are bound to its trials
    bound = {part: sorted(i for *_, i in th.planned(PLAN, part)) for part in PLAN['parts']}
    listed = ('trials', 'batches', 'transfer', 'search')
    studies = {part: PLAN['parts'][part]['study'] for part in bound if th.PARTS[part] not in listed}
    for part, study in (studies | dict(scaling='scaling')).items():
        folder = ROOT / 'figures' / study
        manifest = read_json(folder / 'MANIFEST.json')
        drawn = {name: entry for name, entry in manifest.items() if entry['sha256']}
        assert {f.name for f in folder.glob('*.svg')} == drawn.keys()
        assert all(entry['run_ids'] == bound.get(part, []) for entry in manifest.values())
        assert all(entry['sha256'] == sha256_file(folder / name) for name, entry in drawn.items())
        assert all(entry['sha256'] or entry['reason'] for entry in manifest.values())
        used = [v for k, v in values.items() if re.fullmatch(rf'{part}\.figures\.\w+\.path', k)]
        assert used and all(Path(f).name in drawn and (ROOT / f[1:]).exists() for f in used)


@pytest.mark.exhaustive
def test_every_records_accuracy_again_from_the_committed_units():
    "With nothing of the library: means of units by run, means of runs by arm, against records and values."
    values = read_json(ROOT / 'thesis' / 'generated' / 'values.json')
    data = ROOT / 'thesis' / 'data'
    for part, p in PLAN['parts'].items():
        lines = (data / f"{p['study']}.records.jsonl").read_text().splitlines()
        found = {r['run_id']: r for r in map(json.loads, lines)}
        sums = {}
        with gzip.open(data / f"{p['study']}.units.csv.gz", 'rt') as f:
            for row in csv.DictReader(f):
                wanted = found[row['run_id']]['primary']
                if row['split'] == wanted['set'] and row['metric'] == wanted['metric']:
                    sums.setdefault(row['run_id'], []).append(float(row['value']))
        for arm, by_seed in p['runs'].items():
            means = [np.mean(sums[i]) for i in by_seed.values()]
            assert means == pytest.approx([found[i]['primary']['value'] for i in by_seed.values()], abs=2e-6)
            key = f'{part}.arms.{arm}.primary.estimate'
            assert values.get(key, np.mean(means)) == pytest.approx(np.mean(means), abs=2e-6)


def test_what_synchronising_costs_again_from_the_committed_turns():
    "With nothing of the library: t intervals of logarithms over turns, and Amdahl's law."
    values = read_json(ROOT / 'thesis' / 'generated' / 'values.json')
    turns = {
        (row['task'], row['name']): np.log(row['step_s'])
        for row in read_json(ROOT / 'thesis' / 'data' / 'scaling.json')['rows']
    }

    def check(key: str, logs: np.ndarray) -> None:
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
        expected = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
        found = [values[f'{key}.{end}'] for end in ('estimate', 'low', 'high')]
        assert found == pytest.approx(expected, rel=1e-6)

    for task in ('masked_lm', 'answer_selection'):
        every, once = (turns[task, f'2 x 8, {sync}'] for sync in ('every', 'delayed'))
        check(f'scaling.tasks.{task}.delaying.few', every - once)
    assert values['scaling.sums.few'] == 8
    of = 'answer_selection'
    check('scaling.answer.accumulated', turns[of, '1 x 16, delayed'] - turns[of, '2 x 8, delayed'])
    faster = turns[of, '1 x 2 large, delayed'] - turns[of, '2 x 1 large, delayed']
    check('scaling.answer.faster', faster)
    assert values['scaling.answer.share.estimate'] == pytest.approx(2 / np.exp(faster.mean()) - 1)


def side(x, null):
    return int(x > null) - int(x < null)


def printed(text):
    return [float(x.replace('\N{MINUS SIGN}', '-')) for x in re.findall(r'[\N{MINUS SIGN}-]?\d+\.\d+', text)]


@pytest.mark.parametrize('null', [0, 1])
def test_typst_prints_no_number_on_another_side_of_the_null(tmp_path, null):
    rng = np.random.default_rng(null)
    numbers = null + rng.choice([-1, 1], (300, 3)) * 10 ** rng.uniform(-9, -0.5, (300, 3))
    numbers[:20, 1] = null  # a bound on the null itself
    (tmp_path / 'generated').mkdir()
    shutil.copy(ROOT / 'thesis' / 'lib.typ', tmp_path)
    write_json(
        tmp_path / 'generated' / 'values.json',
        {
            f'i{k}.{name}': float(x)
            for k, row in enumerate(numbers)
            for name, x in zip(('estimate', 'low', 'high', 'n'), (*row, 3))
        },
    )
    (tmp_path / 'x.typ').write_text(
        '#import "lib.typ": *\n' + '\n'.join(f'#est("i{k}", null: {null})' for k in range(len(numbers)))
    )
    found = json.loads(typst.query(str(tmp_path / 'x.typ'), '<shown>', field='value', root=str(tmp_path)))
    for row, text in zip(numbers, (f['text'] for f in found), strict=True):
        # an estimate between bounds on two sides is on neither, as far as anybody knows
        first = int(side(row[1], null) * side(row[2], null) < 0)
        assert [side(x, null) for x in printed(text)][first:] == [side(x, null) for x in row][first:], text
        assert (
            len({len(x.partition('.')[2]) for x in re.findall(r'\d+\.\d+', text)}) == 1
            and len(re.findall(r'\.(\d+)', text)[0]) >= 3
        )


def runs_of(part: str, study_part: str = 'main') -> dict[int, dict]:
    "seed -> record, of an arm that the thesis rests on."
    planned = {i for arm, _, i in th.planned(PLAN, study_part) if arm == part}
    lines = (ROOT / 'thesis/data' / f"{PLAN['parts'][study_part]['study']}.records.jsonl").read_text()
    return {r['seed']: r for r in map(json.loads, lines.splitlines()) if r['run_id'] in planned}


def test_what_the_corrections_say_follows_from_the_records():
    values = read_json(ROOT / 'thesis/generated/values.json')
    names = ('mixed_kd', 'full_kd', 'mixed_student', 'full_student', 'baseline')
    for part in ('main', 'gpu'):
        runs = {arm: runs_of(arm, part) for arm in names}
        seeds = sorted(set.intersection(*(set(runs[arm]) for arm in names)))
        value = {arm: np.mean([runs[arm][s]['primary']['value'] for s in seeds]) for arm in names}
        found = value['mixed_kd'] - value['full_kd'] - value['mixed_student'] + value['full_student']
        assert values[f'{part}.interaction.difference.estimate'] == pytest.approx(found, abs=2e-5)
    runs = {arm: runs_of(arm) for arm in names}
    pair_f1 = [
        [r['metrics']['test']['pair_f1'] for _, r in sorted(runs[arm].items())]
        for arm in ('baseline', 'mixed_kd')
    ]
    found = values['main.decisions.procedure_3.pair_f1.difference.estimate']
    assert found == pytest.approx(np.mean(pair_f1[1]) - np.mean(pair_f1[0]))
    # of one machine: the seeds whose times the thesis rests on
    timed = [r for s, r in runs['mixed_kd'].items() if s < values['main.steps.precision.train_ratio.n']]
    own = values['main.transfer_s.student'] - values['main.transfer_s.teacher']
    extra = np.mean([r['time']['train_s'] + r['time']['teacher_s'] for r in timed])
    alone, whole = (values[f'main.costs.paid.mixed_kd.{k}.estimate'] for k in ('alone', 'with_transfer'))
    assert whole / alone == pytest.approx((extra + own) / extra, rel=1e-3)


# settings whose names are younger than the evidence; the layout, which is the machine's; and the seed
APART = {'document_title', 'teacher_questions', 'ranks', 'threads_per_rank', 'teacher_seed'}


@pytest.mark.parametrize('part', ['without_transfer', 'main'])
def test_the_readmes_command_has_the_settings_of_its_column(part):
    transfer, init = ('squad1', 'transferred') if part == 'main' else ('none', 'teacher_finetuned')
    for arm in ('baseline', 'full_student', 'mixed_student', 'full_kd', 'mixed_kd', 'mixed_baseline'):
        of_students = dict(student_init=init) if arm.endswith(('student', 'kd')) else {}
        config = make_config(mode=arm, corpus='wikiqa', transfer=transfer, **of_students)
        today = settings(resolve(config, Machine('cpu', cores=2, bf16=True), 'wikiqa', transfer))
        for record in runs_of(arm, part).values():
            then = {k: v for k, v in record['settings'].items() if k not in APART}
            assert then == {k: today[k] for k in then}


def test_no_chapter_chooses_one_of_two_tests_of_a_question():
    "What soft targets do is tested in fp32 and in mixed precision: words follow the verdict of both."
    for path in [*CHAPTERS, ROOT / 'thesis' / 'lib.typ']:
        chosen = re.findall(r'#?by\("(?:main|gpu)\.steps\.kd(?:_mixed)?\.verdict"', path.read_text())
        assert chosen == [], path.name


def test_an_estimate_without_its_n_stops_the_build(copy):
    values = read_json(ROOT / 'thesis' / 'generated' / 'values.json')
    assert th.with_sizes(values) is values
    with pytest.raises(th.ThesisError, match='main.steps.kd.difference is an estimate without its n'):
        th.with_sizes({k: v for k, v in values.items() if k != 'main.steps.kd.difference.n'})
    with pytest.raises(th.ThesisError, match='without its n'):
        th.with_sizes(values | {'main.steps.kd.difference.n': None})
    less = {k: v for k, v in values.items() if k != 'main.steps.kd.everywhere.n'}
    write_json(copy / 'thesis' / 'generated' / 'values.json', less)
    with pytest.raises(th.ThesisError, match="'main.steps.kd.everywhere' without its n"):
        th.compiled(copy)


@pytest.mark.exhaustive
def test_a_claim_without_its_development_part_stops_the_build(copy):
    parts = {name: PLAN['parts'][name] for name in ('main', 'transfer')}
    write_json(copy / 'thesis' / 'plan.json', PLAN | dict(parts=parts))
    path = copy / 'thesis' / 'data' / f'{MAIN}.units.csv.gz'
    (copy / 'thesis' / 'data' / f'{MAIN}.sha256').unlink()
    with gzip.open(path, 'rt') as f:
        head, *rows = f.read().splitlines()
    kept = [row for row in rows if row.split(',')[head.split(',').index('split')] != 'dev']
    assert 0 < len(kept) < len(rows)
    with gzip.open(path, 'wt') as f:
        f.write('\n'.join([head, *kept]) + '\n')
    with pytest.raises(
        KdnotesError, match='the claim about .* and .* rests on the test set alone: .* dev set'
    ):
        th.build(copy)


def test_the_pdf_says_it():
    if not shutil.which('pdftotext'):
        pytest.skip('pdftotext of poppler, which reads the text of a PDF, is not installed')
    text = subprocess.run(
        ['pdftotext', str(ROOT / 'thesis' / 'thesis.pdf'), '-'], capture_output=True, text=True, check=True
    ).stdout
    assert dict(shown(ROOT))['main.arms.mixed_kd.primary'] in ' '.join(text.split())
