"""From committed evidence to the thesis: every number generated, every missing run named."""

from __future__ import annotations
import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import at_home, read_json, root, with_evidence, write_json
from kdnotes.report.figures import draw_evidence
from kdnotes.report.plotting import FigureFile
from kdnotes.results.store import predictions, records, units
from kdnotes.results.table import arms_of
from kdnotes.scaling.steptime import predictions as predicted_steps
from kdnotes.stats.comparable import timed
from kdnotes.stats.coverage import ENOUGH_SEEDS
from kdnotes.stats.evidence import evidence
from kdnotes.stats.intervals import FEW_DIFFER
from kdnotes.tasks.candidates import answer_sentences
from .facts import (
    ThesisError,
    energy_values,
    flat,
    measured_modes,
    peaks_rows,
    race_values,
    settings_rows,
    study_row,
    transfer_values,
    trial_values,
    uncommitted,
    without_overlap,
)
from .labels import labels_values
from .language import batch_values, claims_values, language_values, of_one_rank
from .measured import MADE, write_facts
from .questions import draw_questions, question_values
from .rates import at_rates, draw_rates, rates_values
from .scaling import draw_scaling, scaling_values
from .search import STUDIED, draw_searched, load_searched, search_values
from .steps import MARGINS, PRECISION_STEPS, STEPS, pooled_soft_targets
from .values import part_values

PARTS = {  # a section that rests on the runs of one study: its name in thesis/plan.json -> its kind
    'main': 'study',
    'without_transfer': 'study',
    'without_bf16': 'study',
    'gpu': 'study',
    'tuning': 'trials',
    'transfer': 'transfer',
    'gpu_transfer': 'transfer',
    'mlm': 'language',
    'mlm_batch': 'batches',
    'qa': 'questions',
    'qa_transfer': 'transfer',
    'search': 'search',
    'search_student': 'search',
    'search_transfer': 'transfer',
    'rates': 'rates',
    'rates_embedded': 'rates',
    'rounding': 'rates',  # fp32 and the same with its sums in another order
    'labels': 'labels',
    'labels_gpu': 'labels',
    'labels_imdb': 'labels',
    'labels_imdb_teacher': 'transfer',
    'labels_teacher': 'transfer',
    'labels_rival': 'transfer',
}
KD_PARTS = ('main', 'gpu')  # which ask on the same questions what soft targets add


@contextmanager
def evidence_alone(where: Path) -> Iterator[Path]:  # an empty home beside its evidence
    "Make the library see the committed evidence and no runs."
    with TemporaryDirectory() as folder, at_home(with_evidence(folder, where)) as home:
        yield home


def planned(plan: dict, part: str) -> list[tuple[str, str, str]]:
    "The runs a part rests on: (arm, seed, run_id), the seed of a trial with more behind it."
    runs = plan['parts'].get(part, {}).get('runs', {})
    return [(arm, seed, i) for arm, by_seed in runs.items() for seed, i in by_seed.items()]


def part_records(plan: dict, part: str) -> list[dict]:
    "The records of a part, or a `ThesisError` that names each run that is missing."
    study = plan['parts'][part]['study']
    runs = planned(plan, part)
    known = {r['run_id']: r for r in records(study)}
    if missing := [f'{i} (arm {arm}, seed {seed})' for arm, seed, i in runs if i not in known]:
        raise ThesisError(
            f"the thesis rests on run {', '.join(missing)}, and thesis/data/{study}.records.jsonl does "
            f'not have it; restore it, or pin the runs that are there: python -m thesis pin {part}={study}'
        )
    found = [known[i] for *_, i in runs]
    every = {i for other in plan['parts'] for *_, i in planned(plan, other)}
    for r, (arm, seed, i) in zip(found, runs):
        if (r['arm'], str(r['seed'])) != (arm, seed.split()[0]):
            raise ThesisError(
                f"run {i} is arm {r['arm']}, seed {r['seed']} in its record and arm {arm}, seed {seed} "
                f"in thesis/plan.json; pin {part}={study} again"
            )
        start = r['initial'].get('transfer_run_id')
        if start and start not in every:
            raise ThesisError(f'{i} starts from {start}, which thesis/plan.json does not name; pin its study')
    return found


