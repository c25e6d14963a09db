"""Choosing hardware: what the kept runs say of time, price and energy by device, what is estimated from them,
price files that are wrong, and the wall clock of a search.
"""

import json
import re
import numpy as np
import pytest
from handmade import make_record, write_run
from kdnotes import cli
from kdnotes.stats import hardware as h
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.render import reason
from kdnotes.results.store import records

H200 = 'NVIDIA H200'
V100 = 'Tesla V100-SXM2-16GB'
ALONE = 'extractive_qa-squad1-h200'  # a study of one run, alone on its GPU
DAY_S = 24 * 3600


@pytest.fixture
def own(tmp_path):
    "Writes a price file."

    def write(text):
        path = tmp_path / 'my.csv'
        path.write_text(text, encoding='utf-8')
        return path

    return write


def printed(capsys, *typed):
    "What the command prints with --json."
    assert cli.main(['hardware', *typed, '--json']) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *typed):
    "The sentence that a command ends with."
    assert cli.main(['hardware', *typed]) == 2
    said = capsys.readouterr()
    assert said.out == '' and said.err.startswith('kdnotes: ') and said.err.count('\n') == 1
    return said.err


# ---- devices and prices ----


def test_the_packaged_devices_are_whole_and_every_price_is_dated():
    for device in h.read_devices().values():
        assert None not in (device.memory_gb, device.fp32_tflops, device.bandwidth_gb_s, device.power_w)
        if device.price_per_hour is not None:
            assert re.fullmatch('[A-Z]{3}', device.currency) and device.priced_on and device.price_from


def test_a_file_of_ones_own_replaces_cells_and_adds_devices(own):
    path = own(
        '\ufeffdevice,power_w,price_per_hour,currency,priced_on\n'
        'Tesla T4,,0.4,EUR,2026-11-01\n\n"a CPU, 2 cores",65,0,EUR,2026-11-01\n'
    )
    packaged, mine = h.read_devices(), h.read_devices(path)
    t4 = mine['Tesla T4']
    assert (t4.price_per_hour, t4.currency, t4.priced_on, t4.price_from) == (0.4, 'EUR', '2026-11-01', '')
    assert t4.power_w == packaged['Tesla T4'].power_w and t4.fp16_tflops == packaged['Tesla T4'].fp16_tflops
    assert mine['a CPU, 2 cores'].price_per_hour == 0.0 and mine['a CPU, 2 cores'].fp32_tflops is None
    assert mine[V100] == packaged[V100]


@pytest.mark.parametrize(
    'text, told',
    [
        ('', 'is empty; it needs the names of its columns'),
        ('device,device\nT,T\n', "two columns are called 'device'"),
        ('device power_w\nT4 70\n', ": there is no column 'device power_w'"),
        ('device,powr_w\nT4,70\n', ": there is no column 'powr_w'; there are device, memory_gb"),
        ('device,power_w\nT4,70\n,80\n', 'row 2: device: Field required'),
        ('device,power_w\nT4,70\nT4,80\n', "row 2 names 'T4' again"),
        ('device,power_w\nT4\n', 'row 1: 1 fields where the header has 2'),
        ('device,power_w\nAMD EPYC, 2 cores,70\n', 'row 1: 3 fields where the header has 2'),
        ('device,power_w\nT4,seventy\n', 'row 1: power_w: Input should be a valid number'),
        ('device,power_w\nT4,-70\n', 'row 1: power_w: Input should be greater than 0'),
        ('device,power_w\nT4,0\n', 'row 1: power_w: Input should be greater than 0'),
        ('device,bandwidth_gb_s\nT4,inf\n', 'row 1: bandwidth_gb_s: Input should be a finite number'),
        ('device,price_per_hour\nT4,1\n', 'row 1 has a part of a price'),
        ('device,price_per_hour,currency,priced_on\nT4,,USD,2026-01-31\n', 'row 1 has a part of a price'),
        (
            'device,price_per_hour,currency,priced_on\nT4,1,USD,31.1.2026\n',
            'row 1: priced_on: Value error, Invalid isoformat string',
        ),
        (
            'device,price_per_hour,currency,priced_on\nT4,nan,USD,2026-01-31\n',
            'row 1: price_per_hour: Input should be a finite number',
        ),
        ('device,price_from\nT4,"open\n', 'row 1: '),
    ],
)
def test_a_wrong_price_file_is_refused_by_its_row(text, told, own):
    with pytest.raises(KdnotesError) as refused:
        h.read_devices(own(text))
    said = str(refused.value)
    assert said.startswith(str(own(text))) and told in said and '\n' not in said


