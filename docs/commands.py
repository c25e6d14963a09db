"The page of the commands, made of what `kdnotes COMMAND --help` says."

import contextlib
import io
import os
import re
from unittest import mock
from docs.markdown import fenced
from docs.symbols import DocsError

WIDTH = 96
# a command and what it is for, in the list that `kdnotes --help` prints
LISTED = re.compile(r'^[ │]{2,6}([a-z][a-z-]*) {2,}\S', re.M)
# from here on a help repeats the page of the parameters
REPEATED = re.compile(r'^parameters and their defaults:\n.*', re.M | re.S)


def help_of(*command: str) -> str:
    "What a command says of itself, the same on every terminal."
    from kdnotes.cli import main

    printed = io.StringIO()
    plain = dict(NO_COLOR='1', TERM='dumb', COLUMNS=str(WIDTH))
    code = 0
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(printed):
        try:
            code = main([*command, '--help'])
        except SystemExit as end:
            code = end.code
    if code:
        raise DocsError(f'`{" ".join(["kdnotes", *command, "--help"])}` ended with {code}')
    return '\n'.join(line.rstrip() for line in printed.getvalue().splitlines()).strip()


def listed(overview: str) -> list[str]:
    "The commands that the overview names."
    return list(dict.fromkeys(LISTED.findall(overview)))


def commands_page() -> str:
    "Every command."
    overview = help_of()
    names = listed(overview)
    if not names:
        raise DocsError('`kdnotes --help` lists no command that the site could show; see docs/commands.py')
    parts = ['# Commands', fenced(overview)]
    for name in names:
        text = help_of(name)
        short = REPEATED.sub('', text).strip()
        more = '' if short == text else 'It takes [parameters of a run](/reference/parameters.md).'
        parts += [f'## kdnotes {name}', fenced(short), more]
    return '\n\n'.join(filter(None, parts)) + '\n'
