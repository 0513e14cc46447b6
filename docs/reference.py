"""The reference of every configuration key and of every command, from the code."""

import importlib
import inspect
import re
import sys
from unittest import mock

from relattn import cli, command
from relattn.data import IMAGE_OPTIONS, load_data, load_images, load_text
from relattn.models import MODELS, model_options
from relattn.nn import registry
from relattn.training.config import default_config, flatten

# Programs of a clone that no command of the package starts.
PROGRAMS = (
    "studies",
    "studies.demo",
    "studies.finetune",
    "studies.linearize",
    "studies.sizes",
    "studies.sweep",
    "studies.translation",
    "benchmarks.speed",
    "benchmarks.memory",
    "benchmarks.pipeline",
    "benchmarks.compiled",
    "benchmarks.gpu",
    "benchmarks.soak",
    "tools.offline",
)
_EXAMPLES = {"attention": "favor(num_features=256)", "position": "rope2d(base=50.0)"}
_NO_DEFAULT = object()


class _Parsed(BaseException):
    """Ends a program where it would read its options; holds its parser."""


def listed(docstring):
    """Returns the descriptions in a docstring's list ``- ``key``, ``key``: text``."""
    found, keys = {}, []
    for line in inspect.cleandoc(docstring).splitlines():
        start = re.match(r"\s*- ((?:``[\w.]+``(?:, )?)+): ", line)
        if start:
            keys = re.findall(r"``([\w.]+)``", start[1])
            found |= dict.fromkeys(keys, line[start.end() :])
        elif not line.strip():
            keys = []
        else:
            found |= {key: f"{found[key]} {line.strip()}" for key in keys}
    return {key: text.rstrip(";.") for key, text in found.items()}


def commented(function):
    """Returns the comments above the lines ``config.key = value`` of a function."""
    found = re.findall(
        r"^    # (.+)\n    config\.([\w.]+) = ", inspect.getsource(function), re.M
    )
    return {key: text.rstrip(".") for text, key in found}


def attributes(module):
    """Returns the descriptions of a class's attributes, those of its bases included."""
    found = {}
    for base in reversed(module.__mro__):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        section, name = "", ""
        for line in docstring.splitlines():
            if line and not line.startswith(" "):
                section, name = line, ""
            start = re.match(r"    (\w+): (.*)", line)
            if section == "Attributes:" and start:
                name = start[1]
                found[name] = start[2]
            elif name and line.startswith("     "):
                found[name] += f" {line.strip()}"
            elif not line:
                name = ""
    return {name: text.rstrip(".") for name, text in found.items()}


def configuration():
    """Returns the reference of every key of a configuration, in Markdown."""
    defaults = flatten(default_config())
    parts = [
        "# Configuration keys",
        "Every key can be set on the command line, `--config.KEY=VALUE` "
        "([training](../training.md#configurations)). `relattn config --config=NAME` "
        "prints those of a configuration.",
        "## Training",
        _items(
            _item(f"config.{key}", text, defaults[key])
            for key, text in commented(default_config).items()
            if key in defaults
        ),
        "## Models",
        "`config.model.name` selects the model; its other keys are the options of the "
        "model, which a configuration may leave out.",
        _items(_model_items()),
    ]
    for title, table in (
        ("Attentions", registry.ATTENTIONS),
        ("Position encodings", registry.POSITIONS),
    ):
        key = "attention" if title == "Attentions" else "position"
        parts += [
            f"## {title}",
            f"Values of `config.model.{key}`, with their options, as in "
            f"`{_EXAMPLES[key]}`.",
            "\n".join(_mechanism(name, module) for name, module in table.items()),
        ]
    for title, about, described in _data_keys():
        items = (
            _item(f"config.data.{key}", text, IMAGE_OPTIONS.get(key, _NO_DEFAULT))
            for key, text in described.items()
        )
        parts += [f"## {title}", about, _items(items)]
    return "\n\n".join([*parts, ""])


def _data_keys():
    """Yields a title, a sentence and the described keys of each kind of data."""
    images, photographs = load_data.__doc__.split("Photographs", 1)
    yield (
        "Images",
        "Configurations that use `relattn.data.image_options`, as those of the package "
        "do, have all of these keys, with these defaults.",
        listed(load_images.__doc__) | listed(images),
    )
    yield (
        "Photographs that are read during training",
        "Images that do not fit into memory also have these keys.",
        listed(photographs),
    )
    yield "Text", 'With `config.data.source="text"`.', listed(load_text.__doc__)


