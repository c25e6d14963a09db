"Export bench/nbs/*.ipynb to bench/*.py, which no package holds; `nbdev_export` does the library's alone."

from pathlib import Path
from nbdev.export import nb_export

for notebook in sorted(Path('bench/nbs').glob('*.ipynb')):
    nb_export(notebook, lib_path='bench')
