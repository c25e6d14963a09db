"What processes a command has started, asked while they come and go: one that has just ended is none of them."

import ipaddress
import subprocess
import time
from collections.abc import Callable, Iterable
import psutil


def has_ended(process: psutil.Process) -> bool:
    "Gone, or a zombie, which only waits for its parent to notice."
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable, what: str = 'it', seconds: float = 300):  # what the condition gives
    "Until something holds."
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f'waited {seconds} s for {what}'
        time.sleep(0.01)
    return found


def running(processes: Iterable[psutil.Process], seconds: float = 60) -> list[psutil.Process]:
    "Those of some processes that have not ended after so long; a busy machine takes a while."
    end = time.monotonic() + seconds
    while (left := [p for p in processes if not has_ended(p)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def command_line(process: psutil.Process) -> list[str]:
    "Its program and arguments; nothing for a process that has ended."
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie is told as the first
        return []


def descendants(pid: int) -> list[psutil.Process]:
    "Children, their children and so on; none for a process that has ended."
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(pid: int) -> list[psutil.Process]:
    "The ranks that a launcher started, without those that are still a copy of the launcher."
    return [p for p in descendants(pid) if 'kdnotes.experiment.worker' in command_line(p)]


def listening(process: subprocess.Popen) -> dict[str, set[str]]:
    "What each process, it and those that it started, listens at: command line -> addresses."
    found = {}
    for p in [psutil.Process(process.pid), *descendants(process.pid)]:
        try:
            addresses = {c.laddr.ip for c in p.net_connections('inet') if c.status == psutil.CONN_LISTEN}
            found.setdefault(' '.join(p.cmdline()), set()).update(addresses)
        except psutil.Error:
            continue  # it has just ended
    return found


def heard_of(process: subprocess.Popen) -> dict[str, set[str]]:
    "What listened at any time until the process ended."
    seen = {}
    while process.poll() is None:
        for line, addresses in listening(process).items():
            seen.setdefault(line, set()).update(addresses)
        time.sleep(0.1)
    return seen


def open_to_others(seen: dict[str, set[str]]) -> set[str]:
    "The addresses by which more than this machine is heard."
    return {a for addresses in seen.values() for a in addresses if not ipaddress.ip_address(a).is_loopback}
