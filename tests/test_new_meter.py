"""A new meter is one function: once declared, it is in rows, timeline and record of a run and in the report.
One that fails is null with its error as the reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# in an interpreter of its own, since lists of meters are made when their modules are imported
SCRIPT = """
from kdnotes.telemetry.meters import meter


@meter('threads of the process', 'threads', over_time='max', key='utilisation.threads', title='threads')
def threads(process):
    "Threads of the process."
    return process.num_threads()


@meter('a counter of the system', '-', key='utilisation.locked', title='locked')
def locked(process):
    "A counter that may not be read."
    raise PermissionError('this counter may not be read')


@meter('NVML', '%', of_device=True)
def fan(gpu):
    "Speed of the fan."
    return gpu.ask('nvmlDeviceGetFanSpeed')


import json
import sys
from pathlib import Path
from small_runs import make_small_run, write_model
from kdnotes.report.figures import draw_evidence
from kdnotes.report.report import report_of
from kdnotes.results.runs import RunFolder
from kdnotes.results.tracking import scalars_of_record
from kdnotes.stats.evidence import evidence

home = Path(sys.argv[1])
folder = RunFolder('small', make_small_run('text_classification', 'baseline', write_model(home / 'model')))
record = folder.record()
found = report_of(evidence('small'), {})
row = next(row for row in folder.rows() if row['kind'] == 'telemetry')
results = json.loads(found.results[['metric', 'value', 'reason']].to_json(orient='values'))
known = dict(record=record, row=row, columns=list(found.arms.columns), results=results)
print(json.dumps(known | dict(scalars=scalars_of_record(record))))
"""


def test_it_is_in_all_that_is_left_of_a_run(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get('PYTHONPATH')])])
    env = dict(os.environ, KDNOTES_HOME=str(tmp_path), PYTHONPATH=path)
    ended = subprocess.run(
        [sys.executable, '-c', SCRIPT, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert not ended.returncode, ended.stderr[-2000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    record = found['record']
    threads = record['utilisation']['threads']
    assert threads >= 2  # the sampler's own is one of them
    assert all(1 <= point['threads'] <= threads for point in record['timeline'])
    assert record['utilisation']['locked'] is None and found['row']['locked'] is None
    assert 'PermissionError: this counter may not be read' in record['reasons']['utilisation.locked']
    [device] = record['devices']
    assert (device['fan'], record['reasons']['devices.0.fan']) == (None, 'no GPU was used')
    assert 'threads' in found['columns'] and 'locked' not in found['columns']
    results = {metric: (value, reason) for metric, value, reason in found['results']}
    assert results['utilisation.threads'] == (threads, None)
    assert results['utilisation.locked'][0] is None and 'may not be read' in results['utilisation.locked'][1]
    assert found['scalars']['run/utilisation/threads'] == threads
