"""Sphinx's configuration: `python -m sphinx -W docs build/docs` makes the pages in build/docs.

Docstrings are written in plain Markdown and Google's style; `to_rst` turns their backticks and stars into
reStructuredText, and napoleon reads their sections. The address of the repository stands in pyproject.toml alone.
"""

import importlib
import inspect
import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

HERE = Path(__file__).parent
ROOT = HERE.parent

settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
repository = settings["urls"]["Repository"]

project = "apgrad"
author = settings["authors"][0]["name"]
copyright = f"{author}; Apache-2.0"
html_title = "apgrad"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["figures", "inventories"]
templates_path = []
suppress_warnings = ["toc.empty_glob", "misc.highlighting_failure"]

# The names of other libraries that these pages speak of: a build has no network, so inventories stand here as text.
LIBRARIES = {
    "jax": "https://docs.jax.dev/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "numpyro": "https://num.pyro.ai/en/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "python": "https://docs.python.org/3/",
}
intersphinx_mapping = {name: (url, f"inventories/{name}.txt") for name, url in LIBRARIES.items()}

# Where a name is not the one that its documentation has: modules that people import under a short name, and types that
# an annotation knows by the module that defines them.
PREFIXES = {
    "ap": "apgrad",
    "ap.variational": "apgrad.expectations.variational",
    "ap.weights": "apgrad.expectations.weights",
    "ap.diagnostics": "apgrad.expectations.diagnostics",
    "weights": "apgrad.expectations.weights",
    "meta": "apgrad.meta",
    "mplp": "apgrad.mplp",
    "nnx": "flax.nnx",
    "lax": "jax.lax",
    "jnp": "jax.numpy",
    "numpyro.infer": "numpyro.infer.svi",
}
DEFINED = {
    "jax.jaxlib._jax.Array": "jax.Array",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "flax.nnx.helpers.Sequential": "flax.nnx.Sequential",
    "flax.nnx.rnglib.Rngs": "flax.nnx.Rngs",
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
}

# The theme is furo: light and dark, readable on a phone, searched in the browser, three packages.
html_theme = "furo"
html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["style.css"]
html_js_files = ["tables.js"]
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Notebooks are shown with the outputs that they were committed with; the tests execute them.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
myst_url_schemes = {
    "http": None,
    "https": None,
    "repo": {"url": repository + "/blob/main/{{path}}", "title": "{{path}}"},
}

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

SECTIONS = re.compile(r"\s*(Args|Returns|Raises|Example|Examples|Attributes|Note|Yields):$")


def to_rst(app, what, name, obj, options, lines):
    """Turns a Markdown docstring into reStructuredText, in place.

    Text in single backticks becomes a literal; stars, bars and trailing underscores outside of literals are escaped;
    a block of code, indented after an empty line, becomes a literal block. Examples after `>>>` stay as they are.
    """
    written, code, doctest, before, depth = [], None, False, "", 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        blank = not line.strip()
        doctest = line.lstrip().startswith((">>>", "...")) or (doctest and not blank)
        if code is not None and not blank and indent < code:
            code = None
        begins_code = not blank and not doctest and code is None and not before and indent >= depth + 4
        if begins_code:
            written += [" " * depth + "::", ""]
            code = indent
        if not blank and not doctest and code is None:
            depth = indent + 2 if SECTIONS.fullmatch(line) else indent
        if not doctest and code is None and not blank and not SECTIONS.fullmatch(line):
            outside, literal = line.split("`")[::2], line.split("`")[1::2]
            if line.lstrip().startswith("* "):
                outside[0] = outside[0].replace("* ", "\0 ", 1)
            outside = [re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", re.sub(r"([*|])", r"\\\1", text)) for text in outside]
            outside[0] = outside[0].replace("\0", "*")
            outside[1:] = [re.sub(r"^(?=\w)", r"\\ ", text) for text in outside[1:]]
            parts = [text for pair in zip(outside, [f"``{t}``" for t in literal] + [""], strict=False) for text in pair]
            line = "".join(parts)
        written.append(line)
        before = line.strip()
    lines[:] = written


def linkcode_resolve(domain, info):
    """The address of an object's source: its file in the repository, and its lines."""
    found = importlib.import_module(info["module"])
    try:
        for name in info["fullname"].split("."):
            found = getattr(found, name)
        found = inspect.unwrap(found)
        file, (lines, first) = Path(inspect.getsourcefile(found)), inspect.getsourcelines(found)
        path = file.resolve().relative_to(ROOT)
    except (AttributeError, TypeError, OSError, ValueError):  # a value, or another package's object
        return None
    return f"{repository}/blob/main/{path}#L{first}-L{first + len(lines) - 1}"


def names_on(text):
    """A table of the names that a page of the API reference has, a line each."""
    module, names = "apgrad", []
    for kind, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)", text, re.MULTILINE):
        module = name if kind == "currentmodule" else module
        names += [] if kind == "currentmodule" else [f"   ~{module}.{name}"]
    lines = ["```{eval-rst}", ".. autosummary::", "   :nosignatures:", "", *names, "```", ""]
    return "\n".join(lines) if names else ""


def list_names(app, docname, source):
    """Puts a table of a page's names on top of a page of the API reference; a wing's page has one for each group."""
    text = source[0]
    if not docname.startswith("api/") or docname == "api/index":
        return
    groups = re.findall(rf"^{docname.removeprefix('api/')}/(\w+)$", text, re.MULTILINE)
    if groups:
        for group in groups:
            page = (HERE / f"{docname}/{group}.md").read_text()
            text += f"\n## [{page.splitlines()[0].lstrip('# ')}]({Path(docname).name}/{group}.md)\n\n{names_on(page)}"
    else:
        top = re.search(r"^(## |```)", text, re.MULTILINE).start()
        text = text[:top] + names_on(text) + "\n" + text[top:]
    source[0] = text


def link_names(app, doctree):
    """Names in code type, `ap.grad` or `jax.lax.scan`, become links where their documentation is known."""
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext()
        linked = isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref)
        if linked or not re.fullmatch(r"[a-z]\w*(\.\w+)+", name):
            continue
        for prefix in sorted(PREFIXES, key=len, reverse=True):
            if name.startswith(prefix + "."):
                name = PREFIXES[prefix] + name[len(prefix) :]
                break
        link = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=name, refexplicit=True)
        link["refdoc"] = app.env.docname
        literal.replace_self(link)
        link += literal


def name_as_documented(app, env, node, contnode):
    """Lets intersphinx look for a type under the name that its documentation has."""
    node["reftarget"] = DEFINED.get(node.get("reftarget"), node.get("reftarget"))


def skip_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple stand in its docstring already; its machinery is nobody's business."""
    return True if type(obj).__name__ == "_tuplegetter" or name in ("_fields", "_make") else None


def copy_notebooks(app, config):
    """Sphinx reads notebooks in its own folder only; the copies are not committed, and link from docs/notebooks."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text, copy = path.read_text().replace("](../docs/", "](../"), target / path.name
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


def setup(app):
    app.connect("config-inited", copy_notebooks)
    app.connect("source-read", list_names)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", name_as_documented, priority=100)
    app.connect("autodoc-process-docstring", to_rst, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
