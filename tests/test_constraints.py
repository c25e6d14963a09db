"""What is installed is what was tried: every package has a version and hashes, none that kdnotes needs
is missing, pip refuses a file with another hash, and known vulnerabilities are told.
"""

import base64
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FILES = ['constraints.txt', 'constraints-cuda.txt']
ENTRY = re.compile(
    r'(?P<name>[a-z0-9-]+)==(?P<version>[0-9][0-9a-z.]*)(?P<marker> ; [^\\\n@]+)? \\\n'
    r'(?P<hashes>(?: {4}--hash=sha256:[0-9a-f]{64} \\\n)* {4}--hash=sha256:[0-9a-f]{64}\n)'
)
sys.path.insert(0, str(ROOT / 'tools'))
import audit  # noqa: E402
import constraints  # noqa: E402


def text(file: str) -> str:
    return (ROOT / file).read_text(encoding='utf-8')


def pins() -> dict[str, list[re.Match]]:
    "What both files pin, by name; a name is pinned twice where two Pythons need two versions."
    found = {}
    for entry in ENTRY.finditer(text(FILES[0]) + text(FILES[1])):
        found.setdefault(entry['name'], []).append(entry)
    return found


@pytest.mark.parametrize('file', FILES)
def test_every_line_is_a_version_with_hashes_and_nothing_else(file):
    head = re.match(r'(#.*\n)+', text(file))[0]
    assert '/' not in head, 'no path, no host'
    assert 'make constraints' in head, 'says how it was made'
    assert ENTRY.sub('', text(file)[len(head) :]) == ''


def test_one_version_of_a_package_is_chosen_on_one_machine():
    for name, entries in pins().items():
        assert len(entries) == 1 or all(entry['marker'] for entry in entries), name


def test_all_that_kdnotes_needs_is_pinned():
    "The closure of pyproject.toml, its extras and its build, as the installed packages tell it."
    pinned = pins()
    seen = set()
    waiting = [Requirement(r) for r in constraints.requirements()]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert name in pinned, f'{name} has no pin: make constraints'
        assert any(e['version'] in requirement.specifier for e in pinned[name]), requirement
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({'extra': e}) for e in ('', *extras)):
                waiting.append(need)
    assert len(seen) > 100


def test_torch_is_accepted_as_a_cpu_build_and_as_a_cuda_build():
    [torch] = pins()['torch']
    sums = text('tools/torch-cpu.sha256').split()[::2]
    assert sums and all(f'sha256:{digest}' in torch['hashes'] for digest in sums)
    assert len(torch['hashes'].splitlines()) > len(sums)
    cuda = [e['name'] for e in ENTRY.finditer(text('constraints-cuda.txt'))]
    assert 'triton' in cuda and 'nvidia-cublas' in cuda and 'nvidia-ml-py' not in cuda
    assert not any(constraints.is_cuda(e[0]) for e in ENTRY.finditer(text('constraints.txt')))


def test_a_new_torch_needs_the_hashes_of_its_cpu_builds():
    with pytest.raises(SystemExit, match='no CPU build of torch 99.0'):
        constraints.with_cpu_builds('torch==99.0 \\\n    --hash=sha256:' + '0' * 64 + '\n')


def test_the_versions_alone_are_read_as_the_how_to_says():
    cells = json.loads(text('nbs/howto/machines.ipynb'))['cells']
    lines = [line for c in cells for line in ''.join(c['source']).splitlines()]
    command = next(line for line in lines if line.startswith('grep -h =='))
    listed = subprocess.run(
        command.partition(' > ')[0], shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    requirements = [Requirement(line) for line in listed.splitlines()]
    assert len(requirements) == sum(len(entries) for entries in pins().values())
    assert {r.name for r in requirements} == set(pins())


def test_make_setup_installs_nothing_without_a_hash():
    make = ['make', '--dry-run', '--always-make', 'setup']
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert commands.startswith('tools/setup.sh ') and 'install' not in commands
    script = (ROOT / 'tools' / 'setup.sh').read_text()
    (hashed,) = re.findall(r'^install\(\) \{ (.*); \}$', script, re.M)
    assert '--require-hashes' in hashed and '--no-deps' in hashed
    assert len(re.findall(r'(?:^|\| |    )install -', script, re.M)) == 4
    (own,) = re.findall(r'^pip install .*', script, re.M)
    assert own.endswith('--no-deps --no-build-isolation --editable .')


def wheel(folder: Path) -> Path:
    "A package that holds nothing."
    info = 'tiny-1.0.dist-info'
    parts = {
        'tiny.py': b'',
        f'{info}/METADATA': b'Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n',
        f'{info}/WHEEL': b'Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
    }
    record = [f'{info}/RECORD,,']
    for name, data in parts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()
        record.append(f'{name},sha256={digest},{len(data)}')
    path = folder / 'tiny-1.0-py3-none-any.whl'
    with zipfile.ZipFile(path, 'w') as file:
        for name, data in {**parts, f'{info}/RECORD': '\n'.join(record).encode()}.items():
            file.writestr(name, data)
    return path


def pip_install(folder: Path, line: str) -> subprocess.CompletedProcess:
    "As `make setup` calls pip, but from a folder and without installing."
    file = folder / 'constraints.txt'
    file.write_text(line)
    command = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--require-hashes', '--dry-run']
    command += ['--no-index', '--find-links', str(folder), '-r', str(file)]
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith('PIP_')}
    surroundings['PIP_CONFIG_FILE'] = os.devnull
    return subprocess.run(command, env=surroundings, capture_output=True, text=True)


