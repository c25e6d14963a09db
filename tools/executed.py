"Run notebooks on the embedded corpus and keep what they show for the site: docs/executed/."

import os
import re
import sys
import tempfile
from pathlib import Path
import nbformat
import papermill

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / 'docs' / 'executed'
# what each is given; minutes on two cores: 2 and 8
GIVEN = dict(run=dict(mode='mixed_kd', corpus='embedded'), study=dict(corpus='embedded', seeds=3))


def is_bar(output: nbformat.NotebookNode) -> bool:
    "Is an output a bar of progress, drawn by a widget or in letters?"
    data = output.get('data', {})
    alone = output.output_type == 'display_data' and set(data) == {'text/plain'}
    return alone or 'application/vnd.jupyter.widget-view+json' in data


# how far a training in a terminal's words has come
STEP = re.compile(r'^ +\d+ %: step .*\n', re.M)


def without_traces(
    notebook: nbformat.NotebookNode,
    home: Path,  # where its runs lay
) -> nbformat.NotebookNode:
    "A notebook without the marks of when and where it was run, and without its progress bars."
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == 'tags'}
        if cell.cell_type == 'code':
            cell.execution_count = None
            cell.outputs = [o for o in cell.outputs if not is_bar(o)]
            for output in cell.outputs:
                if output.output_type == 'stream':
                    output.text = STEP.sub('', output.text)
                output.metadata = {}
                output.pop('execution_count', None)
                if output.output_type == 'execute_result':
                    output.execution_count = None
            cell.outputs = [o for o in cell.outputs if o.get('text') != '']
    notebook.metadata = {}
    text = nbformat.writes(notebook)
    for place in (str(home), str(ROOT)):
        text = text.replace(f'{place}/', '')
    return nbformat.reads(text, as_version=4)


def execute(name: str, folder: Path) -> None:
    "Run one in a home of its own, and keep its outputs."
    made = folder / f'{name}.ipynb'
    papermill.execute_notebook(
        str(ROOT / 'nbs' / f'{name}.ipynb'), str(made), GIVEN[name], kernel_name='python3', progress_bar=False
    )
    kept = without_traces(nbformat.read(made, as_version=4), folder)
    EXECUTED.mkdir(exist_ok=True)
    nbformat.write(kept, EXECUTED / f'{name}.ipynb')


if __name__ == '__main__':
    for name in sys.argv[1:] or GIVEN:
        with tempfile.TemporaryDirectory(prefix='kdnotes-executed-') as folder:
            os.environ['KDNOTES_HOME'] = folder
            execute(name, Path(folder))
            print(f'docs/executed/{name}.ipynb')
