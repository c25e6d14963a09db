"The site's generator: notebooks and modules -> MyST -> Sphinx. `python -m docs` builds `_docs/`."
