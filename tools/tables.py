"""Writes the tables of README.md and docs/ that follow from code, tests and results.

``make tables`` runs ``python -m tools.tables``, which replaces the text between the
markers ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Names restrict it to
some tables: ``python -m tools.tables contracts pairs``. The table ``translation`` takes
minutes, since it measures every layer; the others take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relattn import command
from relattn.data.registry import SETS
from relattn.markdown import markdown_table
from relattn.messages import check_choice
from relattn.models import MODELS
from relattn.nn import registry
from studies.translation import translation_table
from tests import test_contracts, test_pairs
from tests.mechanisms import MECHANISMS, TORI
from tests.nn import test_drop_in
from tools import result_tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

# Without what users, or tests in the same process, have registered.
ATTENTIONS = [name for name in registry.ATTENTIONS if name in registry.BUILT_IN]
POSITIONS = [name for name in registry.POSITIONS if name in registry.BUILT_IN]

# The tests of each column: a mechanism has a tick if all of them run for it.
CONTRACTS = {
    "reference, value and gradient": [
        test_contracts.test_value_and_gradient_equal_the_reference
    ],
    "unbiased": [test_contracts.test_is_unbiased_within_four_standard_errors],
    "causal, bit for bit": [
        test_contracts.test_later_tokens_change_nothing_bit_for_bit
    ],
    "batch independent, masked exactly": [
        test_contracts.test_example_does_not_depend_on_its_batch,
        test_contracts.test_masked_keys_and_padding_have_no_effect,
    ],
    "finite": [test_contracts.test_large_key_gives_finite_values_and_gradients],
    "vmap, jit, pmap": [
        test_contracts.test_vmap_equals_leading_axes,
        test_contracts.TransformationsTest,
    ],
    "rolls on a torus": [
        test_contracts.test_rolled_tokens_give_rolled_outputs_and_gradients
    ],
    "lowers for cpu, cuda, tpu": [
        test_contracts.test_lowers_for_cuda_and_tpu_without_a_scatter
    ],
    "symbolic batch": [test_contracts.test_exports_with_a_symbolic_batch],
    "symbolic length": [test_contracts.test_exports_with_a_symbolic_length],
}


def _mechanisms_with(test: Any) -> set[str]:
    """Returns the names of the mechanisms that a contract's test runs for."""
    if test is test_contracts.TransformationsTest:
        pattern = r"^test_transformations_agree_(.*)__with_pmap$"
        return set(re.findall(pattern, "\n".join(dir(test)), re.M))
    if {"skip", "skipif", "xfail"} & {mark.name for mark in test.pytestmark}:
        raise ValueError(f"{test.__name__} may be skipped: it gives no tick")
    return {
        # A mechanism with marks is a pytest.param.
        getattr(mechanism, "values", [mechanism])[0].name
        for mark in test.pytestmark
        if mark.name == "parametrize" and mark.args[0] == "mechanism"
        for mechanism in mark.args[1]
    }


def contracts() -> str:
    """Returns a row for each mechanism, with a tick for each contract that it meets."""
    kept = [
        set.intersection(*map(_mechanisms_with, tests)) for tests in CONTRACTS.values()
    ]
    rows = [
        [
            mechanism.name,
            ", ".join(f"`{name}`" for name in mechanism.used_by),
            *("✓" if mechanism.name in names else "–" for names in kept),
        ]
        for mechanism in [*MECHANISMS, *TORI]
    ]
    return markdown_table(["kernel", "used by", *CONTRACTS], rows)


def pairs() -> str:
    """Returns the models in which each attention is tested with each position."""

    def cell(attention: str, position: str) -> str:
        if ("gpt", attention, position) in test_pairs.IN_GPT:
            return "✓"
        return "ViT" if ("vit", attention, position) in test_pairs.IN_VIT else "–"

    rows = [
        [f"`{position}`", *(cell(attention, position) for attention in ATTENTIONS)]
        for position in POSITIONS
    ]
    return markdown_table(["position", *(f"`{name}`" for name in ATTENTIONS)], rows)


def drop_in() -> str:
    """Returns the arguments of jax.nn that each implementation is tested to support."""
    rows = [
        [
            argument,
            *(
                "✓" if (argument, name) in test_drop_in.SUPPORTED else "–"
                for name in test_drop_in.IMPLEMENTATIONS
            ),
        ]
        for argument in test_drop_in.ARGUMENTS
    ]
    return markdown_table(["argument", *test_drop_in.IMPLEMENTATIONS], rows)


def contents() -> str:
    """Returns the names that a configuration may use."""
    names = {
        "[Attentions](docs/attentions.md)": ATTENTIONS,
        "[Positions](docs/positions.md)": POSITIONS,
        "[Models](docs/training.md)": MODELS,
        "[Data](docs/data.md)": [
            *SETS,
            *(
                "folder",
                "csv",
                "hf",
                "npz",
                "moving_digits",
                "points",
                "mnist_points",
                "text",
            ),
        ],
    }
    rows = [
        [title, ", ".join(f"`{name}`" for name in group)]
        for title, group in names.items()
    ]
    return markdown_table(["what", "names in a configuration"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "contents": contents,
    "contracts": contracts,
    "pairs": pairs,
    "drop_in": drop_in,
    "translation": translation_table,
    **result_tables.TABLES,
}


def read_tables() -> list[tuple[str, str]]:
    """Returns the name and the present text of every table of the documents."""
    return [
        (name, body.strip())
        for path in DOCUMENTS
        for _, name, body, _ in BLOCK.findall(path.read_text("utf-8"))
    ]


def write_tables(names: Sequence[str]) -> None:
    """Replaces tables of the documents."""
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        new = BLOCK.sub(lambda block: _replace(block, names), text)
        if new != text:
            path.write_text(new, "utf-8")
            print(f"Written to {path.relative_to(ROOT)}")


def _replace(block: re.Match, names: Sequence[str]) -> str:
    start, name, _, end = block.groups()
    return f"{start}{TABLES[name]()}\n{end}" if name in names else block[0]


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Writes the named tables, by default all."""
    parser = command.Parser("python -m tools.tables", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    names = parser.parse_args(argv).names or list(TABLES)
    for name in names:
        check_choice("table", name, TABLES)
    write_tables(names)


if __name__ == "__main__":
    main()
