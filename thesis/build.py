"""From committed evidence to the thesis: every number generated, every missing run named."""

from __future__ import annotations
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
import pandas as pd
from kdnotes.stats.compare import uncommitted
from kdnotes.stats.comparable import timed
from kdnotes.stats.intervals import FEW_DIFFER
from kdnotes.stats.coverage import ENOUGH_SEEDS
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import at_home, read_json, root, with_evidence, write_json
from kdnotes.report.plotting import FigureFile
from kdnotes.results.table import arms_of
from kdnotes.report.figures import draw_evidence
from kdnotes.stats.evidence import Evidence, evidence
from kdnotes.results.store import predictions, records, units
from kdnotes.tasks.squad import answer_sentences
from kdnotes.stats.energy import energy_values, measured_modes
from kdnotes.scaling.measured import predictions as predicted_steps
from kdnotes.search.found import is_search, load_found
from kdnotes.search.summary import draw_found, runs_of, seed_values
from .facts import flat, peaks_rows, settings_rows, study_row, transfer_values, trial_values
from .labels import labels_values
from .language import batch_values, claims_values, language_values, of_one_rank
from .measured import MADE, ThesisError, write_facts
from .questions import draw_questions, question_values
from .rates import at_rates, draw_rates, rates_values, scored_questions
from .scaling import draw_scaling, scaling_values
from .search import STUDIED, search_values
from .steps import MARGINS, PRECISION_STEPS, STEPS, pooled_soft_targets
from .values import part_values


@contextmanager
def evidence_alone(where: Path) -> Iterator[Path]:  # an empty home beside its evidence
    "Make the library see the committed evidence and no runs."
    with TemporaryDirectory() as folder, at_home(with_evidence(folder, where)) as home:
        yield home


# a section that rests on the runs of one study: its name in thesis/plan.json -> its kind
PARTS = {
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
    # fp32 is beside itself with its sums in another order, as far as it was trained
    'rounding': 'rates',
    'labels': 'labels',
    # other texts, starts and settings, on a GPU
    'labels_gpu': 'labels',
    # where it pays: reviews, of which the teacher knows other labels
    'labels_imdb': 'labels',
    'labels_imdb_teacher': 'transfer',
    # what was trained elsewhere for it: its teacher, and a student of the same pairs
    'labels_teacher': 'transfer',
    'labels_rival': 'transfer',
}
TRANSFERS = {  # part -> the part that holds what its runs start from, if not 'transfer'
    'qa': 'qa_transfer',
    'search': 'search_transfer',
    'search_student': 'search_transfer',
    'labels_gpu': 'labels_teacher',
    'labels_imdb': 'labels_imdb_teacher',
}


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
            "not have it; restore it, or say anew what the thesis rests on with: python -m "
            f"thesis pin {part}={study}"
        )
    found = [known[i] for _, _, i in runs]
    for (arm, seed, i), r in zip(runs, found):
        if (r['arm'], str(r['seed'])) != (arm, seed.split()[0]):
            raise ThesisError(
                f"run {i} is arm {r['arm']}, seed {r['seed']} in its record and arm {arm}, seed {seed} "
                f"in thesis/plan.json; pin {part}={study} again"
            )
    return found


def _check_starts(plan: dict, part: str, found: Sequence[dict]) -> None:
    "Runs that gave others their first weights are among what the thesis rests on."
    known = {i for other in PARTS for *_, i in planned(plan, other)}
    if lost := sorted({i for r in found if (i := r['initial'].get('transfer_run_id')) and i not in known}):
        raise ThesisError(
            f"{found[0]['run_id']} starts from {', '.join(lost)}, which thesis/plan.json does not name; "
            f'say so with: python -m thesis pin {TRANSFERS.get(part, "transfer")}=<its study>'
        )


def _by_seed(runs: Sequence[dict]) -> dict[str, str]:
    "Seed -> run_id; trials, which share a seed, have more behind it."
    seeds = [r['seed'] for r in runs]
    more = {r['run_id']: f" {r['run_id'].rpartition('-')[2]}" * (seeds.count(r['seed']) > 1) for r in runs}
    return {f"{r['seed']}{more[r['run_id']]}": r['run_id'] for r in runs}


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
                f'no run of study {study!r} is in {where / "thesis" / "data"}; train it first, its runs '
                'are exported as they end'
            )

        plan['parts'][part] = dict(
            study=study, runs={arm: _by_seed(runs) for arm, runs in arms_of(found).items()}
        )
    return write_json(path, plan)


def facts_of(where: Path) -> dict:
    "All facts in the evidence of a checkout."
    files = sorted((where / 'thesis' / 'data').glob('*.json'))
    return {p.stem: read_json(p) for p in files if not p.name.endswith('.search.json')}


