"""From committed evidence to the thesis: every number generated, every missing run named."""

from __future__ import annotations
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
import pandas as pd
from kdnotes.analysis.compare import uncommitted
from kdnotes.analysis.in_use import MIB, in_use
from kdnotes.analysis.intervals import FEW_DIFFER, scaled
from kdnotes.analysis.coverage import ENOUGH_SEEDS
from kdnotes.core.config import KdnotesError
from kdnotes.core.files import at_home, read_json, root, with_evidence, write_json
from kdnotes.analysis.plotting import FigureFile, arms_of
from kdnotes.report.figures import draw_evidence
from kdnotes.analysis.evidence import Evidence, evidence
from kdnotes.records.store import predictions, records, units
from kdnotes.tasks.squad import answer_sentences
from kdnotes.analysis.energy import energy_values, measured_modes
from kdnotes.analysis.scaling_results import predictions as predicted_steps
from kdnotes.search.found import is_search, load_found
from kdnotes.search.summary import draw_found, runs_of, seed_values
from .facts import flat, peaks_table, settings_table, studies_table, table
from .facts import transfer_values, trial_values
from .labels import labels_values
from .language import batch_values, claims_values, language_values, of_one_rank
from .measured import MADE, ThesisError, texts_table, write_facts
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


class Part(NamedTuple):
    "A section that rests on the runs of one study."

    name: str  # in thesis/plan.json, and before its keys
    kind: str  # of VALUES: what is said of it
    transfer: str = 'transfer'  # the part that holds what its runs start from