def _model_items():
    names = ", ".join(f"`{name}`" for name in MODELS)
    yield _item("config.model.name", f"the model: {names}")
    texts, defaults = {}, {}
    for name, module in MODELS.items():
        described = attributes(module)
        for option, parameter in model_options(name).items():
            texts.setdefault(option, described[option])
            value = getattr(parameter.default, "__name__", parameter.default)
            defaults.setdefault(option, {}).setdefault(repr(value), []).append(name)
    for option, text in texts.items():
        values = "; ".join(
            f"`{value}` ({', '.join(names)})"
            for value, names in defaults[option].items()
        )
        yield f"{_item(f'config.model.{option}', text)} Default: {values}."


def _mechanism(name, module):
    """Returns a list item for an attention or position, with its options beneath."""
    described = attributes(module)
    lines = [f"- [`{name}`](../mechanisms/{name}.md)"]
    for option, parameter in inspect.signature(module).parameters.items():
        if option not in {*registry.SET_BY_MODEL, "parent", "name"}:
            item = _item(option, described[option], parameter.default)
            lines.append(f"  {item}")
    return "\n".join(lines)


def _item(key, text, default=_NO_DEFAULT):
    shown = "" if default is _NO_DEFAULT else f" Default: `{default!r}`."
    text = _markdown(text)
    return f"- `{key}`: {text[0].upper()}{text[1:]}.{shown}"


def _items(items):
    return "\n".join(items)


def _markdown(text):
    return re.sub(r"``(.+?)``", r"`\1`", text)


def commands():
    """Returns the reference of every command and its options, in Markdown."""
    parts = [
        "# Commands",
        "Options are `--name=value`. `relattn --version` prints the version. Every "
        "command also takes these options:",
        _items(map(_option, common_options())),
    ]
    for name, (module, function, _) in cli.COMMANDS.items():
        parser = find_parser(module, function, f"relattn {name}")
        parts += [f"## relattn {name}", *_describe(parser)]
    parts += ["## Programs of a clone"]
    for name in PROGRAMS:
        module = f"{name}.__main__" if name == "studies" else name
        parser = find_parser(module, "main", f"python -m {name}")
        parts += [f"### python -m {name}", *_describe(parser)]
    return "\n\n".join([*parts, ""])


def common_options():
    """Returns the options of every program."""
    return [
        action
        for action in command.Parser("python", "")._actions
        if action.dest != "help"
    ]


def find_parser(module, function, prog):
    """Returns the parser of a program, which is started until it would read options."""

    def parse_args(parser, *args, **kwargs):
        raise _Parsed(parser)

    start = getattr(importlib.import_module(module), function)
    with (
        mock.patch.object(command.Parser, "parse_args", parse_args),
        mock.patch.object(sys, "argv", [prog]),
    ):
        try:
            start([])
        except _Parsed as found:
            return found.args[0]
    raise ValueError(f"{prog} reads no options")


def own_options(parser):
    """Returns the options of a program that not every program has."""
    common = {action.dest for action in common_options()} | {"help"}
    return [action for action in parser._actions if action.dest not in common]


def _describe(parser):
    needed = [
        f"{action.option_strings[0]}={action.metavar or action.dest.upper()}"
        for action in own_options(parser)
        if action.required
    ]
    # Without a name, and after the required options.
    needed += [
        f"[{action.metavar} ...]"
        for action in own_options(parser)
        if not action.option_strings
    ]
    for group in parser._mutually_exclusive_groups:
        if group.required:
            names = (action.option_strings[0] for action in group._group_actions)
            needed.insert(0, f"({'|'.join(names)})")
    about = (parser.description or "").split(": python -m")[0].rstrip(".:")
    yield f"{_markdown(about)}."
    overrides = " [--config.KEY=VALUE ...]" if parser._overrides else ""
    yield f"```console\n$ {' '.join([parser.prog, *needed])}{overrides}\n```"
    yield _items(map(_option, own_options(parser)))


def _option(action):
    name = action.option_strings[0] if action.option_strings else action.metavar
    text = (action.help or "").rstrip(".")
    parts = [f"- `{name}`: {_markdown(text)}."]
    if action.choices:
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in action.choices)}.")
    if action.required:
        parts.append("Required.")
    elif action.default and action.default is not True:
        default = action.default
        shown = default if str(default).strip() else repr(default)
        parts.append(f"Default: `{shown}`.")
    return " ".join(parts)
