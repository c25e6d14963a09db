"The page of the commands, made of what they declare: examples, arguments and options."

from typing import Any
from docs.markdown import code, comment, escaped, fenced, paragraphs, table

COLUMNS = ('given as', 'meaning')


def given_as(parameter: Any) -> str:  # Markdown
    "How an argument or an option is typed."
    typed = ', '.join(parameter.opts) if parameter.param_type_name == 'option' else ''
    return code(' '.join(filter(None, [typed, parameter.metavar])))


def meaning(parameter: Any) -> str:  # Markdown
    "What it is for, and whether it must be given."
    said = comment(parameter.help or '')
    return f'{said} *(required)*' if parameter.required else said


def parameter_table(command: Any) -> str:
    "The arguments of a command, then its options."
    shown = [p for p in command.params if p.help and not getattr(p, 'hidden', False)]
    rows = [(given_as(p), meaning(p)) for p in shown]
    return table(COLUMNS, rows, 'parameters') if rows else ''


def about_parameters(command: Any) -> str:
    "Where the parameters of a run are described, for a command that takes them."
    takes = any('-p' in p.opts for p in command.params)
    return 'The command accepts [parameters of a run](/reference/parameters.md) with `-p`.' if takes else ''


def described(name: str, command: Any) -> str:
    "A command: what it does, examples, and what it takes."
    parts = [
        f'### kdnotes {name}',
        paragraphs(command.help or ''),
        fenced('\n'.join(line.strip() for line in command.epilog.splitlines()[2:]), 'sh'),
        parameter_table(command),
        about_parameters(command),
    ]
    return '\n\n'.join(filter(None, parts))


def exit_codes() -> str:
    "What a command's exit code says."
    from kdnotes.cli import EXIT_CODES

    rows = [(str(value), comment(said)) for value, said in EXIT_CODES.items()]
    return table(('exit code', 'meaning'), rows, 'parameters')


def commands_page() -> str:
    "Every command, under the heading that it has in `kdnotes --help`."
    import typer
    from kdnotes.cli import make_app

    app = make_app()
    commands = typer.main.get_command(app).commands
    parts = [
        '# Commands',
        '`kdnotes --help` lists the commands, and `kdnotes COMMAND --help` describes one of them.',
    ]
    for panel in dict.fromkeys(command.rich_help_panel for command in app.registered_commands):
        parts.append(f'## {escaped(panel.capitalize())}')
        parts += [described(name, of) for name, of in commands.items() if of.rich_help_panel == panel]
    return '\n\n'.join([*parts, '## Exit codes', exit_codes()]) + '\n'