def test_what_is_no_price_file(tmp_path):
    with pytest.raises(KdnotesError, match='none.csv cannot be read'):
        h.read_devices(tmp_path / 'none.csv')
    (tmp_path / 'latin.csv').write_bytes('device,price_from\nT4,Zürich\n'.encode('latin-1'))
    with pytest.raises(KdnotesError, match='line 2: byte 0xfc is not UTF-8'):
        h.read_devices(tmp_path / 'latin.csv')


# ---- measured and estimated ----


def test_a_measured_device_is_what_its_record_says(capsys):
    [record] = records(ALONE)
    found = printed(capsys, '--run', ALONE, '--device', H200, '--epochs', '3')
    [choice] = found['devices']
    epoch_s = record['examples'] / record['settings']['epochs'] / record['throughput']['examples_per_s']
    device = h.read_devices()[H200]
    assert choice['basis'] == 'measured' and choice['rests_on'] == [record['run_id']]
    assert choice['epoch_s'] == pytest.approx([epoch_s, epoch_s])
    assert choice['training_s'] == pytest.approx([3 * epoch_s] * 2)
    assert choice['price'] == pytest.approx([3 * epoch_s / 3600 * device.price_per_hour] * 2)
    per_epoch = record['phases']['student']['device_j'] / record['settings']['epochs']
    assert choice['joules'] == pytest.approx(3 * per_epoch)
    assert choice['priced_on'] == device.priced_on


def test_an_estimate_lies_between_the_ratios_and_says_what_it_rests_on(capsys):
    [record] = records(ALONE)
    found = printed(capsys, '--run', record['run_id'])
    by_name = {choice['device']: choice for choice in found['devices']}
    assert [c['device'] for c in found['devices'] if c['basis'] == 'measured'] == [H200]
    h200, v100 = h.read_devices()[H200], h.read_devices()[V100]
    ratios = h200.fp16_tflops / v100.fp16_tflops, h200.bandwidth_gb_s / v100.bandwidth_gb_s
    estimate, measured = by_name[V100], by_name[H200]
    assert estimate['basis'] == 'estimate' and estimate['measured_on'] == H200
    assert estimate['rests_on'] == [record['run_id']]
    low, high = np.array(estimate['epoch_s']) / measured['epoch_s']
    assert (low, high) == pytest.approx((min(ratios), max(ratios)))
    assert estimate['joules'] == pytest.approx(v100.power_w * estimate['training_s'][1])
    assert by_name['NVIDIA L4']['price'] is None and by_name['NVIDIA L4']['reasons']['price']
    assert any(f'estimates use the time on {H200} ({record["run_id"]})' in note for note in found['notes'])
    assert any('list price' in note for note in found['notes'])


def test_what_is_not_known_is_null_with_a_reason(capsys):
    found = printed(capsys, '--run', 'squad2-h200', '--arm', 'mixed_baseline', '--device', V100)
    [choice] = found['devices']
    assert choice['basis'] == 'unknown' and choice['epoch_s'] is choice['price'] is choice['joules'] is None
    assert 'no bf16_tflops of Tesla V100' in choice['reasons']['epoch_s']
    found = printed(capsys, '--run', 'wikiqa')  # of processors, whose peaks nobody gave
    assert any(note.startswith('times are means over') for note in found['notes'])
    for choice in found['devices']:
        for name in ('epoch_s', 'price', 'joules'):
            assert choice[name] is not None or choice['reasons'].get(name) or choice['basis'] == 'unknown'