def test_pip_refuses_a_file_with_another_hash_and_one_without(tmp_path):
    digest = hashlib.sha256(wheel(tmp_path).read_bytes()).hexdigest()
    asked = f'tiny==1.0 --hash=sha256:{digest}'
    accepted = pip_install(tmp_path, asked)
    assert accepted.returncode == 0 and 'Would install tiny-1.0' in accepted.stdout

    with zipfile.ZipFile(tmp_path / 'tiny-1.0-py3-none-any.whl', 'a') as file:
        file.writestr('more.py', 'print("not what was tried")')
    tampered = pip_install(tmp_path, asked)
    assert tampered.returncode == 1 and 'DO NOT MATCH THE HASHES' in tampered.stderr

    unhashed = pip_install(tmp_path, 'tiny==1.0')
    assert unhashed.returncode == 1 and 'Hashes are required' in unhashed.stderr


def run_audit(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'audit.py'), *arguments], capture_output=True, text=True
    )


@pytest.fixture
def database():
    "Answers as OSV does: it knows of something in tornado, and in a package that only other platforms have."
    bad = {'tornado': '7.0', 'pywinpty': '4.0'}

    class Osv(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
            package = question['package']
            answer = {}
            if fixed := bad.get(package['name']):
                events = [{'introduced': '0'}, {'fixed': fixed}]
                affected = [{'package': package, 'ranges': [{'type': 'ECOSYSTEM', 'events': events}]}]
                known = {'id': 'PYSEC-0', 'aliases': ['CVE-0'], 'summary': 'Made up.', 'affected': affected}
                answer = {'vulns': [known]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Osv) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f'http://127.0.0.1:{server.server_port}/v1/query'
        server.shutdown()
        thread.join()


@pytest.mark.exhaustive
def test_a_known_vulnerability_fails_the_audit(database):
    pytest.importorskip('pip_audit', reason='the audit is made with the package pip-audit')
    done = run_audit('--database', database)
    assert done.returncode == 1, done.stderr
    tornado, pywinpty = pins()['tornado'][0], pins()['pywinpty'][0]
    versions = sum(len(entries) for entries in pins().values())
    assert done.stdout.splitlines() == [
        f'pywinpty {pywinpty["version"]}: PYSEC-0, CVE-0; fixed in 4.0. Made up.',
        f'tornado {tornado["version"]}: PYSEC-0, CVE-0; fixed in 7.0. Made up.',
        f'{versions} pinned versions audited: 2 known vulnerabilities.',
    ]


@pytest.mark.parametrize('required', [False, True])
def test_a_database_that_does_not_answer_is_said(required):
    nobody = 'http://127.0.0.1:9/v1/query'  # the port of discard, where nothing listens
    done = run_audit('--database', nobody, *['--required'] * required)
    assert done.returncode == required
    assert re.fullmatch(
        r'The dependencies were not audited: its database cannot be reached \(.*\)\.\n', done.stderr
    )


def test_two_versions_of_one_package_are_both_audited():
    both = 'a==1 ; python_full_version < "3.12" \\\n    --hash=sha256:0\na==2 \\\n    --hash=sha256:0\nb==1\n'
    assert audit.pinned_files(both) == ['a==1\nb==1\n', 'a==2\n']
