"What processes a command has started, asked while they come and go: one that has just ended is none of them."

import psutil


def has_ended(process: psutil.Process) -> bool:
    "Gone, or a zombie, which only waits for its parent to notice."
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
