"Builds the site: `python -m docs`, or `make docs`."

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from docs.links import dead_links, loaded_from_elsewhere
from docs.site import ROOT, new_site, write_made, write_static
from docs.symbols import DocsError


NEEDED = ('sphinx', 'myst_nb', 'furo')  # what the extra `docs` brings


def check_packages() -> None:
    "Refuse to begin without the packages that make pages."
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise DocsError(f"{', '.join(missing)} is not installed: make setup, or pip install -e '.[docs]'")


def sphinx(
    source: Path,  # of `write_static` and `write_made`
    site: Path,  # where the pages go
) -> None:
    "Build the pages; a warning is an error."
    command = [sys.executable, '-m', 'sphinx', '-b', 'html', '-W', '--keep-going', '--quiet']
    # one process: with `-j 2` an exception in a worker leaves pages out without a word
    command += ['-d', str(source / '.doctrees'), str(source), str(site)]
    # what is written depends on the sources alone
    done = subprocess.run(command, env=os.environ | dict(PYTHONHASHSEED='0', SOURCE_DATE_EPOCH='0'))
    if done.returncode:
        raise DocsError('the pages have the warnings above; mend them in the notebooks or in docs/')


def check(site: Path) -> None:
    "Refuse a site with a link that leads nowhere, or one that needs the network."
    if found := dead_links(site) + loaded_from_elsewhere(site):
        raise DocsError('\n'.join(found))


def build(source: Path, site: Path) -> None:
    "The whole site, made anew."
    check_packages()
    made = source.parent / 'site'  # beside it myst-nb writes a folder jupyter_execute
    for folder in (source, made, site):
        shutil.rmtree(folder, ignore_errors=True)
    new = new_site(ROOT, source)
    write_static(new)
    write_made(new)
    sphinx(source, made)
    check(made)
    shutil.move(made, site)


if __name__ == '__main__':
    try:
        build(ROOT / '_proc' / 'docs', ROOT / '_docs')
    except DocsError as why:
        sys.exit(f'docs: {why}')
    print('_docs/index.html is the site; it needs no network')
