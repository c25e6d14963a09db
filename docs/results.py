"Pages about the committed evidence: each study's headline, tables and figures."

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from docs.findings import finding
from docs.markdown import code, comment, directive, escaped, table
from kdnotes.report.figures import FIGURES, draw_evidence
from kdnotes.report.page import Page, Part, Table, page_of, runs_table
from kdnotes.report.plotting import FigureFile
from kdnotes.stats.evidence import Evidence, ReportError, evidence
from kdnotes.results.store import predictions, records
from kdnotes.search.pictures import PICTURES
from kdnotes.search.result import is_search, load_result
from kdnotes.search.summary import search_page
from thesis.questions import QUESTION_FIGURES


@dataclass(frozen=True)
class StudyPage:
    "A study's page, and its line in the list of all."

    study: str
    text: str  # Markdown
    line: tuple[str, ...]  # of `COLUMNS`, Markdown


LONGEST_NUMBER = 18  # characters of a number with its interval; what is longer may be broken
MOST_COLUMNS = 7  # of a table, beside its first
RATES = (
    'How much logits, and the questions whose metric differs, change with the number format and with the '
    'dropout masks, at each learning rate.'
)
READING = '[What the arms are, and how to read a comparison](/howto/comparisons.ipynb).'
COLUMNS = ('study', 'task', 'corpus', 'runs', 'seeds', 'finding')


def studies(root: Path) -> list[str]:
    "Studies of which there is evidence."
    return sorted(
        p.name.removesuffix('.records.jsonl') for p in (root / 'thesis' / 'data').glob('*.records.jsonl')
    )


def manifest_of(root: Path, study: str) -> dict[str, dict]:
    "The manifest of a study's committed figures; empty if it has none."
    path = root / 'figures' / study / 'MANIFEST.json'
    return json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}


def committed_figures(
    root: Path,
    study: str,
    captions: Mapping[str, Callable[[], str]],  # by name, in the order in which they are shown
) -> list[FigureFile]:
    "The committed figures of a study."
    manifest = manifest_of(root, study)
    order = list(captions)
    found = []
    for file in sorted(manifest, key=lambda file: order.index(file.removesuffix('.svg'))):
        name = file.removesuffix('.svg')
        said = manifest[file]
        path = root / 'figures' / study / file if said['sha256'] else None
        caption = captions[name]() if path else ''
        found.append(FigureFile(name, path, caption, tuple(said['run_ids']), said.get('reason')))
    return found


def captions_of(e: Evidence) -> dict[str, Callable[[], str]]:
    "What is below each figure that a study may have."
    known = {**FIGURES, **QUESTION_FIGURES}
    return {name: partial(figure.caption, e) for name, figure in known.items()} | {'rates': lambda: RATES}


def its_runs(root: Path, study: str) -> list[str] | None:
    "The runs that the committed figures show; None: all of the study."
    shown = {i for said in manifest_of(root, study).values() for i in said['run_ids']}
    return sorted(shown) or None


def figure(f: FigureFile, address: str) -> str:
    "A figure with its caption, which leads to the runs that it shows."
    runs = f'[{len(f.run_ids)} {"run" if len(f.run_ids) == 1 else "runs"}](#the-runs)'
    said = f'{comment(f.caption)} Source: {runs}.'
    return directive('figure', address, said, alt=f.name.replace('_', ' '), figclass='drawn')


def part(p: Part, addresses: dict[str, str]) -> str:  # figure -> address on the site
    "A part of a page."
    said = '\n'.join(f'- {comment(s)}' for s in p.sentences)
    tables = [_table(t.columns, t.rows, t.caption) for t in p.tables]
    figures = [figure(f, addresses[f.name]) for f in p.figures]
    return '\n\n'.join(filter(None, [f'## {escaped(p.heading)}', *tables, said, *figures]))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    cells = [tuple(map(_cell, row)) for row in rows]
    return f'{table(tuple(map(comment, columns)), cells, "figures")}\n\n{comment(caption)}'


def _cell(text: str) -> str:
    "A cell; numbers and names stay on one line, what is longer may be broken."
    said = comment(text)
    return f'[{said}]{{.long}}' if len(text) > LONGEST_NUMBER else said


