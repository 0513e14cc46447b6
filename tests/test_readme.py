"""The README says what holds: its example runs, its tables list every mechanism."""

import re
from pathlib import Path

from relattn.evaluation.translation import VARIANTS, all_pairs
from tests.mechanisms import MECHANISMS

README = (Path(__file__).parents[1] / "README.md").read_text()
CONTRACTS = (
    "reference, value and gradient",
    "unbiased",
    "causal, bit for bit",
    "batch independent, masked exactly",
    "finite",
    "vmap, jit, pmap",
    "lowers for cpu, cuda, tpu",
)


def contract_table():
    """A row a mechanism of tests/mechanisms.py; tests/test_contracts.py tests them."""
    lines = ["| kernel | " + " | ".join(CONTRACTS) + " |"]
    lines.append("| --- " * (len(CONTRACTS) + 1) + "|")
    for mechanism in MECHANISMS:
        applies = dict.fromkeys(CONTRACTS, True)
        applies["unbiased"] = mechanism.estimate is not None
        applies["causal, bit for bit"] = mechanism.causal
        cells = ["✓" if applies[contract] else "–" for contract in CONTRACTS]
        lines.append(f"| {mechanism.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_contract_table_lists_every_mechanism():
    assert contract_table() in README, f"put this into README.md:\n{contract_table()}"


def test_the_translation_table_lists_every_pair_and_no_other():
    """tests/test_pairs.py compares what it says."""
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", README, re.M)
    assert sorted(rows) == sorted([*all_pairs(), *VARIANTS])


def test_the_example_runs():
    example = re.search(r"```python\n(.*?)```", README, re.S)
    scope = {}
    exec(example.group(1), scope)
    assert scope["out"].shape == (8, 1024, 32)