def test_a_processor_is_a_base_once_its_peaks_are_given(capsys, own):
    device = records('squad2-qa')[0]['environment']['device']
    path = own(f'device,fp32_tflops,bf16_tflops,bandwidth_gb_s\n"{device}",0.1,0.2,20\n')
    found = printed(capsys, '--run', 'squad2-qa', '--arm', 'mixed_kd', '--prices', str(path))
    [base, *others] = found['devices']
    assert base['device'] == device and base['basis'] == 'measured'
    assert {c['basis'] for c in others} == {'estimate', 'unknown'}
    assert all(c['epoch_s'][1] < base['epoch_s'][0] for c in others if c['epoch_s'])


def test_the_same_training_on_two_machines_is_measured_twice(capsys):
    found = printed(capsys, '--run', 'wikiqa', '--arm', 'full_kd')
    measured = [c for c in found['devices'] if c['basis'] == 'measured']
    made = {r['environment']['device'] for r in records('wikiqa') if r['arm'] == 'full_kd'}
    assert {c['device'] for c in measured} == made and len(made) == 2
    one = next(r for r in records('wikiqa') if r['arm'] == 'full_kd')
    again = printed(capsys, '--run', one['run_id'])['devices']
    assert {c['device'] for c in again if c['basis'] == 'measured'} == made


def test_runs_that_shared_a_device_tell_between_a_share_and_all_of_their_time():
    shared, _ = h.timings(r for r in records('squad2-h200') if r['arm'] == 'mixed_kd')
    [choice] = h.choices(shared, h.read_devices(), only=[H200])
    low, high = choice.epoch_s
    jobs = [t.jobs for t in shared]
    assert min(jobs) > 1 and high / max(jobs) <= low <= high / min(jobs)
    assert choice.notes == (reason('runs_shared_device', jobs=max(jobs)),)


def test_a_gpu_that_waits_for_its_host_is_no_slower_to_replace():
    idle, _ = h.timings(records('squad1-h100'))
    assert idle[0].gpu_percent < 20
    base, *_ = found = h.choices(idle, h.read_devices())
    by_name = {c.device: c.epoch_s for c in found}
    assert by_name[H200][1] == base.epoch_s[0], 'a faster GPU may take as long'
    assert by_name['NVIDIA A100-SXM4-80GB'][0] == base.epoch_s[0], 'and so may a slower one'
    assert by_name['Tesla T4'][0] > base.epoch_s[0]


def test_a_device_with_too_little_memory_is_told():
    given = h.Timing(H200, 'fp16', 60.0, 'a run', memory_mib=20_000)
    notes = {c.device: c.notes for c in h.choices([given], h.read_devices())}
    assert [*map(str, notes['Tesla T4'])] == [
        'the runs used 21 GB of memory and the device has 16 GB; lower micro_batch_tokens'
    ]
    assert notes['NVIDIA L4'] == notes[H200] == ()


def test_two_gpus_cost_twice_as_much():
    one, two = (
        h.choices([h.Timing(H200, 'fp16', 60.0, 'a run', n_devices=n)], h.read_devices(), only=[H200, V100])
        for n in (1, 2)
    )
    for a, b in zip(one, two):
        assert b.price == pytest.approx(2 * np.array(a.price)) and a.epoch_s == b.epoch_s
    assert two[1].joules == 2 * one[1].joules


def test_finished_runs_of_this_home_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    for seed, device in enumerate(('a cpu', 'another')):
        made = make_record('full_kd', seed, train_s=10.0 * (1 + seed), device=device, cpu=device, epochs=4)
        write_run(made | dict(examples=4000))
    found = printed(capsys, '--run', 'made', '--trials', '6', '--workers', '2')['devices']
    measured = {c['device']: c for c in found if c['basis'] == 'measured'}
    assert {name: c['epoch_s'][0] for name, c in measured.items()} == pytest.approx(
        {'a cpu': 10, 'another': 20}
    )
    # what is not training counts in a search
    assert measured['a cpu']['search_s'] == pytest.approx([3 * (4 * 10 + 1)] * 2)
    assert cli.main(['hardware', '--run', 'made']) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split('  ')[0] == 'device' and 'Tesla T4' not in said


# ---- the wall clock of a search ----


