"What each of several processes does with a large corpus."

from pathlib import Path


def read_large(folder: Path) -> tuple[str, int]:
    "What each of several processes does: the sum of a corpus, and how often its files were read for it."
    from kdnotes.tasks import sources

    sources.LARGE = 1
    read = sources.load_by_rules
    times = []

    def counted(*given):
        times.append(1)
        return read(*given)

    sources.load_by_rules = counted
    return sources.load_corpus('answer_selection', str(folder)).sha256, len(times)