def by_arm(t: Table, arms: Sequence[str]) -> tuple[Table, ...]:
    "A table with arms as rows; where there are many columns, in parts that fit on a page."
    if set(t.columns[1:]) <= set(arms):
        turned = tuple(zip(t.columns, *t.rows))
        t = replace(t, columns=('arm', *turned[0][1:]), rows=turned[1:])
    n = -(-len(t.columns[1:]) // MOST_COLUMNS) or 1
    each = -(-len(t.columns[1:]) // n) or 1
    parts = [slice(i, i + each) for i in range(1, len(t.columns), each)]
    cut = [[(row[0], *row[part]) for row in (t.columns, *t.rows)] for part in parts]
    captions = [''] * (n - 1) + [t.caption]
    return tuple(Table(rows[0], tuple(rows[1:]), said) for rows, said in zip(cut, captions))


def page(p: Page, addresses: dict[str, str], runs: str) -> str:  # runs: of `runs_part`
    "A study as Markdown."
    headline = directive('container', 'headline', '\n\n'.join(map(comment, p.headline))) if p.headline else ''
    about = f'{comment(p.about[0].upper() + p.about[1:].removesuffix("."))}. {READING}'
    parts = [part(x, addresses) for x in p.parts if x.sentences or x.tables or x.figures]
    return '\n\n'.join(filter(None, [f'# {escaped(p.title)}', headline, about, *parts, runs])) + '\n'


def runs_part(study: str, found: Sequence[dict], records_at: str) -> str:  # records_at: address on the site
    "Where each number of a page comes from."
    runs = runs_table(found)
    arms = {r['run_id']: r['arm'] for r in found}
    runs.insert(1, 'arm', runs['run'].map(arms))
    rows = [tuple(map(str, row)) for row in runs.itertuples(index=False)]
    shown = code(f'kdnotes show {rows[0][0]}')
    how = f'In a checkout of this project, {shown} prints the record of a run.'
    whole = f'[All records of {escaped(study)}]({records_at}), one line per run.'
    return f'## The runs\n\n{how} {whole}\n\n{_table(tuple(runs.columns), rows, "One row per run.")}'


def unreported(study: str, why: ReportError, runs: str) -> str:  # runs: of `runs_part`
    "A study whose runs cannot be compared: why, and what they were."
    alone = f'The runs have different settings, so arms are not compared: {why}.'
    return f'# Study {escaped(study)}\n\n{comment(alone)}\n\n{runs}\n'


def line(study: str, found: Sequence[dict], said: str) -> tuple[str, ...]:
    "A study in the list of all."
    seeds = len({r['seed'] for r in found})
    first = found[0]
    link = f'[{escaped(study)}](/results/{study}.md)'
    return link, code(first['task']), escaped(first['corpus']), str(len(found)), str(seeds), comment(said)


def study_page(
    root: Path,  # the checkout
    study: str,
    source: Path,  # of the site, where figures go that are not committed
) -> StudyPage:
    "A study's page."
    found = records(study, None if is_search(study) else its_runs(root, study))
    runs = runs_part(study, found, address(root, source, root / 'thesis' / 'data' / f'{study}.records.jsonl'))
    if is_search(study):
        made, figures = searched(root, study)
    else:
        try:
            e = evidence(study, its_runs(root, study))
        except ReportError as why:
            said = 'Trials with different settings; arms are not compared.'
            return StudyPage(study, unreported(study, why, runs), line(study, found, said))
        figures = committed_figures(root, study, captions_of(e))
        figures = figures or draw_evidence(e, source / 'files' / 'drawn' / study)
        made = compared(e, figures)
    addresses = {f.name: address(root, source, f.path) for f in figures if f.path}
    return StudyPage(study, page(made, addresses, runs), line(study, found, made.headline[0]))


def compared(e: Evidence, figures: Sequence[FigureFile]) -> Page:
    "A study of arms, headed by what it found."
    made = page_of(e, figures)
    found = finding(e, made.headline[0], predictions(e.study, [r['run_id'] for r in e.records]))
    more = tuple(said for said in made.headline if said not in found)
    *parts, runs = made.parts
    turned = [replace(p, tables=tuple(cut for t in p.tables for cut in by_arm(t, e.arms))) for p in parts]
    differ = replace(runs, heading='Settings that differ', tables=runs.tables[1:])
    return replace(made, headline=(found, *more), parts=(*turned, differ))


def searched(root: Path, study: str) -> tuple[Page, list[FigureFile]]:
    "A search, headed by the student to ship, and its figures."
    found = load_result(study)
    captions = {name: partial(picture.caption, found) for name, picture in PICTURES.items()}
    figures = committed_figures(root, study, captions)
    made = search_page(found, figures)
    front, drawn = made.parts[0].tables
    parts = [replace(made.parts[0], tables=(front, of_front(drawn, front))), *made.parts[1:]]
    return replace(made, parts=tuple(parts)), figures


def of_front(
    drawn: Table,  # a row a parameter, a column a trial
    front: Table,  # a row a trial, whose last cell says whether it is still on the front
) -> Table:
    "The parameters of the trials on the final front and of the baseline; all trials would not fit on a page."
    stayed = {row[0] for row in front.rows if row[-1] == 'yes'}
    columns = [i for i, name in enumerate(drawn.columns) if i == 0 or name in stayed or 'baseline' in name]
    rows = tuple(tuple(row[i] for i in columns) for row in drawn.rows)
    said = 'Parameters of the trials on the final front and of the baseline.'
    return replace(drawn, columns=tuple(drawn.columns[i] for i in columns), rows=rows, caption=said)


def address(root: Path, source: Path, path: Path) -> str:
    "A figure's address on the site; a committed one is copied there."
    if not path.is_relative_to(source):
        copy = source / 'files' / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        path = copy
    return f'/{path.relative_to(source).as_posix()}'


def list_page(pages: Sequence[StudyPage]) -> str:
    "The list of all studies."
    listing = directive('toctree', '', '\n'.join(p.study for p in pages), hidden='')
    return (
        '\n\n'.join(
            [
                '# Results',
                'Studies trained for this project, computed from the records in `thesis/data/`. The '
                '[thesis](/files/thesis/thesis.pdf) discusses them, '
                'and the [log](/project/log.md) describes how they were made, including failures.',
                table(COLUMNS, [p.line for p in pages], 'studies'),
                'For comparisons with other libraries, see [other libraries](/project/peers.md).',
                listing,
            ]
        )
        + '\n'
    )
