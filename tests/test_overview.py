"`kdnotes show`: each figure of a record has a name of its own and the unit that it was measured in."

import pytest
from handmade import make_record
from kdnotes.results.overview import record_rows

FIGURES = {  # place and key of a record -> value; group, name and text of the table
    ('time', 'train_s'): (61.25, 'time', 'training', '61.2 s'),
    ('time', 'teacher_s'): (2.5, 'time', 'teacher outputs', '2.5 s'),
    ('time', 'teacher_train_s'): (301.0, 'time', 'teacher training', '301 s'),
    ('time', 'transfer_s'): (41.0, 'time', 'transfer, once for all runs', '41 s'),
    ('time', 'total_s'): (364.75, 'time', 'total, from pretrained weights', '365 s'),
    ('time', 'wall_s'): (71.0, 'time', 'this call', '71 s'),
    ('throughput', 'examples_per_s'): (62.743, 'training speed', 'examples', '62.7/s'),
    ('throughput', 'tokens_per_s'): (2907.27, 'training speed', 'tokens', '2,907/s'),
    ('throughput', 'useful_flops_per_s'): (1.9e11, 'training speed', 'useful operations', '190 GFLOP/s'),
    ('latency', 'batch_1_ms'): (27.7, 'latency', 'one example', '27.7 ms'),
    ('latency', 'batch_1_tokens'): (44, 'latency', 'tokens in that example', '44'),
    ('latency', 'batch_32_ms'): (339.4, 'latency', '32 examples', '339 ms'),
    ('latency', 'batch_32_tokens'): (45, 'latency', 'tokens in each of the 32', '45'),
    ('memory', 'peak_device_mib'): (384.05, 'memory', 'peak on the device', '384 MiB'),
    ('memory', 'peak_host_mib'): (3195.4, 'memory', 'peak on the host', '3,195 MiB'),
    ('energy', 'device_j'): (150.887, 'energy', 'device', '151 J'),
    ('energy', 'mean_w'): (253.7, 'energy', 'mean power', '254 W'),
    ('energy', 'idle_w'): (122.7, 'energy', 'idle power', '123 W'),
    ('energy', 'source'): ('NVML energy counter', 'energy', 'source', 'NVML energy counter'),
    ('utilisation', 'cpu_percent'): (49.0, 'machine usage', 'CPU of the run, relative to one core', '49%'),
    ('utilisation', 'gpu_percent'): (12.5, 'machine usage', 'GPU', '12.5%'),
    ('machine', 'cores'): (2, 'machine usage', 'cores', '2'),
    ('machine', 'jobs'): (3, 'machine usage', 'concurrent jobs', '3'),
    ('machine', 'wall_s'): (70.5, 'machine usage', 'observed time', '70.5 s'),
    ('machine', 'used_cpu_s'): (80.5, 'machine usage', 'CPU time of all programs', '80.5 s'),
    ('machine', 'own_cpu_s'): (34.5, 'machine usage', 'CPU time of the run', '34.5 s'),
    ('machine', 'cpu_steal'): (0.02, 'machine usage', 'CPU used by other virtual machines', '0.02%'),
    ('machine', 'busy_share'): (0.048, 'machine usage', 'CPU used by other programs', '4.8%'),
    ('machine', 'idle_gpu_percent'): (7.0, 'machine usage', 'GPU before the run', '7%'),
    ('machine', 'load_average_start'): (2.25, 'machine usage', 'load average at the start', '2.25'),
    ('machine', 'load_average_mean'): (1.5, 'machine usage', 'mean load average', '1.5'),
    ('machine', 'load_average_end'): (1.75, 'machine usage', 'load average at the end', '1.75'),
    ('losses', 'hard'): (0.2, 'final losses', 'hard', '0.2'),
    ('losses', 'soft'): (0.26, 'final losses', 'soft', '0.26'),
}


@pytest.fixture
def record() -> dict:
    made = make_record('full_kd', value=0.7)
    for place, _ in FIGURES:
        made[place] = {}
    for (place, key), (value, *_) in FIGURES.items():
        made[place][key] = value
    return made


def test_each_figure_has_its_own_name_and_its_unit(record):
    rows = record_rows(record)
    found = {(group, name): value for group, name, value in rows}
    assert len(found) == len(rows), 'two figures with one name'
    for (place, key), (_, group, name, text) in FIGURES.items():
        assert found.get((group, name)) == text, (place, key)
    groups = {group for _, group, _, _ in FIGURES.values()}
    assert sum(group in groups for group, _ in found) == len(FIGURES)
    assert found['scores', 'test MAP (primary)'] == '0.700' and found['scores', 'dev MAP'] == '0.600'


def test_what_is_null_is_no_row_but_a_reason(record):
    record['energy'] = dict(device_j=None)
    record['reasons'] = {'energy.device_j': 'made up'}
    rows = record_rows(record)
    assert not [row for row in rows if row[0] == 'energy']
    assert ['not measured', 'energy.device_j', 'made up'] in rows
    assert {row[0] for row in record_rows(record, settings=False)} == {row[0] for row in rows} - {'settings'}


def test_settings_that_a_loss_of_the_users_replaces_are_not_shown(record):
    record['settings'] |= dict(alpha=0.5, temperature=2.0)
    assert {'alpha', 'temperature'} <= {name for group, name, _ in record_rows(record) if group == 'settings'}
    record['settings']['loss_id'] = 'focal-0123456789ab'
    shown = {name for group, name, _ in record_rows(record) if group == 'settings'}
    assert 'loss_id' in shown and not {'alpha', 'temperature', 'dialect'} & shown
