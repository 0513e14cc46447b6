"""Writes the pages of the site that come from other files or from the code.

These are README, CHANGELOG and CONTRIBUTING, the notebooks, the references of the API,
of configuration keys and of commands, and a page for each attention and position
encoding.
"""

import importlib
import inspect
import os
import re
import shutil
import types
from pathlib import Path

import reference

from relattn.nn.registry import ATTENTIONS, POSITIONS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
URL = "https://github.com/relattn/relattn"
SITE = "https://relattn.github.io/relattn/"

# Files of the root that are pages.
COPIES = {
    "README.md": "root/readme.md",
    "CHANGELOG.md": "root/changelog.md",
    "CONTRIBUTING.md": "root/contributing.md",
}
NAMESPACES = {
    "relattn": "The names that most users want; each links to its description.",
    "relattn.offsets": "Grids, offsets and distances.",
    "relattn.kernels": "Pure functions on arrays.",
    "relattn.nn": "Flax Linen modules.",
    "relattn.nn.nnx": "Flax NNX modules.",
    "relattn.models": "Models.",
    "relattn.models.pretrained": "Saving and loading models with their weights.",
    "relattn.data": "Data.",
    "relattn.training": "Training and trained runs.",
}
_LINK = re.compile(r"(!?\[[^]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")


def write_pages(app):
    """Writes all pages; unchanged ones keep their time, so that Sphinx skips them."""
    for source, name in COPIES.items():
        text = (ROOT / source).read_text("utf-8")
        _write(DOCS / name, _rewrite_links(text, ROOT, DOCS / "root"))
    (DOCS / "notebooks").mkdir(exist_ok=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy2(notebook, DOCS / "notebooks")
    for namespace, about in NAMESPACES.items():
        _write(DOCS / "api" / f"{namespace}.md", _api_page(namespace, about))
    _write(DOCS / "reference" / "configuration.md", reference.configuration())
    _write(DOCS / "reference" / "commands.md", reference.commands())
    _write_mechanisms()


def rewrite_source(app, docname, source):
    """Lists all mechanisms, and rewrites the links that lead out of ``docs/``."""
    path = Path(app.env.doc2path(docname))
    if docname == "index":
        for placeholder, names in (("attention", ATTENTIONS), ("position", POSITIONS)):
            entry = f"mechanisms/{{{placeholder}}}\n"
            pages = "".join(f"mechanisms/{name}\n" for name in names)
            source[0] = source[0].replace(entry, pages)
    if path.suffix == ".md" and path.parent != DOCS / "root":
        source[0] = _rewrite_links(source[0], path.parent, path.parent)


def escape_docstring(app, what, name, obj, options, lines):
    """Keeps norms, |x|, from being read as substitutions."""
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[number] = "``".join(parts)


def shorten_signature(app, what, name, obj, options, signature, annotation):
    """Leaves out of a module's signature what Flax adds."""
    if signature:
        signature = re.sub(r", parent=<[^>]*>, name=None", "", signature)
        signature = re.sub(r"<class 'jax.numpy.(\w+)'>", r"\1", signature)
    return signature, annotation


def _rewrite_links(text, folder, page_folder):
    """Makes relative links of a file in ``folder`` links of a page, or to GitHub."""

    def rewrite(match):
        start, target, end = match.groups()
        # Pages that are only written here have a full address elsewhere.
        if target.startswith(SITE) and target.endswith(".html"):
            page = DOCS / f"{target[len(SITE) : -len('.html')]}.md"
            return f"{start}{os.path.relpath(page, page_folder)}{end}"
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = (folder / target).resolve()
        if path.parent == ROOT and path.name in COPIES:
            path = DOCS / COPIES[path.name]
        if path.suffix == ".ipynb":
            path = DOCS / "notebooks" / path.name
        if path.is_relative_to(DOCS) or start.startswith("!"):
            return f"{start}{os.path.relpath(path, page_folder)}{end}"
        return f"{start}{URL}/blob/main/{path.relative_to(ROOT)}{end}"

    return _LINK.sub(rewrite, text)


def _write(path, text):
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def _public_names(namespace):
    module = importlib.import_module(namespace)
    # A package gathers the names of its modules.
    home = "relattn" if hasattr(module, "__path__") else namespace
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (getattr(value, "__module__", None) or "").startswith(home)
        and value.__module__ != "relattn.extras"
        and (inspect.isroutine(value) or inspect.isclass(value))
    ]


def _api_page(namespace, about):
    """Returns the page of a namespace; that of `relattn` links to the others."""
    module = importlib.import_module(namespace)
    lines = [f"# {namespace}", "", about, "", "```{eval-rst}"]
    if namespace == "relattn":
        for name in [*_public_names(namespace), *module._FUNCTIONS]:
            home = next(
                other
                for other in [*NAMESPACES][1:]
                if hasattr(importlib.import_module(other), name)
            )
            summary = inspect.getdoc(getattr(module, name)).splitlines()[0]
            lines.append(f"- `{name} <{home}.{name}>`: {summary}".replace("|", r"\|"))
        return "\n".join([*lines, "```", ""])
    lines += [f".. currentmodule:: {namespace}", ""]
    for name in _public_names(namespace):
        is_class = inspect.isclass(getattr(module, name))
        lines.append(f".. auto{'class' if is_class else 'function'}:: {name}")
        if is_class:
            lines.append("   :members:")
        lines.append("")
    return "\n".join([*lines, "```", ""])


