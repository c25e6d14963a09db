"The notebook that trains on several machines of a Ray cluster: this machine stands for two."

import json
import nbformat
import pytest
from notebooks import papermill

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_one_notebook_trains_on_two_machines_pauses_goes_on_and_leaves_nothing(tmp_path, small_teacher):
    pytest.importorskip('ray', reason='Ray is not installed')
    given = dict(teacher=small_teacher, student_layers='1', ranks=2, threads_per_rank=1, max_length=32)
    given |= dict(task='text_classification', mode='full_student', student_init='teacher_pretrained')
    # no smoke run, which would be over before the pause
    course = dict(epochs=20, score_every=20, pause_at=20)
    output = tmp_path / 'out.ipynb'
    done = papermill(tmp_path, 'nbs/cluster.ipynb', output, *(given | course).items())
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = tmp_path.glob('runs/*/full_student-*/record.json')
    record = json.loads(path.read_text())
    assert record['parallel']['reason'] == '2 ranks on cpu, 2 machines'
    assert record['resumed_at'] and record['resumed_at'][0] < record['steps'], 'it was paused, and went on'
    outputs = [o for c in nbformat.read(output, 4).cells if c.cell_type == 'code' for o in c.outputs]
    printed = ''.join(o.text for o in outputs if o.output_type == 'stream')
    assert 'paused: no machine trains, and the state is saved' in printed
    assert 'log.txt: ' in printed and 'log-' in printed, 'one log per machine'
    assert printed.endswith('none\n'), 'no process is left'
    tables = ''.join(o.data.get('text/html', '') for o in outputs if 'data' in o)
    assert '<td>dev</td>' in tables, 'the validation so far'
    assert any('image/png' in o.get('data', {}) for o in outputs)
    assert any('tensorboard --logdir' in o.get('data', {}).get('text/markdown', '') for o in outputs)
