"""Records as runs would leave them, with made-up numbers."""

import hashlib
import numpy as np
import pandas as pd
from kdnotes.core.arms import MODES
from kdnotes.core.config import task_info
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.run_id import factors, run_id, settings
from kdnotes.core.resolve import resolve
from kdnotes.results.runs import RunFolder
from kdnotes.results.store import keep_floors
from kdnotes.results.schema import SCHEMA
from kdnotes.report.report import Report, report_of
from kdnotes.stats.evidence import curve_of, evidence
from kdnotes.tasks.base import Evaluation, floor_table, floors_key
from kdnotes.core.spec import value_of


def make_units(value, seed, n=40):
    "Values of `n` units with mean `value`: hard units are hard for every seed."
    hard = np.random.default_rng(0).normal(0, 0.05, n)
    noise = np.random.default_rng([seed, int(1e6 * value)]).normal(0, 0.02, n)
    x = hard + noise
    return pd.DataFrame(
        dict(
            split='test',
            set='clean',
            unit=[f'Q{i}' for i in range(n)],
            cluster=[f'D{i % 7}' for i in range(n)],
            metric='map',
            value=np.round(x - x.mean() + value, 6),
        )
    )


def make_record(
    mode='full_kd',
    seed=0,
    value=0.7,
    train_s=10.0,
    *,
    study='made',
    corpus='embedded',
    git='c0',
    torch='2.13.0',
    device='cpu',
    cpu='a cpu',
    metric='map',
    higher=True,
    curve=True,
    **parameters,
):
    "A whole record; `parameters` go to the configuration, with ranks as in a study that varies them."
    if MODES[mode].ranks == 'auto':
        parameters = dict(ranks=2) | parameters
    c = resolve(make_config(mode=mode, seed=seed, study=study, **parameters), Machine('cpu', cores=2), corpus)
    student = MODES[mode].network == 'student'
    kd = MODES[mode].kd
    sha = hashlib.sha256(corpus.encode()).hexdigest()
    initial = {'teacher_run_id': f'baseline-s{value_of(c, "teacher_seed")}'} if student else {'weights': 'w0'}
    losses = [dict(step=s, loss=1 / s + 0.1 * i) for i, s in enumerate(range(1, 60))]
    points = curve_of(dict(curve=[*losses, dict(step=30, value=value - 0.05), dict(step=60, value=value)]))
    value = None if value is None else round(value, 6)
    precision = factors(c)['precision']
    measured = dict(
        memory=dict(peak_device_mib=None, peak_host_mib=900.0),
        energy=dict.fromkeys(('device_j', 'mean_w', 'idle_w', 'source')),
        amp=dict.fromkeys(('overflow_steps', 'final_scale')),
        utilisation=dict.fromkeys(('cpu_percent', 'gpu_percent')),
        machine=dict.fromkeys(('load_average_mean', 'busy_share', 'cpu_steal')),
        sampling=dict.fromkeys(('interval_s', 'samples', 'overhead_share')),
    )
    unknown = [f'{key}.{name}' for key, of in measured.items() for name in of if of[name] is None]
    record = dict(
        schema=SCHEMA,
        run_id=run_id(c, sha, initial, SCHEMA),
        study=study,
        task=c.task,
        mode=mode,
        arm=c.where.arm,
        factors=factors(c),
        settings=settings(c),
        initial=initial,
        parallel=dict(ranks=c.compute.ranks, threads_per_rank=c.compute.threads_per_rank, reason='made up')
        | dict(backend='gloo' if c.compute.ranks > 1 else None, streams=None, graphs=None),
        seed=seed,
        teacher_seed=value_of(c, 'teacher_seed'),
        teacher_run_id=f'baseline-s{value_of(c, "teacher_seed")}' if student else None,
        corpus=corpus,
        corpus_sha256=sha,
        precision=precision,
        precision_reason='made up',
        environment=dict(torch=torch, transformers='5', python='3.11', device=device, cpu=cpu, git=git)
        | dict(load_average=0.0, cpu_steal=0.0),
        params_total=10,
        model_sha256='m',
        primary=dict(set='test', metric=metric, higher_is_better=higher, value=value),
        metrics={'test': {metric: value, 'mrr': 0.5}, 'dev': {metric: 0.6}},
        time=dict(train_s=train_s, teacher_s=2.0 * kd, teacher_train_s=None)
        | dict(total_s=train_s + 2 * kd, wall_s=train_s + 1),
        throughput={f'{of}_per_s': n / train_s for of, n in dict(examples=1000, tokens=30000).items()}
        | dict(useful_flops_per_s=1e9),
        losses={'hard': 0.3},
        reasons=dict.fromkeys(['primary.value', *unknown], 'made up'),
    )
    record |= dict.fromkeys(('tuning_id', 'phases', 'devices', 'timeline', 'gradients'))
    return record | measured | (dict(curve=points) if curve else {})


def units_of(records):
    "The frame `kdnotes.results.store.units` gives."
    return pd.concat(
        [
            make_units(r['primary']['value'], r['seed']).assign(
                run_id=r['run_id'], arm=r['arm'], seed=r['seed']
            )
            for r in records
        ],
        ignore_index=True,
    )


def write_run(record):
    "A finished run's folder, under $KDNOTES_HOME."
    folder = RunFolder(record['study'], record['run_id']).create()
    folder.write_table(
        'units',
        make_units(record['primary']['value'], record['seed'])
        if record['primary']['value'] is not None
        else make_units(0.5, 0)[:0],
    )
    folder.write_table('predictions', pd.DataFrame(columns=['split', 'unit', 'item', 'label', 'score']))
    for step in range(1, 61):
        folder.append(
            'step',
            step=step,
            epoch=0,
            loss=1 / step,
            losses={'hard': 1 / step},
            learning_rate=1e-4,
            grad_norm=1.0,
            examples=32,
            tokens=900,
            elapsed_s=step / 10,
        )
    folder.append(
        'eval', step=60, epoch=1, set='dev', metrics={record['primary']['metric']: 0.6}, elapsed_s=6.0
    )
    folder.write_record(record)
    return folder


def write_floors(record, **values):
    "What trivial models score beside a run, by name; they find the same units hard."
    p = record['primary']
    found = {
        name: Evaluation(
            {p['set']: {p['metric']: value}},
            make_units(value, 99).assign(split=p['set'], metric=p['metric']),
            pd.DataFrame(),
        )
        for name, value in values.items()
    }
    key = floors_key(task_info(record['task']), record['corpus_sha256'], record['settings'])
    return keep_floors(record['study'], key, floor_table(found))


def written_report(study='made') -> Report:
    "The report of a study without its figures, which take most of the time of one."
    return report_of(evidence(study), {})
