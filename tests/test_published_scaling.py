"""The published table: its factors, its parts, and what a model of few numbers predicts of each row from
the others.
"""

import math
from dataclasses import replace
import numpy as np
import pytest
from kdnotes.scaling import published as p
from kdnotes.report.plotting import figure_bytes
from kdnotes.scaling.steptime import calibrate, step_of, step_s, total_s
from kdnotes.core.config import ConfigError
from kdnotes.core.render import phrase

MINUTES = np.array([438, 402, 204, 70, 66, 37, 32])


@pytest.fixture(scope='module')
def fits():
    return p.fit()


def of(fits, model):
    return fits[fits['model'] == model].set_index('row')


def test_the_rows_are_those_that_were_published():
    assert [r.minutes for r in p.TABLE] == MINUTES.tolist()
    assert [r.gpus for r in p.TABLE] == [8, 8, 8, 32, 32, 64, 64]
    assert [r.sync for r in p.TABLE] == ['every'] * 2 + ['delayed'] * 5
    assert [r.number for r in p.TABLE if r.several_rings] == [5, 7]
    table = p.batches()
    assert table['batch'].tolist() == [3600, 6400, 6400, 25_600, 25_600, 51_200, 51_200]
    assert 1 / table['updates'].iloc[-1] == pytest.approx(51_200 / 3600)


def test_all_claimed_factors_follow_but_one():
    table = p.factors().set_index('claimed')
    assert table.index[~table['follows']].tolist() == ['3.1']
    assert table['is']['3.1'] == '3/5'  # 204 to 66 minutes: several rings are in it
    assert table['factor']['3.1'] == pytest.approx(204 / 70)
    assert table['high']['3.1'] == pytest.approx(204.5 / 69.5) and table['high']['3.1'] < 3.05
    followed = table[table['follows']]
    assert (followed['low'] < followed['factor']).all() and (followed['factor'] < followed['high']).all()
    assert (followed['rows'] == followed['is']).all()


def test_the_parts_make_the_whole():
    table = p.decomposition()
    assert table['factor'].prod() == pytest.approx(438 / 32)
    assert table['logarithm'].sum() == pytest.approx(math.log(438 / 32))
    assert table['share'].sum() == pytest.approx(1)
    ends = [pair.split('/') for pair in table['rows']]
    assert ends[0][0] == '1' and ends[-1][1] == '7'
    assert all(end == start for (_, end), (start, _) in zip(ends, ends[1:]))  # no gap, no overlap


def test_it_is_not_super_linear(monkeypatch):
    said = p.super_linear()
    assert (said['holds'], said['gpus'], said['factor']) == (False, 8, 438 / 32)
    assert said['scaling'] == 204 / 32 and said['efficiency'] == pytest.approx(0.797, abs=1e-3)
    text = phrase('scaling.jinja', 'super_linear', said)
    for words in ('is not super-linear', '204/32 = 6.38', '80% of linear', '14.2 times the sequences'):
        assert words in text
    monkeypatch.setattr(p, 'TABLE', (*p.TABLE[:6], replace(p.TABLE[6], minutes=25)))
    assert p.super_linear()['holds']
    assert 'is super-linear' in phrase('scaling.jinja', 'super_linear', p.super_linear())


def test_a_published_row_has_the_work_that_the_model_reads():
    step = step_of(p.measured(p.TABLE[6]))
    assert (step.ranks, step.nodes, step.examples, step.micro_batches) == (64, 8, 16, 50)
    assert step.gradient_bytes == pytest.approx(264e6) and math.isinf(step.rings)
    assert step_of(p.measured(p.TABLE[0])).gradient_bytes == pytest.approx(264e6)


def test_four_and_eight_machines_predict_each_other_by_the_ring_formula(fits):
    "By hand, for bytes: what is not a quarter (an eighth) of row 3 is communication between machines."
    inside = of(fits, 'bytes')
    machine = calibrate([p.measured(r) for r in p.TABLE if r.number != 6], p.MODELS['bytes'])
    step = step_of(p.measured(p.TABLE[3]))
    parts = step_s(step, machine)
    between = 2 * 3 / 4 * 264e6 * machine.ring_byte_s
    within = 2 * 7 / 8 * 264e6 * machine.byte_s
    assert parts['communication'] == pytest.approx(between + within)
    eight = (parts['compute'] + within + between * (2 * 7 / 8) / (2 * 3 / 4)) / (60 * 51_200)
    assert inside['predicted'][6] == pytest.approx(eight, rel=1e-3)
    assert abs(inside['error_percent'][[4, 6]]).max() < 2


def test_rows_1_to_3_contradict_a_cost_by_bytes(fits):
    by_hand = 204 + (402 - 204) * 50 / 49 * (16 / 9 - 1 / 50)
    assert of(fits, 'bytes')['predicted'][1] == pytest.approx(by_hand, rel=0.01)
    assert of(fits, 'bytes')['error_percent'][1] > 20
    machine = calibrate([p.measured(r) for r in p.TABLE], p.MODELS['fixed'])
    assert machine.fixed_s == pytest.approx(0, abs=1e-6 * machine.per_example_s)


def test_errors_are_those_of_the_minutes(fits):
    for model in p.MODELS:
        table = of(fits, model)
        assert table['minutes'].tolist() == MINUTES.tolist()
        assert np.allclose(table['fitted_percent'], 100 * (table['fitted'] / MINUTES - 1))
        told = table['predicted'].notna()
        assert np.allclose(table['error_percent'][told], 100 * (table['predicted'] / MINUTES - 1)[told])
        assert (table['why'] == '').tolist() == told.tolist()


def test_a_prediction_does_not_see_its_row(fits, monkeypatch):
    monkeypatch.setattr(p, 'TABLE', (*p.TABLE[:3], replace(p.TABLE[3], minutes=90), *p.TABLE[4:]))
    again = of(p.fit(), 'bytes')
    assert again['predicted'][4] == pytest.approx(of(fits, 'bytes')['predicted'][4])
    assert again['predicted'][6] > of(fits, 'bytes')['predicted'][6] + 1


def test_rows_that_nothing_predicts(fits):
    assert of(fits, 'fixed').index[of(fits, 'fixed')['predicted'].isna()].tolist() == [1, 2]
    with pytest.raises(
        ConfigError, match='do not determine (ring|link)_byte_s'
    ):  # only the larger of the two
        calibrate([p.measured(r) for r in p.TABLE if not r.several_rings], p.MODELS['bytes'])


def test_a_table_that_the_model_could_have_made_is_predicted(monkeypatch):
    free = p.MODELS['bytes']
    truth = calibrate([p.measured(r) for r in p.TABLE], free)
    made = [
        replace(r, minutes=total_s(step_of(p.measured(r)), truth) / (60 * r.effective_batch)) for r in p.TABLE
    ]
    monkeypatch.setattr(p, 'TABLE', tuple(made))
    assert abs(of(p.fit(), 'bytes')['error_percent']).max() < 0.1


def test_the_figure_is_the_same_to_the_last_byte(fits):
    first = figure_bytes(p.figure_1(fits))
    assert first == figure_bytes(p.figure_1(fits)) and first.startswith(b'<?xml')
