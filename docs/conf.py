"Sphinx' configuration of the site."

import html
import re
from pathlib import Path
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.logging import getLogger

LOG = getLogger(__name__)

project = 'kdnotes'
copyright = '2026, the kdnotes authors'
extensions = ['myst_nb']
smartquotes = False
html_theme = 'furo'
html_title = 'kdnotes'
html_static_path = ['_static']
html_css_files = ['site.css']
html_search_scorer = str(Path(__file__).with_name('_static') / 'scorer.js')
html_math_renderer = 'mathml'
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it fetches each page, which a browser refuses where they are files
html_last_updated_fmt = None
templates_path = []
exclude_patterns = ['files']
add_module_names = False
toc_object_entries_show_parents = 'hide'
python_maximum_signature_line_length = 78
python_trailing_comma_in_multi_line_signatures = False
pygments_style = 'friendly'
pygments_dark_style = 'monokai'
highlight_language = 'text'
nb_execution_mode = 'off'
nb_render_markdown_format = 'myst'
nb_code_prompt_show = 'Show the code'
nb_code_prompt_hide = 'Hide the code'
myst_enable_extensions = ['attrs_inline', 'colon_fence', 'dollarmath']
myst_heading_anchors = 4
myst_links_external_new_tab = False

# LaTeX that docutils does not know, and what it knows instead
SPELLINGS = {r'\\big(?![a-zA-Z])': '', r'\\dots(?![a-zA-Z])': r'\\ldots'}


def mathml(
    tex: str,
    block: bool = False,
) -> str:
    "Mathematics as browsers show it by themselves: nothing is loaded for it."
    for pattern, known in SPELLINGS.items():
        tex = re.sub(pattern, known, tex)
    return tex2mathml(tex, as_block=block)


def shown(node: nodes.Node, block: bool = False) -> str:
    "The same of a page's formula; one that cannot be read is a warning, which fails the build."
    try:
        return mathml(node.astext(), block)
    except (MathError, AttributeError) as why:
        LOG.warning('the formula %r cannot be shown: %s', node.astext(), why, location=node)
        return html.escape(node.astext())


def visit_math(translator, node: nodes.math) -> None:
    translator.body.append(shown(node))
    raise nodes.SkipNode


def visit_math_block(translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{shown(node, block=True)}</div>')
    raise nodes.SkipNode


def own_branch_alone(app, pagename: str, templatename: str, context: dict, doctree: nodes.Node) -> None:
    """The list of pages at a page's side opens where the page is: all branches in each of 400 pages would be
    two thirds of the time that the site takes, and of its size.
    """
    if whole := context.get('toctree'):
        context['toctree'] = lambda **asked: whole(**asked | dict(collapse=True))


def setup(app) -> dict:
    app.connect('html-page-context', own_branch_alone, priority=400)  # before the theme asks for the list
    app.add_html_math_renderer('mathml', (visit_math, None), (visit_math_block, None))
    return dict(parallel_read_safe=True, parallel_write_safe=True)
