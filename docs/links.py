"What a built site refers to: every link leads somewhere, and nothing is loaded from elsewhere."

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# what a browser fetches without being asked
LOADED = {
    'script': 'src',
    'img': 'src',
    'link': 'href',
    'iframe': 'src',
    'source': 'src',
    'video': 'src',
    'audio': 'src',
    'object': 'data',
    'embed': 'src',
}
# `link`s that are no more than said
SAID = {'author', 'canonical', 'license', 'index', 'search', 'next', 'prev', 'copyright', 'top', 'up'}
IN_STYLES = re.compile(r'(?:url\(|@import)\s*["\']?((?:https?:)?//[^"\')\s]+)')


@dataclass
class Found(HTMLParser):
    "A page's anchors and references."

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attrs):
        given = {name: value or '' for name, value in attrs}
        self.anchors |= {given[name] for name in ('id', 'name') if name in given}
        if tag == 'a' and 'href' in given:
            self.links.append(given['href'])
        address = given.get(LOADED.get(tag, ''), '')
        if address and not (tag == 'link' and set(given.get('rel', '').split()) & SAID):
            self.loaded.append(address)


def read(path: Path) -> Found:
    "A page."
    found = Found()
    found.feed(path.read_text(encoding='utf-8'))
    return found


def is_outside(address: str) -> bool:
    "Does an address lead away from the site?"
    parts = urlsplit(address)
    return bool(parts.scheme or parts.netloc)


def dead_links(site: Path) -> list[str]:  # sentences, none: all is well
    "References to pages, files and anchors that the site does not have."
    pages = {path.resolve(): read(path) for path in sorted(site.rglob('*.html'))}
    dead = []
    for path, found in pages.items():
        for address in [*found.links, *found.loaded]:
            if is_outside(address):
                continue
            parts = urlsplit(address)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = path.relative_to(site.resolve()).as_posix()
            anchor = unquote(parts.fragment)
            if not target.is_file():
                dead.append(f'{name} links to {address}, which is not there')
            elif anchor and target in pages and anchor not in pages[target].anchors:
                dead.append(f'{name} links to {address}, and that page has no such anchor')
    return dead


def loaded_from_elsewhere(site: Path) -> list[str]:  # sentences, none: the site needs no network
    "What a browser would fetch from the network."
    found = []
    for path in sorted(site.rglob('*.html')):
        name = path.relative_to(site).as_posix()
        for address in read(path).loaded:
            if is_outside(address) and urlsplit(address).scheme != 'data':
                found.append(f'{name} loads {address} from the network')
    for path in sorted(site.rglob('*.css')):
        for address in IN_STYLES.findall(path.read_text(encoding='utf-8')):
            found.append(f'{path.relative_to(site).as_posix()} loads {address} from the network')
    return found
