"""The public names of all modules, one a line: `python tests/public_names.py` writes them to
tests/public_names.txt again.

What stands there is what users may import. A name that appears or goes shows in the diff of that file,
and so in review.
"""

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / 'public_names.txt'


def exported(path: Path) -> list[str]:
    "A module's `__all__`, without importing it."
    for node in ast.parse(path.read_text(encoding='utf-8')).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == '__all__' for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return []


def public_names(package: Path = HERE.parent / 'kdnotes') -> str:
    "Lines 'module name', sorted; a folder's modules as 'kdnotes.folder.module'."
    lines = []
    for path in package.rglob('*.py'):
        module = '.'.join(path.relative_to(package.parent).with_suffix('').parts)
        lines += [f'{module} {name}' for name in exported(path)]
    return '\n'.join(sorted(lines)) + '\n'


if __name__ == '__main__':
    LIST.write_text(public_names(), encoding='utf-8')
    print(f'{LIST}: {len(LIST.read_text().splitlines())} names')