def test_the_published_study_takes_four_days(capsys):
    timed = ['--measured', 'Tesla T4=2.5', '--measured', f'{V100}=1.3', '--epochs', '3']
    found = printed(capsys, *timed, '--trials', '479', '--workers', '20')['devices']
    by_name = {c['device']: c for c in found}
    assert [c['device'] for c in found[:2]] == [V100, 'Tesla T4'] and found[2]['basis'] == 'estimate'
    [days, _] = np.array(by_name[V100]['search_s']) / DAY_S
    assert days == pytest.approx(479 * 3 * 1.3 / 20 / 24, rel=0.01) and round(days) == 4
    assert by_name[V100]['rounds_s'] == by_name[V100]['search_s'], 'trials of one length lose nothing'


def test_the_t4_foretells_the_v100_to_a_hundredth():
    timed = h.given_timing('Tesla T4=2.5')
    [v100] = h.choices([timed], h.read_devices(), only=[V100])
    assert v100.epoch_s[1] / 3600 == pytest.approx(1.3, rel=0.01)


def test_rounds_wait_for_the_slowest():
    vary = np.random.default_rng(0).gamma(4, 3600, 200)
    for workers in (1, 2, 20):
        free, rounds = (h.wall_clock(vary, 479, workers, way, seed=3) for way in (True, False))
        assert free == rounds if workers == 1 else free < rounds
    ideal = 479 * vary.mean() / 20
    assert ideal * 0.9 < h.wall_clock(vary, 479, 20) < ideal * 1.25
    assert h.wall_clock(vary, 479, 20, asynchronous=False) > 1.5 * ideal
    assert h.wall_clock(vary, 3, 8) == h.wall_clock(vary, 3, 8, asynchronous=False), 'one round'


def test_a_search_is_simulated_as_seeded_and_by_hand():
    assert h.wall_clock([1.0, 2.0], 40, 3, seed=1) == h.wall_clock([1.0, 2.0], 40, 3, seed=1)
    assert len({h.wall_clock([1.0, 2.0, 4.0], 40, 3, seed=seed) for seed in range(8)}) > 1
    drawn = np.random.default_rng(5).choice([1.0, 3.0], 5)
    a = b = 0.0
    for seconds in drawn:
        a, b = sorted((a + seconds, b))
    assert h.wall_clock([1.0, 3.0], 5, 2, seed=5) == b
    in_pairs = max(drawn[:2]) + max(drawn[2:4]) + drawn[4]
    assert h.wall_clock([1.0, 3.0], 5, 2, asynchronous=False, seed=5) == in_pairs


# ---- what is refused ----


@pytest.mark.parametrize(
    'typed, told',
    [
        ([], 'give one of them'),
        (['--run', 'wikiqa', '--measured', 'Tesla T4=2'], 'give one of them'),
        (['--run', 'nobody'], "there is no run 'nobody'"),
        (['--run', 'wikiqa', '--arm', 'none'], "'wikiqa' has no arm 'none'; it has baseline"),
        (['--run', ALONE, '--device', 'Tesla T5'], "a device 'Tesla T5'; is it Tesla T4?"),
        (['--run', ALONE, '--epochs', '0'], 'epochs=0 must be above 0'),
        (['--run', ALONE, '--epochs', 'inf'], 'epochs=inf must be above 0'),
        (
            ['--run', ALONE, '--trials', '4', '--workers', '0'],
            "'--workers': Input should be greater than or equal to 1",
        ),
        (['--run', ALONE, '--prices', 'none.csv'], 'none.csv cannot be read'),
        (['--measured', 'Tesla T4'], "'Tesla T4' is no time of an epoch"),
        (['--measured', 'Tesla T4=-1'], "'Tesla T4=-1' is no time of an epoch"),
        (
            ['--measured', 'Tesla T4=1', '--precision', 'fp8'],
            "'fp8' is not one of 'fp32', 'fp16', 'bf16'",
        ),
        (['--run', 'squad2-preset', '--arm', 'baseline'], 'nothing was trained'),
    ],
    ids=' '.join,
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(typed, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert told in refused(capsys, *typed)


def test_where_there_is_no_record_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    assert "there is no run 'wikiqa'" in refused(capsys, '--run', 'wikiqa')


def test_no_device_made_all_runs():
    a, b = (h.Timing(name, 'fp32', 1.0, name, work=name) for name in ('one', 'two'))
    with pytest.raises(ConfigError, match='name one of them, or an arm of the study'):
        h.choices([a, b], h.read_devices())
