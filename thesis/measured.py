"""Facts that no record holds.

What corpora, texts and networks count, and what a benchmark, a GPU check and a simulation measured.
"""

from __future__ import annotations
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
import numpy as np
import pandas as pd
from bench.gpu_check import rates_table
from bench.results import aims, rounds
from bench.sizes import answer_times, corpus_sizes, network_sizes, wikitext_tokens
from kdnotes.core.arms import PROFILES
from kdnotes.core.files import read_json, write_json
from kdnotes.core.parse import make_config
from kdnotes.stats.comparable import commits
from kdnotes.stats.coverage import ENOUGH_SEEDS, FAMILY_SIZES, SETTINGS, coverage_table, family_table
from kdnotes.tasks.answer_selection import CORPORA
from kdnotes.tasks.ranking_metrics import counts
from kdnotes.tasks.sources import Corpus, load_corpus, local_copy, trained_on
from .facts import ThesisError, flat, plain, uncommitted


def _words(text: str) -> list[str]:
    return re.findall(r'\w+', text.lower())


def overlap(
    target: Corpus,  # whose test set is looked at
    source: Corpus,  # all of which may have been trained on
    words: int = 8,  # in a row, letters' case and marks aside
    # words; sentences, of how many questions (and their ids), that share so many words in a row with one of
    # the source's; how many of them are correct; questions that are the same
) -> dict[str, Any]:
    "What a model that was trained on another corpus has read of a test set before."

    def windows(text: str) -> set[int]:
        w = _words(text)
        return {hash(tuple(w[i : i + words])) for i in range(len(w) - words + 1)}

    rows = [r for part in source.splits.values() for r in part]
    known = set().union(*(windows(text) for text in {r['sentence'] for r in rows}))
    questions = {tuple(_words(r['question'])) for r in rows}
    test = target.splits['test']
    found = [r for r in test if known & windows(r['sentence'])]
    ids = sorted({r['question_id'] for r in found})
    same = sum(tuple(_words(q)) in questions for q in {r['question'] for r in test})
    numbers = dict(sentences=len(found), questions=len(ids), correct=sum(r['label'] for r in found))
    return numbers | dict(words=words, ids=ids, same_questions=same)


def drawn_labels(corpus: Corpus, labels: int = 256, seeds: int = 5) -> dict[str, int]:
    "What so many labelled rows of the study of few labels hold: questions and right answers, over its seeds."
    found = dict(labels=labels, seeds=seeds)
    drawn = []
    for seed in range(seeds):
        given = dict(corpus='wikiqa', labels=labels, seed=seed, train_questions='all')
        rows = list(trained_on(corpus, make_config(mode='mixed_kd', **given), {}).splits['train'])
        drawn.append((len({r['question_id'] for r in rows}), sum(r['label'] for r in rows)))
    for name, of in zip(('questions', 'right'), zip(*drawn)):
        found |= {f'{name}_low': min(of), f'{name}_high': max(of)}
    return found


def corpus_facts() -> dict:
    "Counts of WikiQA, from the copies at hand; overlap with SQuAD, where that is."
    corpus = load_corpus('answer_selection', 'wikiqa')
    squad = local_copy('squad1', CORPORA)
    seen = dict(overlap=overlap(corpus, load_corpus('answer_selection', 'squad1'))) if squad else {}
    return seen | dict(
        source='kdnotes.tasks.answer_selection.counts of the published files',
        sha256=corpus.sha256[:12],
        drawn=drawn_labels(corpus),
        splits=plain(counts(corpus).T.to_dict()),
    )


def text_facts() -> dict:
    "Sizes of the texts, from the copies at hand: name -> split -> documents, words, pieces, sha256; tokens."
    source = 'bench.sizes.corpus_sizes of the published files'
    about = dict(source=source, tokenizer=PROFILES['laptop'].teacher)
    return about | dict(texts=corpus_sizes(), wikitext_tokens=wikitext_tokens())


def size_facts() -> dict:
    "Parameters of the published networks by way of counting, and the share that is left of BERT's."
    sizes = network_sizes()
    left = {way: plain(n / sizes['bert'][way]) for way, n in sizes['distilbert'].items()}
    return dict(source='bench.sizes.network_sizes', **sizes, left=left)


def bench_facts(results: dict) -> dict:
    """`make bench` in few numbers: what was raced, a table, and each ratio with its aim. Contestants whose
    names begin with a digit are its part about scaling, and have a table of their own where they ran alone.
    """
    own = {t['contestant'] for t in results['turns']} - {'machine'}
    names = [c for c in results['about'] if c in own and (not c[0].isdigit() or 'kdnotes' not in own)]
    rows = []
    for name in names:
        rates = rounds(results, name, 'examples_per_s')
        if len(rates):
            medians = (rounds(results, name, key).median() for key in ('tokens_per_s', 'host_mib'))
            rate = f'{rates.median():.0f} ({rates.min():.0f} to {rates.max():.0f})'
            rows.append([name, results['about'][name], rate, *(f'{x:,.0f}' for x in medians)])
    turns = [t for t in results['turns'] if t['contestant'] in (*names, 'machine')]
    kept = aims(results | dict(turns=turns)).to_dict('records')
    numbers = dict(value='measured', lowest='lowest', highest='highest', wanted='wanted', reached='met')
    about = {name: results['environment'][name] for name in ('device', 'torch')}
    about |= {name: results['settings'][name] for name in ('steps', 'dtype')}
    return about | dict(
        source=f"make bench, begun {results['began']}, commit {commits([results])[0]}",
        uncommitted=uncommitted(results),
        rounds=results['settings']['alternations'],
        minutes=results['minutes'],
        table=dict(head=['contestant', 'what it is', 'examples/s', 'tokens/s', 'MiB'], rows=rows),
        ratios=flat({r['key']: {name: r[key] for name, key in numbers.items()} for r in kept}),
    )