def pin(
    where: Path,  # the checkout
    studies: dict[str, str],  # part -> study; parts that are not named stay as they are; '' takes one out
) -> Path:  # thesis/plan.json
    "Write down which runs the thesis rests on: all of these studies that are in the evidence."
    path = where / 'thesis' / 'plan.json'
    plan = read_json(path)
    for part, study in studies.items():
        if part not in PARTS:
            raise ThesisError(f"there is no part {part!r} of the thesis; the parts are {', '.join(PARTS)}")
        plan['parts'].pop(part, None)
        if not study:
            continue
        with evidence_alone(where):
            found = records(study)
        if not found:
            raise ThesisError(
                f'no run of study {study!r} is in {where / "thesis" / "data"}; train it, then save its runs '
                f'with: kdnotes evidence {study}'
            )
        by_arm: dict[str, dict[str, str]] = {}
        for arm, runs in arms_of(found).items():
            seeds = [r['seed'] for r in runs]
            for r in runs:  # trials, which share a seed, have more behind it
                more = f" {r['run_id'].rpartition('-')[2]}" * (seeds.count(r['seed']) > 1)
                by_arm.setdefault(arm, {})[f"{r['seed']}{more}"] = r['run_id']
        plan['parts'][part] = dict(study=study, runs=by_arm)
    return write_json(path, plan)


def compiled(where: Path) -> bytes:
    "The PDF of a checkout's thesis as typst sets it, or a `ThesisError`."
    import typst

    source = where / 'thesis' / 'thesis.typ'
    try:
        pdf, warnings = typst.compile_with_warnings(str(source), root=str(where), ignore_system_fonts=True)
    except typst.TypstError as e:
        why = re.sub('^(assertion failed|panicked with): ', '', e.message)
        raise ThesisError(f'typst stops: {why}') from None
    if warnings:
        raise ThesisError(f"typst warns: {'; '.join(w.message for w in warnings)}")
    return pdf


def figure_paths(figures: Sequence[FigureFile], study: str) -> dict:  # name -> path from the checkout's root
    "Where the figures of a study are."
    return dict(figures={f.name: dict(path=f'/figures/{study}/{f.path.name}') for f in figures if f.path})


def values_of(part: str, found: list[dict], plan: dict, where: Path) -> dict:
    "All values of a part, which rests on these records; its figures are drawn."
    kind, study = PARTS[part], found[0]['study']
    if kind == 'transfer':
        return transfer_values(found)
    ids = [r['run_id'] for r in found]
    folder = where / 'figures' / study
    its_units = units(study, ids)
    if kind == 'batches':
        return batch_values(found, its_units)
    if kind == 'trials':
        return trial_values(found, its_units, part_records(plan, 'main'))
    if kind == 'search':
        search = load_searched(study, part, ids)
        values = search_values(search, found, its_units)
        return values | figure_paths(draw_searched(search, folder), study)
    if kind in ('study', 'rates'):
        predicted = dict(list(predictions(study, ids).groupby('run_id')))
    if kind == 'rates':
        rates = at_rates(found, its_units, predicted)
        return rates_values(found, rates, predicted) | figure_paths(draw_rates(rates, folder, ids), study)
    e = evidence(study, ids)
    if kind in ('language', 'questions'):
        e = of_one_rank(e)
    figures = draw_evidence(e, folder)
    if kind == 'questions':
        values = question_values(e)
        figures += draw_questions(e, folder)
    elif kind == 'study':
        values = part_values(e, plan['aims'], predicted)
    else:
        values = dict(language=language_values, labels=labels_values)[kind](e)
    return values | figure_paths(figures, study)


def with_sizes(values: dict[str, Any]) -> dict[str, Any]:
    "The same flat values; an estimate that does not state how many runs it rests on is refused."
    for key in values:
        name, _, last = key.rpartition('.')
        if last == 'estimate' and not values.get(f'{name}.n'):
            raise ThesisError(
                f'{name} is an estimate without its n, the number of runs that it rests on; '
                'generate an Interval'
            )
    return values