PARTS = {
    part.name: part
    for part in (
        Part('main', 'study'),
        Part('without_transfer', 'study'),
        Part('without_bf16', 'study'),
        Part('gpu', 'study'),
        Part('tuning', 'trials'),
        Part('transfer', 'transfer'),
        Part('gpu_transfer', 'transfer'),
        Part('mlm', 'language'),
        Part('mlm_batch', 'batches'),
        Part('qa', 'questions', transfer='qa_transfer'),
        Part('qa_transfer', 'transfer'),
        Part('search', 'search', transfer='search_transfer'),
        Part('search_student', 'search', transfer='search_transfer'),
        Part('search_transfer', 'transfer'),
        Part('rates', 'rates'),
        Part('rates_embedded', 'rates'),
        # fp32 is beside itself with its sums in another order, as far as it was trained
        Part('rounding', 'rates'),
        Part('labels', 'labels'),
        # other texts, starts and settings, on a GPU
        Part('labels_gpu', 'labels', transfer='labels_teacher'),
        # where it pays: reviews, of which the teacher knows other labels
        Part('labels_imdb', 'labels', transfer='labels_imdb_teacher'),
        Part('labels_imdb_teacher', 'transfer'),
        # what was trained elsewhere for it: its teacher, and a student of the same pairs
        Part('labels_teacher', 'transfer'),
        Part('labels_rival', 'transfer'),
    )
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
            f'say so with: python -m thesis pin {PARTS[part].transfer}=<its study>'
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


class Given(NamedTuple):
    "What the values of a part are made from."

    part: Part
    runs: dict[str, list[dict]]  # part -> its records
    plan: dict  # thesis/plan.json
    facts: dict  # of `facts_of`
    where: Path  # the checkout

    @property
    def found(self) -> list[dict]:
        "The records of the part."
        return self.runs[self.part.name]

    @property
    def study(self) -> str:
        "The study they are of."
        return self.found[0]['study']

    @property
    def ids(self) -> list[str]:
        "Their run_ids."
        return [r['run_id'] for r in self.found]

    @property
    def units(self) -> pd.DataFrame:
        "Their per-unit values, as of `records.store.units`."
        return units(self.study, self.ids)

    @property
    def evidence(self) -> Evidence:
        "Their study with its comparisons."
        return evidence(self.study, self.ids)

    @property
    def figures(self) -> Path:
        "The folder of the figures of their study."
        return self.where / 'figures' / self.study


def placed(figures: Sequence[FigureFile], study: str) -> dict:
    "Figures that were drawn by name: a path from the checkout's root and a caption."
    return dict(
        figures={
            f.name: dict(path=f'/figures/{study}/{f.path.name}', caption=f.caption) for f in figures if f.path
        }
    )


def _study(its: Given) -> dict:
    e = its.evidence
    values = part_values(e, its.plan['aims'])
    if its.part.name == 'main':
        values['without_overlap'] = _without(e, its.facts['corpus'].get('overlap', {}).get('ids', ()))
        values['tables'] |= dict(
            use=models_table_in_use(e, its.facts.get('in_use', {})), settings=settings_table(e.records)
        )
    return values | placed(draw_evidence(e, its.figures), its.study)


def _language(its: Given) -> dict:
    e = of_one_rank(its.evidence)
    return language_values(e) | placed(draw_evidence(e, its.figures), its.study)


def _questions(its: Given) -> dict:
    e = of_one_rank(its.evidence)
    figures = draw_evidence(e, its.figures) + draw_questions(e, its.figures)
    return question_values(e) | placed(figures, its.study)


def _labels(its: Given) -> dict:
    e = its.evidence
    return labels_values(e) | placed(draw_evidence(e, its.figures), its.study)


def _by_rate(its: Given) -> dict:
    predicted = dict(list(predictions(its.study, its.ids).groupby('run_id')))
    rates = at_rates(its.found, its.units, predicted)
    scored = scored_questions(rates[0].fp32[0], predicted)
    drawn = placed([draw_rates(rates, its.figures, its.ids)], its.study)
    return rates_values(its.found, rates, scored) | drawn


def _searched(its: Given) -> dict:
    study, name = its.study, its.part.name
    if not is_search(study):
        raise ThesisError(
            f'thesis/data/{study}.search.json, what the search {study!r} has found, is not there; restore '
            f'it, or take the search out with: python -m thesis pin {name}='
        )
    of = load_found(study)
    if unknown := sorted({i for runs in of.seeds.values() for i in runs} - {*its.ids}):
        raise ThesisError(
            f'the search {study!r} rests on {", ".join(unknown)}, which thesis/plan.json does not name; pin '
            f'{name}={study} again'
        )
    runs = runs_of(of)
    figures = draw_found(of, seed_values(of, runs), its.figures)
    return search_values(of, its.found, runs, its.units) | placed(figures, study)


VALUES: dict[str, Callable[[Given], dict]] = dict(
    study=_study,
    language=_language,
    questions=_questions,
    labels=_labels,
    rates=_by_rate,
    search=_searched,
    # runs with no comparison of arms and no figure
    trials=lambda its: trial_values(its.found, its.units, its.runs['main']),
    batches=lambda its: batch_values(its.found, its.units),
    transfer=lambda its: transfer_values(its.found),
)


def corpus_table(facts: dict) -> pd.DataFrame:
    "Counts of the corpus: a row a split, text."
    titles = dict(
        questions='questions', answered='answered', clean='clean', pairs='pairs', positives='correct pairs'
    )
    return table(
        [dict(split=split) | facts['corpus']['splits'][split] for split in ('train', 'dev', 'test')],
        {'': '{split}'} | {title: f'{{{key}:,}}' for key, title in titles.items()},
    )


def models_table_in_use(e: Evidence, times: dict) -> pd.DataFrame:
    "What each arm's model is for its user; times are those of `bench.sizes.answer_times`, {}: not measured."
    shares = in_use(e).shares
    rows = [
        dict(arm=arm, n=runs[0]['params_total'], share=share and scaled(share, 100.0))
        | dict(ms=times[runs[0]['factors']['network']]['value'] if times else None)
        for (arm, runs), share in zip(e.arms.items(), map(shares.get, e.arms))
    ]
    return table(
        rows,
        {
            'arm': '{arm}',
            'parameters, M': lambda row: f'{row["n"] / 1e6:.1f}',
            'weights, MiB': lambda row: f'{4 * row["n"] / MIB:.0f}',
            'a question, ms': '{ms:.1f}',
            "of its teacher's gain, %": '{share:.1f}',
        },
    )


def _without(e: Evidence, questions: Sequence[str]) -> dict:
    "What the arms reach on the other questions: left: how many; arm -> mean of the primary metric."
    p = e.records[0]['primary']
    rows = e.units[
        (e.units['split'] == p['set']) & (e.units['metric'] == p['metric']) & ~e.units['unit'].isin(questions)
    ]
    return dict(left=rows['unit'].nunique(), **rows.groupby('arm')['value'].mean())


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


def _race(bert: dict) -> dict[str, dict]:
    "The race on a GPU: contestant -> format, examples_per_s, joules (an example; None: not measured)."
    places = {name: bert['head'].index(name) for name in ('format', 'examples/s', 'J / example')}

    def number(text: str) -> float | None:
        return None if text == '-' else float(text.replace(',', ''))

    found = {}
    for row in bert['rows']:
        fmt, speed, joules = (row[k] for k in places.values())
        found[row[0]] = dict(format=fmt, examples_per_s=number(speed), joules=number(joules))
    return found


FORMATS_RACED = dict(bf16='kdnotes', fp16='kdnotes_fp16', tf32='kdnotes_tf32')  # beside kdnotes_fp32


def _beside_fp32(race: dict[str, dict]) -> dict:
    "The same training in each format beside fp32: speed and joules, as ratios; and the range of the speeds."
    base = race['kdnotes_fp32']
    found = {
        fmt: dict(speed=race[name]['examples_per_s'] / base['examples_per_s'])
        | dict(joules=race[name]['joules'] / base['joules'])
        for fmt, name in FORMATS_RACED.items()
    }
    speeds = [of['speed'] for of in found.values()]
    slower = all(speed < 1 for speed in speeds)
    ours = race['kdnotes']['examples_per_s']
    return found | dict(
        low=min(speeds),
        high=max(speeds),
        verdict='slower' if slower else 'not_slower',
        kd_beside_none=ours / race['student_alone']['examples_per_s'],
        beside_hf_best=ours / race['hf_best']['examples_per_s'],
    )


def _missed(ratios: Mapping[str, Any]) -> dict[str, int]:
    "How many aims a race had, and how many of them it missed."
    reached = [of for key, of in ratios.items() if key.endswith('.reached')]
    return dict(n=len(reached), missed=reached.count(False))


KD_PARTS = ('main', 'gpu')  # which ask on the same questions what soft targets add


def _scope(facts: dict, runs: dict[str, list[dict]]) -> tuple[dict, pd.DataFrame]:
    "What formats reach of the devices, in few numbers and as a table."
    modes = measured_modes(facts['gpu']['energy'])
    race = _race(facts['gpu']['bert'])
    steps = {size: race[name] for size, name in dict(small='kdnotes', large='kdnotes_256').items()}
    peaks = facts['peaks']
    on_cpu = arms_of(evidence(runs['main'][0]['study'], [r['run_id'] for r in runs['main']]).times.runs)
    values = dict(
        gpu_ratio=peaks['gpu']['fp16'] / peaks['gpu']['fp32'],
        cpu_ratio=peaks['cpu']['bf16'] / peaks['cpu']['fp32'],
        busy={mode: f'{of["busy"]:.0f}' for mode, of in modes.items()},
        steps=steps | dict(faster=steps['large']['examples_per_s'] / steps['small']['examples_per_s']),
        race=_beside_fp32(race),
    )
    return values, peaks_table(peaks, on_cpu, arms_of(runs['gpu']), modes)


def all_values(where: Path, plan: dict, facts: dict, runs: dict[str, list[dict]]) -> dict:
    "Every value, of all parts and beside them."
    results = facts.pop('scaling')
    made = {name: VALUES[PARTS[name].kind](Given(PARTS[name], runs, plan, facts, where)) for name in runs}
    predicted = predicted_steps(results)
    drawn = draw_scaling(results, predicted, where / 'figures' / 'scaling')
    scope, peaks = _scope(facts, runs)
    # a run of one name may stand in two studies, made on two machines
    every = {(r['study'], r['run_id']): r for found in runs.values() for r in found}
    on_gpu = [r for r in every.values() if r['environment']['device'].startswith('NVIDIA')]
    others = [row['value'] for row in plan['published']]
    ours = made['main']['arms']['baseline']['primary'].estimate
    pairs = inspect.signature(answer_sentences).parameters
    decided = {'when': '{when}', 'decided': '{what}', 'known by then': '{known}'}
    decisions = read_json(where / 'thesis' / 'decided.json')['decisions']
    return made | dict(
        aims=plan['aims'] | dict(margin=MARGINS[0], strict_margin=MARGINS[1]),
        alpha=0.05,
        enough_seeds=ENOUGH_SEEDS,
        few_differ=FEW_DIFFER,
        facts=facts,
        studied=STUDIED,
        scope=scope,
        pairs={name: pairs[name].default for name in ('per_paragraph', 'held_out')},
        n_runs=len(every),
        n_studies=len({part['study'] for part in plan['parts'].values()}),
        uncommitted=sum(map(uncommitted, every.values())),
        # of the runs on a GPU
        uncommitted_gpu=dict(of=len(on_gpu), runs=sum(map(uncommitted, on_gpu)))
        | dict(all='yes' if all(map(uncommitted, on_gpu)) else 'no'),
        race_aims=_missed(facts['bench']['race']['ratios']),
        level=dict(lowest=min(others), highest=max(others))
        | dict(least=100 * (min(others) - ours), most=100 * (max(others) - ours)),
        kd=pooled_soft_targets(
            [
                (arms_of(runs[part]), units(runs[part][0]['study'], [r['run_id'] for r in runs[part]]))
                for part in KD_PARTS
            ]
        ),
        claims=claims_values(made['mlm']['order'], made['mlm_batch'], facts),
        gpu_energy=energy_values(facts['gpu']['energy'], {key: STEPS[key] for key in PRECISION_STEPS}),
        scaling=scaling_values(results, predicted) | placed(drawn, 'scaling'),
        tables=dict(
            studies=studies_table(runs.values()),
            peaks=peaks,
            corpus=corpus_table(facts),
            texts=texts_table(facts['texts']),
            decisions=table(decisions, decided),
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