def _cells(frame: pd.DataFrame, titles: Mapping[str, str]) -> dict:
    "Columns of a table as text, its index first."

    def cell(x) -> str:
        if x is None or x == '' or x != x:
            return '-'
        return x if isinstance(x, str) else f'{x:,.0f}' if abs(x) >= 100 else f'{x:.3g}'

    rows = [[name, *map(cell, row)] for name, *row in frame[[*titles]].itertuples(name=None)]
    return dict(head=['', *titles.values()], rows=rows)


_ENERGY = dict(
    format='format',
    idle_w='idle, W',
    loaded_w='loaded, W',
    joules='J / 1,000 examples',
    examples_per_s='examples/s',
    gpu_percent='GPU, %',
    sampling_percent='sampling, %',
)
_MEMORY = dict(dtype='format', device_mib='in use, MiB', reserved_mib='held, MiB')
_RATES = dict(
    format='format',
    examples_per_s='examples/s',
    lowest='lowest',
    highest='highest',
    device_mib='MiB',
    watts='W',
    joules_per_example='J / example',
)


def gpu_facts(results: dict) -> dict:
    """`make gpu-check` in few numbers: tables of energy, memory and rates; what was not measured, or not in a
    whole round, is not there.
    """
    if results['settings']['smoke']:
        raise ThesisError('these results of gpu-check are those of a rehearsal; run it on a GPU')
    if not results.get('complete', True):
        raise ThesisError('gpu-check was interrupted, and its results are incomplete; run it again')
    parts = results['parts']
    device = (parts['machine'].get('gpu') or {}).get('name', results['settings']['device'])
    found = dict(source=f"make gpu-check, begun {results['began']}", device=device, failed=results['failed'])
    if modes := parts.get('energy', {}).get('modes'):
        found['energy'] = _cells(pd.DataFrame(modes).set_index('mode'), _ENERGY)
    if held := parts.get('fits', {}).get('modes'):
        found['memory'] = _cells(pd.DataFrame(held).set_index('mode'), _MEMORY)
        found['batch'] = dict(examples=held[0]['batch_size'], tokens=held[0]['length'])
    turns = {size: parts[size] for size in ('minilm', 'bert') if parts.get(size, {}).get('turns')}
    whole = {size: part for size, part in turns.items() if part['settings']['alternations']}
    found['rounds'] = {size: part['settings']['alternations'] for size, part in whole.items()}
    return found | {size: _cells(rates_table(part, device), _RATES) for size, part in whole.items()}


def coverage_facts(trials: int = 4000, family_trials: int = 100_000) -> dict:
    "Ends of coverage and of false positives outside of the edges, by the notebook's seed; false alarms."
    made = coverage_table(np.random.default_rng(2026), trials=trials)
    name, seeds = (made.index.get_level_values(k) for k in ('setting', 'seeds'))
    usual = ~name.isin([s.name for s in SETTINGS if s.edge])
    families = family_table(np.random.default_rng(2026), trials=family_trials).round(3)
    any_of = families[[f'family of {k}' for k in FAMILY_SIZES]].max(axis=1)
    found = {}
    for where, n, rows in (('five', 5, seeds >= ENOUGH_SEEDS), ('three', 3, seeds == 3)):
        found[f'{where}_families_max'] = any_of[n].max()
        for short in ('covers', 'rejects'):
            column = made[usual & rows][f'crossed {short}']
            found |= {f'{where}_{short}_min': column.min(), f'{where}_{short}_max': column.max()}
    about = dict(source='nbs/stats/09_coverage.ipynb', trials=trials, questions=122)
    about |= dict(family_trials=family_trials, families=families.reset_index().to_dict('records'))
    return plain(about | found)


MADE = dict(
    corpus=corpus_facts, coverage=coverage_facts, texts=text_facts, sizes=size_facts, in_use=answer_times
)


def write_facts(where: Path, sources: Sequence[str]) -> list[Path]:
    "Write the facts that no record holds: of MADE, or what `make bench`, `scaling` or `gpu-check` measured."
    made: dict[str, dict] = {}
    for source in sources:
        results = {} if source in MADE else read_json(source)
        if source in MADE:
            made[source] = MADE[source]()
        elif 'parts' in results:
            made['gpu'] = gpu_facts(results)
        elif 'gains' in results:
            if results['settings']['smoke'] or not all(len(row['step_s']) > 1 for row in results['rows']):
                raise ThesisError(f'{source} is of a rehearsal or of single turns; measure again')
            made['scaling'] = results  # every turn, from which all of it is computed again
        elif 'turns' in results:
            of_race = any(t['contestant'] == 'kdnotes' for t in results['turns'])
            made.setdefault('bench', {})['race' if of_race else 'scaling'] = bench_facts(results)
        else:
            raise ThesisError(
                f'{source} holds no results of make bench, make scaling or make gpu-check; give '
                'runs/bench/<time>/bench.json, runs/scaling/<name>.json or '
                'runs/gpu-check/<time>/gpu_check.json'
            )
    return [write_json(where / 'thesis' / 'data' / f'{name}.json', facts) for name, facts in made.items()]
