"The tidy table of results holds what the records and the units of committed studies hold."

import numpy as np
import pytest
import kdnotes as kd
from kdnotes.core.config import ConfigError, task_info
from kdnotes.results.store import records
from kdnotes.results.table import RESULT_COLUMNS, results_table
from kdnotes.stats.evidence import evidence

STUDIES = ('wikiqa', 'imdb-labels', 'squad2-qa', 'gutenberg')


@pytest.mark.parametrize('study', STUDIES)
def test_the_values_are_those_of_the_records(study):
    table = results_table(records(study))
    assert tuple(table) == RESULT_COLUMNS
    keys = ['run_id', 'set', 'metric']
    assert not table.duplicated(keys).any(), 'one row per run, set and metric'
    value = table.set_index(keys)['value']
    for record in records(study):
        primary = record['primary']
        assert value[record['run_id'], primary['set'], primary['metric']] == primary['value']
        own = table[(table['run_id'] == record['run_id']) & table['set'].isna()].set_index('metric')
        assert own['value']['time.train_s'] == record['time']['train_s']
        missing = own[own['value'].isna()]
        assert list(missing['reason'].fillna('')) == [record['reasons'].get(key, '') for key in missing.index]


@pytest.mark.parametrize('study', STUDIES)
def test_the_mean_of_the_units_is_the_metric_of_the_run(study):
    table = kd.load_results(study, units=True)
    info = task_info(records(study)[0]['task'])
    means = table[table['unit'].notna()].groupby(['run_id', 'set', 'metric'])['value'].mean()
    whole = table[table['unit'].isna() & table['set'].notna()].set_index(['run_id', 'set', 'metric'])['value']
    both = means.index.intersection(whole.index)
    assert len(both) and {record['run_id'] for record in records(study)} == {key[0] for key in both}
    primary = {(r['run_id'], r['primary']['set'], r['primary']['metric']) for r in records(study)}
    if info.exp_of:  # perplexity is no mean of its units; the primary metric is
        both = [key for key in both if key[2] not in info.exp_of]
    assert primary <= set(both)
    # units are stored with six digits
    np.testing.assert_allclose(means[both], whole[both], rtol=1e-5, atol=1e-6)


def test_means_of_arms_are_those_of_the_report():
    table = kd.load_results('wikiqa')
    values = evidence('wikiqa').values
    where = (table['set'] == 'test') & (table['metric'] == 'map')
    means = table[where].groupby('arm')['value'].mean()
    assert means.to_dict() == pytest.approx(
        {arm: v['primary'].estimate for arm, v in values.items()}, abs=1e-6
    )


def test_a_study_without_runs_is_refused_by_name():
    with pytest.raises(ConfigError, match="study 'nothing' has no finished runs; `kdnotes list`"):
        kd.load_results('nothing')