def _table(page, name):
    """Returns the header and the rows of a generated table of a page."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    block = text.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end")[0]
    header, _, *rows = block.strip().splitlines()
    return header, rows


def _first_cells(page, name):
    """Returns the row of a page's first table that describes a mechanism."""
    text = (DOCS / f"{page}.md").read_text("utf-8").split("<!-- table")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    found = [row for row in rows[2:] if f"`{name}`" in row.split("|")[1]]
    return "\n".join([*rows[:2], *found])


def _write_mechanisms():
    """Writes a page with a picture for each attention and position encoding."""
    folder = DOCS / "mechanisms"
    folder.mkdir(exist_ok=True)
    for kind, table in (("attentions", ATTENTIONS), ("positions", POSITIONS)):
        for name, module in table.items():
            picture = folder / f"{name}.png"
            if not picture.exists():
                _draw_weights(kind, name, picture)
            _write(folder / f"{name}.md", _mechanism_page(kind, name, module))


def _mechanism_page(kind, name, module):
    column = 1 if kind == "attentions" else 2
    errors, rows = _table("contracts", "translation")
    rows = [row for row in rows if row.split("|")[column].strip() == f"`{name}`"]
    content = (
        "a random image" if kind == "attentions" else "a uniform image, with softmax"
    )
    lines = [
        f"# {name}",
        f"```{{eval-rst}}\n.. autoclass:: {module.__module__}.{module.__name__}\n"
        "   :no-index:\n```",
        "## Formula",
        _formula(name),
        "## Weights",
        f"![Attention weights of the centre token, two heads]({name}.png)",
        "",
        "The weights with which the centre token of a 9x9 grid attends to the others, "
        f"by offset, in two heads with random parameters, on {content}. Colours are "
        "scaled to each head.",
        "## Cost and grids",
        _rewrite_links(_first_cells(kind, name), DOCS, DOCS / "mechanisms"),
    ]
    header, kernels = _table("contracts", "contracts")
    kernels = [row for row in kernels if f"`{name}`" in row.split("|")[2]]
    # Positions that are added to the tokens have no kernel.
    if kernels:
        rule = "| --- " * (header.count("|") - 1) + "|"
        lines += ["## Contracts", "\n".join([header, rule, *kernels])]
    rule = "| --- " * (errors.count("|") - 1) + "|"
    lines += [
        "## Translation error",
        "The change of the output when the image moves, relative to the output; see "
        "[contracts](../contracts.md).",
        "\n".join([errors, rule, *rows]),
    ]
    return "\n\n".join(lines) + "\n"


def _formula(name):
    """Returns the section of a mechanism in docs/formulas.md, without its title."""
    text = (DOCS / "formulas.md").read_text("utf-8")
    return re.split(r"^#+ ", text.split(f"\n### {name}\n")[1], flags=re.M)[0].strip()


def _draw_weights(kind, name, path):
    """Draws the weights of the centre token of a 9x9 grid in two heads."""
    import jax
    import numpy as np
    from matplotlib.figure import Figure

    from relattn.models import ViT
    from relattn.models.weights import attention_weights

    side = 9
    attention, position = "softmax", "none"
    if kind == "attentions":
        attention = {"favor": "favor(num_features=512)", "linformer": "linformer(k=27)"}
        attention = attention.get(name, name)
    else:
        position = name
    model = ViT(
        3,
        dim=32,
        num_heads=2,
        num_layers=1,
        patch_size=1,
        attention=attention,
        position=position,
    )
    rng = np.random.default_rng(0)
    images = np.ones((1, side, side, 3), np.float32)
    if kind == "attentions":
        images = rng.normal(size=images.shape).astype(np.float32)
    variables = dict(model.init(jax.random.key(0), images))
    # Tables that start at zero would show nothing.
    noise = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), variables["params"]
    )
    centre, start = 1 + side**2 // 2, variables["params"]
    for scale in (0.8, 0.4, 0.2, 0.1, 0.05):
        variables["params"] = jax.tree.map(
            lambda leaf, drawn, scale=scale: leaf + scale * drawn, start, noise
        )
        (weights,) = attention_weights(model, variables, images)
        # Most of the weight on one token would show as little.
        if weights[0, :, centre].max() < 0.5:
            break
    figure = Figure(figsize=(7, 3), layout="constrained")
    reach = side // 2 + 0.5
    for head, axes in enumerate(figure.subplots(1, 2)):
        grid = np.reshape(weights[0, head, centre, 1:], (side, side))
        extent = (-reach, reach, reach, -reach)
        shown = axes.imshow(grid, extent=extent, vmin=min(0.0, grid.min()))
        axes.set(xlabel="columns", ylabel="rows", title=f"head {head}")
        figure.colorbar(shown, ax=axes)
    figure.savefig(path, dpi=100)
