"The public names are those that were agreed on."

import difflib
from public_names import LIST
from public_names import exported
from public_names import public_names


def test_public_names_are_those_listed():
    listed, found = LIST.read_text(encoding='utf-8').splitlines(), public_names().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(listed, found, lineterm='', n=0)
        if line[:1] in '+-' and line[:3] not in ('+++', '---')
    ]
    assert changes == [], 'meant so? then write the list again: python tests/public_names.py'


def test_names_are_read_from_modules_and_packages(tmp_path):
    (tmp_path / 'kdnotes' / 'train').mkdir(parents=True)
    (tmp_path / 'kdnotes' / 'train' / 'loop.py').write_text(
        "import nothing_that_is_installed\n__all__ = ['train',\n           'Step']\n"
    )
    (tmp_path / 'kdnotes' / '_modidx.py').write_text('d = {}\n')
    assert public_names(tmp_path / 'kdnotes') == 'kdnotes.train.loop Step\nkdnotes.train.loop train\n'
    assert exported(tmp_path / 'kdnotes' / '_modidx.py') == []
