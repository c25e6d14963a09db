"`kdnotes show`: each figure of a record under a name of its own, in the unit that it was measured in."

import pytest
from handmade import make_record
from kdnotes.analysis.overview import record_in_words

FIGURES = {  # place and key of a record -> value; group, name and text of the table
    ('time', 'train_s'): (61.25, 'time', 'training', '61.2 s'),
    ('time', 'teacher_s'): (2.5, 'time', "the teacher's outputs", '2.5 s'),
    ('time', 'teacher_train_s'): (301.0, 'time', "the teacher's training", '301 s'),
    ('time', 'transfer_s'): (41.0, 'time', 'the transfer, once for all runs', '41 s'),
    ('time', 'total_s'): (364.75, 'time', 'all that a lone user waits', '365 s'),
    ('time', 'wall_s'): (71.0, 'time', 'this call', '71 s'),
    ('throughput', 'examples_per_s'): (62.743, 'speed of training', 'examples', '62.7/s'),
    ('throughput', 'tokens_per_s'): (2907.27, 'speed of training', 'tokens', '2,907/s'),
    ('throughput', 'useful_flops_per_s'): (1.9e11, 'speed of training', 'useful', '190 GFLOP/s'),
    ('latency', 'batch_1_ms'): (27.7, 'time of an answer', 'one example', '27.7 ms'),
    ('latency', 'batch_1_tokens'): (44, 'time of an answer', 'tokens of the one example', '44'),
    ('latency', 'batch_32_ms'): (339.4, 'time of an answer', '32 examples at once', '339 ms'),
    ('latency', 'batch_32_tokens'): (45, 'time of an answer', 'tokens of each of the 32', '45'),
    ('memory', 'peak_device_mib'): (384.05, 'memory', 'most on the device', '384 MiB'),
    ('memory', 'peak_host_mib'): (3195.4, 'memory', 'most on the host', '3,195 MiB'),
    ('energy', 'device_j'): (150.887, 'energy', 'of the device', '151 J'),
    ('energy', 'mean_w'): (253.7, 'energy', 'mean power', '254 W'),
    ('energy', 'idle_w'): (122.7, 'energy', 'power at rest', '123 W'),
    ('energy', 'source'): ('NVML energy counter', 'energy', 'source', 'NVML energy counter'),
    ('utilisation', 'cpu_percent'): (49.0, 'use of the machine', 'CPU time of the run, of one core', '49 %'),
    ('utilisation', 'gpu_percent'): (12.5, 'use of the machine', 'GPU', '12.5 %'),
    ('machine', 'cores'): (2, 'use of the machine', 'cores', '2'),
    ('machine', 'jobs'): (3, 'use of the machine', 'jobs', '3'),
    ('machine', 'wall_s'): (70.5, 'use of the machine', 'time that was watched', '70.5 s'),
    ('machine', 'used_cpu_s'): (80.5, 'use of the machine', 'CPU time of all programs', '80.5 s'),
    ('machine', 'own_cpu_s'): (34.5, 'use of the machine', 'CPU time of the run', '34.5 s'),
    ('machine', 'cpu_steal'): (0.02, 'use of the machine', 'CPU time that other machines took', '0.02 %'),
    ('machine', 'busy_share'): (0.048, 'use of the machine', 'CPU time that other programs took', '4.8 %'),
    ('machine', 'idle_gpu_percent'): (7.0, 'use of the machine', 'GPU before the run', '7 %'),
    ('machine', 'load_average_start'): (2.25, 'use of the machine', 'load average start', '2.2500'),
    ('machine', 'load_average_mean'): (1.5, 'use of the machine', 'load average mean', '1.5000'),
    ('machine', 'load_average_end'): (1.75, 'use of the machine', 'load average end', '1.7500'),
    ('losses', 'hard'): (0.2, 'losses at the end', 'hard', '0.2000'),
    ('losses', 'soft'): (0.26, 'losses at the end', 'soft', '0.2600'),
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
    found = record_in_words(record)
    for (place, key), (_, group, name, text) in FIGURES.items():
        assert found[group].get(name) == text, (place, key)
    for group in {group for _, group, _, _ in FIGURES.values()}:  # none stands over another
        assert len(found[group]) == sum(group == of[1] for of in FIGURES.values()), group
    assert found['scores']['test MAP (compared by it)'] == '0.700' and found['scores']['dev MAP'] == '0.6000'
