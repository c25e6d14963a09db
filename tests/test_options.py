"""An option is taken for no other: what a command does not have is refused in a sentence that names the
nearest.
"""

import pytest

from kdnotes import cli
from kdnotes.checks import gpu_check

WRONG = [
    ('study --seed 3', '`kdnotes study` has no option --seed; is it --seeds?'),
    ('study --seed=3 -p epochs=1', '`kdnotes study` has no option --seed; is it --seeds?'),
    ('study --arm full_kd', '`kdnotes study` has no option --arm; is it --arms?'),
    ('tune --trial 2', '`kdnotes tune` has no option --trial; is it --trials?'),
    ('doctor --time 3', '`kdnotes doctor` has no option --time; is it --timeout?'),
    ('gpu-check --smok --device cpu', '`kdnotes gpu-check` has no option --smok; is it --smoke?'),
    ('name --xyzzy', '`kdnotes name` has no option --xyzzy; its options are -h, -p'),
    ('study 3', "`kdnotes study` does not take '3'; `kdnotes study --help` says what it takes"),
]


@pytest.mark.parametrize('typed, told', WRONG, ids=[typed for typed, _ in WRONG])
def test_no_option_is_shortened(typed, told, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    assert cli.main(typed.split()) == 2
    assert capsys.readouterr().err == f'kdnotes: {told}\n'
    assert list(tmp_path.iterdir()) == []


def test_the_check_of_a_gpu_machine_shortens_none_either(capsys):
    assert gpu_check.main(['--smok', '--device', 'cpu']) == 2
    assert (
        capsys.readouterr().err
        == 'kdnotes: `python -m kdnotes.checks.gpu_check` has no option --smok; is it --smoke?\n'
    )


@pytest.mark.parametrize('typed', ['name', 'name -p corpus=embedded', 'name -pcorpus=embedded'])
def test_what_a_command_has_is_taken(typed, capsys):
    assert cli.main(typed.split()) == 0 and capsys.readouterr().out == 'embedded\n'