def compiled(where: Path) -> bytes:
    "The PDF of a checkout's thesis as typst sets it, or a `ThesisError`."
    import typst

    source = where / 'thesis' / 'thesis.typ'
    try:
        pdf, warnings = typst.compile_with_warnings(str(source), root=str(where), ignore_system_fonts=True)
    except typst.TypstError as e:
        raise ThesisError(
            f"typst stops: {re.sub('^(assertion failed|panicked with): ', '', e.message)}"
        ) from None
    if warnings:
        raise ThesisError(
            f"typst warns, and a thesis has no warnings: {'; '.join(w.message for w in warnings)}"
        )
    return pdf


@dataclass(frozen=True)
class Given:
    "What the values of a part are made from."

    part: str  # of PARTS
    found: list[dict]  # its records
    plan: dict  # thesis/plan.json
    facts: dict  # of `facts_of`
    where: Path  # the checkout

    @property
    def study(self) -> str:
        "The study of its runs."
        return self.found[0]['study']

    @property
    def ids(self) -> list[str]:
        "Their run_ids."
        return [r['run_id'] for r in self.found]

    @cached_property
    def units(self) -> pd.DataFrame:
        "Their per-unit values, as of `results.store.units`."
        return units(self.study, self.ids)

    @cached_property
    def evidence(self) -> Evidence:
        "Their study with its comparisons."
        e = evidence(self.study, self.ids)
        return of_one_rank(e) if PARTS[self.part] in ('language', 'questions') else e

    @property
    def figures(self) -> Path:
        "The folder of the figures of their study."
        return self.where / 'figures' / self.study


def placed(figures: Sequence[FigureFile], study: str) -> dict:
    "Figures that were drawn by name: a path from the checkout's root."
    drawn = [f for f in figures if f.path]
    return dict(figures={f.name: dict(path=f'/figures/{study}/{f.path.name}') for f in drawn})


def _study(its: Given) -> dict:
    e = its.evidence
    values = part_values(e, its.plan['aims'])
    if its.part == 'main':
        # what the arms reach on the questions whose sentences the transfer's corpus does not have
        p = e.records[0]['primary']
        seen = e.units['unit'].isin(its.facts['corpus'].get('overlap', {}).get('ids', ()))
        rows = e.units[(e.units['split'] == p['set']) & (e.units['metric'] == p['metric']) & ~seen]
        means = rows.groupby('arm')['value'].mean()
        values['without_overlap'] = dict(left=rows['unit'].nunique(), **means)
        values['tables']['settings'] = settings_rows(e.records)
    return values | placed(draw_evidence(e, its.figures), its.study)


def _questions(its: Given) -> dict:
    figures = draw_evidence(its.evidence, its.figures) + draw_questions(its.evidence, its.figures)
    return question_values(its.evidence) | placed(figures, its.study)


def _by_rate(its: Given) -> dict:
    predicted = dict(list(predictions(its.study, its.ids).groupby('run_id')))
    rates = at_rates(its.found, its.units, predicted)
    scored = scored_questions(rates[0].fp32[0], predicted)
    drawn = placed([draw_rates(rates, its.figures, its.ids)], its.study)
    return rates_values(its.found, rates, scored) | drawn


def _searched(its: Given) -> dict:
    study = its.study
    if not is_search(study):
        raise ThesisError(
            f'thesis/data/{study}.search.json, what the search {study!r} has found, is not there; restore '
            f'it, or take the search out with: python -m thesis pin {its.part}='
        )
    of = load_found(study)
    if unknown := sorted({i for runs in of.seeds.values() for i in runs} - {*its.ids}):
        raise ThesisError(
            f'the search {study!r} rests on {", ".join(unknown)}, which thesis/plan.json does not name; pin '
            f'{its.part}={study} again'
        )
    runs = runs_of(of)
    figures = draw_found(of, seed_values(of, runs), its.figures)
    return search_values(of, its.found, runs, its.units) | placed(figures, study)


def _drawn(values: Callable[[Evidence], dict]) -> Callable[[Given], dict]:
    "Values of a study with the figures that every study has."
    return lambda its: values(its.evidence) | placed(draw_evidence(its.evidence, its.figures), its.study)


VALUES: dict[str, Callable[[Given], dict]] = dict(
    study=_study,
    language=_drawn(language_values),
    questions=_questions,
    labels=_drawn(labels_values),
    rates=_by_rate,
    search=_searched,
    # runs with no comparison of arms and no figure
    batches=lambda its: batch_values(its.found, its.units),
    transfer=lambda its: transfer_values(its.found),
)


def with_sizes(values: dict[str, Any]) -> dict[str, Any]:
    "The same flat values; an estimate that does not say how many runs it rests on is refused."
    for key in values:
        name, _, last = key.rpartition('.')
        if last == 'estimate' and not values.get(f'{name}.n'):
            raise ThesisError(
                f'{name} is an estimate without its n, the number of runs that it rests on; '
                'generate an Interval'
            )
    return values


FORMATS_RACED = dict(bf16='kdnotes', fp16='kdnotes_fp16', tf32='kdnotes_tf32')  # beside kdnotes_fp32


