"What processes a command has started, asked while they come and go: one that has just ended is none of them."

import time
from collections.abc import Iterable
import psutil


def has_ended(process: psutil.Process) -> bool:
    "Gone, or a zombie, which only waits for its parent to notice."
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
