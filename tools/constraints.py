"""Write constraints.txt and constraints-cuda.txt: all that pyproject.toml needs, pinned, with the sha256 of
its files on Linux, macOS and Windows. Versions stay as they are, unless the arguments, which go to uv, say
otherwise.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / 'constraints.txt'
CUDA_PINS = ROOT / 'constraints-cuda.txt'
# `sha256sum` of torch's CPU builds, which have an index of their own
CPU_SUMS = ROOT / 'tools' / 'torch-cpu.sha256'

UNPINNED = ('browser',)  # what `make setup` leaves out, as its tests need a browser of the system besides

HEADER = """\
# The exact versions everything here was tested with (Python 3.11), with the sha256 of their files for
# CPython 3.11 to 3.14 on 64 bits of Linux, macOS and Windows; `make setup` installs them. Made by
# `make constraints`, which keeps the versions; ARGS=--upgrade or ARGS='--upgrade-package numpy' takes newer
# ones.
"""
CUDA_HEADER = """\
# What torch's CUDA build needs besides constraints.txt; `make setup` installs it where torch is that build.
# Made by `make constraints`, together with constraints.txt.
"""


def project() -> dict:
    return tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))


def requirements() -> list[str]:
    "What pyproject.toml asks for: to build, to run, and its extras; pip, which installs it, is pinned too."
    config = project()
    extras = config['project']['optional-dependencies']
    asked = [r for extra, its in extras.items() if extra not in UNPINNED for r in its]
    return ['pip', *config['build-system']['requires'], *config['project']['dependencies'], *asked]


def resolve(arguments: list[str]) -> str:
    "uv's answer for every platform and Python; the versions of today's files are preferred."
    python = project()['project']['requires-python'].removeprefix('>=')
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / 'constraints.txt'
        output.write_text(''.join(p.read_text(encoding='utf-8') for p in (PINS, CUDA_PINS) if p.exists()))
        command = ['uv', 'pip', 'compile', '--quiet', '--no-config', '--universal', '--generate-hashes']
        command += ['--python-version', python, '--no-header', '--no-annotate']
        command += ['--output-file', str(output), *arguments, '-']
        subprocess.run(
            command, input='\n'.join(requirements()), text=True, check=True, stdout=subprocess.DEVNULL
        )
        return output.read_text(encoding='utf-8')


def entries(text: str) -> list[str]:
    "One string for each pin, its lines of hashes included."
    return re.findall(r'^\S.*\n(?: .*\n)*', text, re.M)


def name(entry: str) -> str:
    return entry.partition('==')[0]


def with_cpu_builds(torch: str) -> str:
    "torch's entry with the hashes of its CPU builds added."
    version = re.match(r'torch==(\S+)', torch)[1]
    sums = [line.split() for line in CPU_SUMS.read_text(encoding='utf-8').splitlines()]
    cpu = [digest for digest, file in sums if file.startswith(f'torch-{version}+cpu-')]
    if not cpu:
        raise SystemExit(
            f'tools/torch-cpu.sha256 has no CPU build of torch {version}: '
            f'add the sha256 sums of torch-{version}+cpu-*.whl, as `sha256sum` prints them'
        )
    known = re.findall(r'sha256:(\w+)', torch)
    pin = torch.partition(' \\\n')[0]
    hashes = [f'    --hash=sha256:{digest}' for digest in sorted({*known, *cpu})]
    return ' \\\n'.join([pin, *hashes]) + '\n'


INDEX = 'https://pypi.org/simple'
INTERPRETER = re.compile(r'py3|cp3(11|12|13|14)')
PLATFORM = re.compile(r'any|(manylinux|linux).*_(x86_64|aarch64)|macosx_.*|win_amd64')


def is_used(tag: Tag) -> bool:
    "Whether one of our machines installs such a wheel; with a stable ABI an older interpreter's serves, too."
    interpreter = tag.abi == 'abi3' or INTERPRETER.fullmatch(tag.interpreter)
    return bool(interpreter and PLATFORM.fullmatch(tag.platform) and not tag.abi.endswith('t'))


def with_used_files(entry: str) -> str:
    "An entry without the hashes of wheels for other interpreters and platforms."
    request = urllib.request.Request(
        f'{INDEX}/{name(entry)}/', headers={'Accept': 'application/vnd.pypi.simple.v1+json'}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)['files']
    others = {
        f['hashes']['sha256']
        for f in files
        if f['hashes']['sha256'] in entry
        and f['filename'].endswith('.whl')
        and not any(map(is_used, parse_wheel_filename(f['filename'])[3]))
    }
    pin, *hashes = re.split(r' \\\n', entry.rstrip('\n'))
    used = [line for line in hashes if line.rpartition(':')[2] not in others]
    return ' \\\n'.join([pin, *used]) + '\n'


def is_cuda(entry: str) -> bool:
    "Whether only torch's CUDA build needs it."
    return re.match(r'(cuda|nvidia)-|triton$', name(entry)) is not None and name(entry) != 'nvidia-ml-py'


def main(arguments: list[str]):
    with ThreadPoolExecutor(16) as pool:
        pins = list(pool.map(with_used_files, entries(resolve(arguments))))
    pins = [with_cpu_builds(p) if name(p) == 'torch' else p for p in pins]
    PINS.write_text(HEADER + ''.join(p for p in pins if not is_cuda(p)), encoding='utf-8')
    CUDA_PINS.write_text(CUDA_HEADER + ''.join(p for p in pins if is_cuda(p)), encoding='utf-8')


if __name__ == '__main__':
    main(sys.argv[1:])
