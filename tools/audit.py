"""Look up the known vulnerabilities of all that constraints.txt and constraints-cuda.txt pin.
Some are found: ends with 1. The database does not answer: a sentence says so; ends with 1 if --required.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / 'constraints.txt', ROOT / 'constraints-cuda.txt']
DATABASE = 'https://api.osv.dev/v1/query'
TIMEOUT_S = 5
TOTAL_TIMEOUT_S = 180
ACCEPTED = {}  # id of a vulnerability that kdnotes is not open to: why


class NotAudited(Exception):
    "The audit did not take place; the text says why."


def ask_for_one(database: str):
    "A database that does not answer one question fast is not asked 200."
    question = json.dumps({'package': {'name': 'pip', 'ecosystem': 'PyPI'}, 'version': '1.0'})
    try:
        urllib.request.urlopen(database, question.encode(), timeout=TIMEOUT_S).close()
    except OSError as e:
        raise NotAudited(f'its database cannot be reached ({getattr(e, "reason", e)})') from e


def pinned_files(text: str) -> list[str]:
    """What pip-audit reads: pins without markers, which would hide what other platforms install.
    A package with a second version is in a second file, for one file may pin it once.
    """
    files = []
    for package, version in re.findall(r'^([^\s#=]+)==(\S+)', text, re.M):
        free = next((f for f in files if package not in f), None)
        if free is None:
            free = {}
            files.append(free)
        free[package] = version
    return [''.join(f'{package}=={version}\n' for package, version in f.items()) for f in files]


def audit(pins: str, database: str) -> list[dict]:
    "pip-audit's answer for each package of a file."
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'pins.txt'
        file.write_text(pins)
        command = [
            sys.executable,
            '-m',
            'pip_audit',
            '--requirement',
            str(file),
            '--no-deps',
            '--disable-pip',
        ]
        command += ['--vulnerability-service', 'osv', '--osv-url', database, '--timeout', str(TIMEOUT_S)]
        command += ['--format', 'json', '--progress-spinner', 'off']
        command += [f'--ignore-vuln={known}' for known in ACCEPTED]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TOTAL_TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            raise NotAudited(f'pip-audit had not finished after {TOTAL_TIMEOUT_S} s') from e
    try:
        return json.loads(done.stdout)['dependencies']
    except ValueError as e:
        reason = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
        raise NotAudited(f'pip-audit failed: {reason}') from e


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--required', action='store_true', help='end with 1 if the database does not answer')
    parser.add_argument('--database', default=DATABASE, help='address that answers as OSV does')
    options = parser.parse_args()
    pins = ''.join(f.read_text(encoding='utf-8') for f in FILES)
    try:
        ask_for_one(options.database)
        packages = [p for file in pinned_files(pins) for p in audit(file, options.database)]
        if skipped := [p['name'] for p in packages if 'skip_reason' in p]:
            raise NotAudited(f'pip-audit skipped {", ".join(skipped)}')
    except NotAudited as e:
        print(f'The dependencies were not audited: {e}.', file=sys.stderr)
        return int(options.required)
    found = [(p, v) for p in packages for v in p['vulns']]
    for package, known in found:
        names = ', '.join([known['id'], *known['aliases']])
        fixed = ', '.join(known['fix_versions']) or 'no version yet'
        print(f'{package["name"]} {package["version"]}: {names}; fixed in {fixed}. {known["description"]}')
    print(f'{len(packages)} pinned versions audited: {len(found) or "no"} known vulnerabilities.')
    return int(bool(found))


if __name__ == '__main__':
    sys.exit(main())