def race_values(bert: dict) -> dict:
    """The race on a GPU: steps: the usual and larger ones; race: the same training in each format beside
    fp32: speed and joules, as ratios; low and high: the range of the speeds.
    """

    def number(text: str) -> float | None:  # None: not measured
        return None if text == '-' else float(text.replace(',', ''))

    rows = {cells[0]: dict(zip(bert['head'], cells)) for cells in bert['rows']}
    race = {
        name: dict(format=row['format'], joules=number(row['J / example']))
        | dict(examples_per_s=number(row['examples/s']))
        for name, row in rows.items()
    }
    small, large, base = (race[name] for name in ('kdnotes', 'kdnotes_256', 'kdnotes_fp32'))
    found = {
        fmt: dict(
            speed=race[name]['examples_per_s'] / base['examples_per_s'],
            joules=race[name]['joules'] / base['joules'],
        )
        for fmt, name in FORMATS_RACED.items()
    }
    speeds = [of['speed'] for of in found.values()]
    ours = small['examples_per_s']
    return dict(
        steps=dict(small=small, large=large, faster=large['examples_per_s'] / ours),
        race=found
        | dict(
            low=min(speeds),
            high=max(speeds),
            verdict='slower' if max(speeds) < 1 else 'not_slower',
            kd_beside_none=ours / race['student_alone']['examples_per_s'],
            beside_hf_best=ours / race['hf_best']['examples_per_s'],
        ),
    )


KD_PARTS = ('main', 'gpu')  # which ask on the same questions what soft targets add


def all_values(where: Path, plan: dict, facts: dict, runs: dict[str, list[dict]]) -> dict:
    "Every value, of all parts and beside them."
    results = facts.pop('scaling')
    given = {name: Given(name, found, plan, facts, where) for name, found in runs.items()}
    made = {}
    for name, its in given.items():
        if PARTS[name] == 'trials':
            made[name] = trial_values(its.found, its.units, runs['main'])
        else:
            made[name] = VALUES[PARTS[name]](its)
    modes = measured_modes(facts['gpu']['energy'])
    energy = energy_values(facts['gpu']['energy'], {key: STEPS[key] for key in PRECISION_STEPS})
    predicted = predicted_steps(results)
    scaling = scaling_values(results, predicted)
    drawn = draw_scaling(results, predicted, scaling['answer']['faster'], where / 'figures' / 'scaling')
    peaks = facts['peaks']
    # a run of one name may stand in two studies, made on two machines
    every = {(r['study'], r['run_id']): r for found in runs.values() for r in found}
    on_gpu = [r for r in every.values() if r['environment']['device'].startswith('NVIDIA')]
    others = [row['value'] for row in plan['published']]
    ours = made['main']['arms']['baseline']['primary'].estimate
    pairs = inspect.signature(answer_sentences).parameters
    raced = [of for key, of in facts['bench']['race']['ratios'].items() if key.endswith('.reached')]
    return made | dict(
        aims=plan['aims'] | dict(margin=MARGINS[0], strict_margin=MARGINS[1]),
        alpha=0.05,
        enough_seeds=ENOUGH_SEEDS,
        few_differ=FEW_DIFFER,
        facts=facts,
        studied=STUDIED,
        scope=dict(
            gpu_ratio=peaks['gpu']['fp16'] / peaks['gpu']['fp32'],
            cpu_ratio=peaks['cpu']['bf16'] / peaks['cpu']['fp32'],
            busy={mode: of['busy'] for mode, of in modes.items()},
        )
        | race_values(facts['gpu']['bert']),
        pairs={name: pairs[name].default for name in ('per_paragraph', 'held_out')},
        n_runs=len(every),
        n_studies=len({part['study'] for part in plan['parts'].values()}),
        uncommitted=sum(map(uncommitted, every.values())),
        # of the runs on a GPU
        uncommitted_gpu=dict(of=len(on_gpu), runs=sum(map(uncommitted, on_gpu)))
        | dict(all='yes' if all(map(uncommitted, on_gpu)) else 'no'),
        race_aims=dict(n=len(raced), missed=raced.count(False)),
        level=dict(lowest=min(others), highest=max(others))
        | dict(least=100 * (min(others) - ours), most=100 * (max(others) - ours)),
        kd=pooled_soft_targets([given[part].evidence for part in KD_PARTS]),
        claims=claims_values(made['mlm']['order'], made['mlm_batch'], facts),
        gpu_energy={name: of for name, of in energy.items() if name != 'table'},
        scaling=scaling | placed(drawn, 'scaling'),
        tables=dict(
            studies=[study_row(found) for found in runs.values()],
            peaks=peaks_rows(peaks, arms_of(timed(runs['main']).runs), given['gpu'].evidence.arms, modes),
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
        # of all parts, before anything is made
        runs = {part: part_records(plan, part) for part in PARTS if part in plan['parts']}
        for part, found in runs.items():
            _check_starts(plan, part, found)
        values = all_values(where, plan, facts_of(where), runs)
    write_json(thesis / 'generated' / 'values.json', with_sizes(flat(values)))
    pdf.write_bytes(compiled(where))
    return pdf


USAGE = (
    f'usage: python -m thesis build | pin main=<study> '
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
