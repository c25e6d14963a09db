"Run notebooks on the embedded corpus and keep what they show for the site: docs/executed/."

import base64
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
import nbformat
import papermill
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / 'docs' / 'executed'
# what each is given; minutes on two cores: 2, 8, 5 and none
GIVEN = dict(
    run=dict(mode='mixed_kd', corpus='embedded'),
    study=dict(corpus='embedded', seeds=3),
    search=dict(corpus='embedded', n_trials=6, front_seeds=1),
    scaling=dict(name='scaling'),
)
# results that are shown, not measured again: file of the checkout -> file of the home
COMMITTED = dict(scaling=('thesis/data/scaling.json', 'runs/scaling/scaling.json'))
MEASURED = (
    'What it shows here was measured before, as this notebook measures it, and is committed in '
    '`thesis/data/scaling.json`: measuring takes half an hour and a machine that does nothing else.'
)
# how far a training in a terminal's words has come
STEP = re.compile(r'^ +\d+ %: step .*\n', re.M)
DRAWING = re.compile(r'<img src="data:image/svg\+xml;base64,([^"]+)"')


def is_bar(output: nbformat.NotebookNode) -> bool:
    "Is an output a bar of progress, drawn by a widget or in letters?"
    data = output.get('data', {})
    alone = output.output_type == 'display_data' and set(data) == {'text/plain'}
    return alone or 'application/vnd.jupyter.widget-view+json' in data


def as_picture(svg: bytes, folder: Path) -> str:  # base64 of a PNG file
    "A drawing as a browser shows it, in a fifth of its room."
    drawn, made = folder / 'drawn.svg', folder / 'drawn.png'
    drawn.write_bytes(svg)
    size = [
        float(re.search(rf'{side}="([\d.]+)pt"', svg.decode())[1]) * 96 / 72 for side in ('width', 'height')
    ]
    browser = shutil.which('chromium') or shutil.which('google-chrome')
    if browser is None:
        raise SystemExit('executed: no Chromium here, which draws the figures: apt-get install chromium')
    how = [
        '--headless',
        '--no-sandbox',
        '--disable-gpu',
        '--hide-scrollbars',
        '--force-device-scale-factor=1.5',
    ]
    shown = [f'--window-size={size[0]:.0f},{size[1]:.0f}', f'--screenshot={made}', drawn.as_uri()]
    subprocess.run([browser, *how, *shown], check=True, capture_output=True)
    return with_palette(made.read_bytes())


def with_palette(png: bytes) -> str:  # base64
    "A picture in a third of its room."
    kept = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert('RGB')
    reduced = picture.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(kept, 'png', optimize=True)
    return base64.b64encode(kept.getvalue()).decode()


def small(output: nbformat.NotebookNode, folder: Path) -> None:
    "Make an output's drawing a picture, and cut what a terminal was told of progress."
    if output.output_type == 'stream':
        output.text = STEP.sub('', output.text)
    data = output.get('data', {})
    if drawing := DRAWING.match(data.get('text/html', '')):
        output.data = {'image/png': as_picture(base64.b64decode(drawing[1]), folder)}
    elif 'image/png' in data:
        data['image/png'] = with_palette(base64.b64decode(data['image/png']))


def without_traces(
    notebook: nbformat.NotebookNode,
    home: Path,  # where its runs lay
) -> nbformat.NotebookNode:
    "A notebook without the marks of when and where it was run, and without its progress bars."
    for cell in notebook.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == 'tags'}
        if cell.cell_type != 'code':
            continue
        cell.execution_count = None
        cell.outputs = [o for o in cell.outputs if not is_bar(o)]
        for output in cell.outputs:
            small(output, home)
            output.pop('execution_count', None)
            if output.output_type != 'stream':
                output.metadata = {}
            if output.output_type == 'execute_result':
                output.execution_count = None
        cell.outputs = [o for o in cell.outputs if o.get('text') != '']
    notebook.metadata = {}
    text = nbformat.writes(notebook)
    for place in (str(home), str(ROOT)):
        text = text.replace(f'{place}/', '')
    return nbformat.reads(text, as_version=4)


def shown(name: str) -> str:  # Markdown
    "What a notebook's outputs are of."
    if name in COMMITTED:
        return MEASURED
    given = ', '.join(f'`{key}={value}`' for key, value in GIVEN[name].items())
    return f'What it shows here came of {given} on {os.cpu_count()} CPU cores, with defaults for all else.'


def execute(name: str, home: Path) -> None:
    "Run one in a home of its own, and keep its outputs."
    if name in COMMITTED:
        there, here = COMMITTED[name]
        (home / here).parent.mkdir(parents=True)
        shutil.copy(ROOT / there, home / here)
    made = home / f'{name}.ipynb'
    papermill.execute_notebook(
        str(ROOT / 'nbs' / f'{name}.ipynb'), str(made), GIVEN[name], kernel_name='python3', progress_bar=False
    )
    kept = without_traces(nbformat.read(made, as_version=4), home)
    EXECUTED.mkdir(exist_ok=True)
    kept.metadata['shown'] = shown(name)
    nbformat.write(kept, EXECUTED / f'{name}.ipynb')


if __name__ == '__main__':
    for name in sys.argv[1:] or GIVEN:
        with tempfile.TemporaryDirectory(prefix='kdnotes-executed-') as folder:
            os.environ['KDNOTES_HOME'] = folder
            execute(name, Path(folder))
            print(f'docs/executed/{name}.ipynb')