def all_values(where: Path, plan: dict) -> dict:
    "Every value, of all parts and besides."
    files = sorted((where / 'thesis' / 'data').glob('*.json'))
    facts = {p.stem: read_json(p) for p in files if not p.name.endswith('.search.json')}
    results = facts.pop('scaling')
    # of all parts, before anything is made
    runs = {part: part_records(plan, part) for part in PARTS if part in plan['parts']}
    made = {part: values_of(part, found, plan, where) for part, found in runs.items()}
    ids = {part: [r['run_id'] for r in runs[part]] for part in KD_PARTS}
    asked = [(runs[part], units(runs[part][0]['study'], ids[part])) for part in KD_PARTS]
    made['main']['without_overlap'] = without_overlap(*asked[0], facts['corpus']['overlap']['ids'])
    made['main']['tables']['settings'] = settings_rows(runs['main'])
    peaks = facts['peaks']
    modes = measured_modes(facts['gpu']['energy'])
    predicted = predicted_steps(results)
    drawn = draw_scaling(results, predicted, where / 'figures' / 'scaling')
    # a run of one name may stand in two studies, made on two machines
    every = {(r['study'], r['run_id']): r for found in runs.values() for r in found}.values()
    on_gpu = [uncommitted(r) for r in every if r['environment']['device'].startswith('NVIDIA')]
    others = [row['value'] for row in plan['published']]
    ours = made['main']['arms']['baseline']['primary'].estimate
    pairs = inspect.signature(answer_sentences).parameters
    raced = [of for key, of in facts['bench']['race']['ratios'].items() if key.endswith('.reached')]
    on_cpu = arms_of(timed(runs['main']).runs)
    return made | dict(
        aims=plan['aims'] | dict(margin=MARGINS[0], strict_margin=MARGINS[1]),
        alpha=0.05,
        enough_seeds=ENOUGH_SEEDS,
        few_differ=FEW_DIFFER,
        facts=facts,
        studied=STUDIED,
        scope=race_values(facts['gpu']['bert'])
        | dict(
            gpu_ratio=peaks['gpu']['fp16'] / peaks['gpu']['fp32'],
            cpu_ratio=peaks['cpu']['bf16'] / peaks['cpu']['fp32'],
            busy={mode: of['busy'] for mode, of in modes.items()},
        ),
        pairs={name: pairs[name].default for name in ('per_paragraph', 'held_out')},
        n_runs=len(every),
        n_studies=len({r['study'] for r in every}),
        uncommitted=sum(map(uncommitted, every)),
        uncommitted_gpu=dict(of=len(on_gpu), runs=sum(on_gpu), all='yes' if all(on_gpu) else 'no'),
        race_aims=dict(n=len(raced), missed=raced.count(False)),
        level=dict(lowest=min(others), highest=max(others))
        | dict(least=100 * (min(others) - ours), most=100 * (max(others) - ours)),
        kd=pooled_soft_targets(asked),
        claims=claims_values(made['mlm']['order'], made['mlm_batch'], facts),
        gpu_energy=energy_values(modes, {key: STEPS[key] for key in PRECISION_STEPS}),
        scaling=scaling_values(results, predicted) | figure_paths(drawn, 'scaling'),
        tables=dict(
            studies=[study_row(found) for found in runs.values()],
            peaks=peaks_rows(peaks, on_cpu, arms_of(runs['gpu']), modes),
            modes=[dict(mode=mode) | of for mode, of in modes.items()],
        ),
    )


def build(where: Path) -> Path:  # thesis/thesis.pdf
    "Delete and make again the generated values, the figures and the PDF."
    thesis = where / 'thesis'
    plan = read_json(thesis / 'plan.json')
    pdf = thesis / 'thesis.pdf'
    pdf.unlink(missing_ok=True)
    shutil.rmtree(thesis / 'generated', ignore_errors=True)
    for study in (*(part['study'] for part in plan['parts'].values()), 'scaling'):
        shutil.rmtree(where / 'figures' / study, ignore_errors=True)
    with evidence_alone(where):
        values = with_sizes(flat(all_values(where, plan)))
    write_json(thesis / 'generated' / 'values.json', values)
    pdf.write_bytes(compiled(where))
    return pdf


USAGE = (
    'usage: python -m thesis build | pin main=<study> '
    f"{' '.join(f'[{part}=<study>]' for part in [*PARTS][1:])} | "
    f"facts {' | '.join(MADE)} | <bench.json, scaling.json or gpu_check.json> ..."
)


def main(
    arguments: Sequence[str] | None = None,  # None: those of the command line
) -> int:  # exit status
    "build | pin part=study ... | facts source ..."
    command, *rest = arguments if arguments is not None else sys.argv[1:] or ['build']
    try:
        if {'-h', '--help'} & {command, *rest}:
            print(USAGE)
        elif command == 'build' and not rest:
            print(build(root()))
        elif command == 'pin' and rest and all('=' in a for a in rest):
            print(pin(root(), dict(a.split('=', 1) for a in rest)))
        elif command == 'facts' and rest:
            print(*write_facts(root(), rest), sep='\n')
        else:
            raise ThesisError(USAGE)
    except KdnotesError as e:
        print(e, file=sys.stderr)
        return 1
    return 0
