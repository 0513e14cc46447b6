"""The README says what holds: its examples run, its tables list every mechanism."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from relattn.evaluation.presets import PRESETS
from relattn.evaluation.translation import VARIANTS, all_pairs
from tests.mechanisms import MECHANISMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
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


def test_the_table_of_studies_lists_every_preset_and_its_runs():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", README, re.M)
    runs = {name: sum(len(r.runs) for r in p.rows) for name, p in PRESETS.items()}
    assert [(name, int(number)) for name, number in rows] == [*runs.items()]


def run_examples(text):
    """Runs the Python of a document as one program, and returns its names."""
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(example, scope)
    return scope


def test_the_first_example_estimates_as_well_as_it_says():
    first = README[: README.index("## Install")]
    scope = run_examples(first)
    stated = float(re.search(r"# (0\.\d+)$", first, re.M)[1])
    np.testing.assert_allclose(scope["error"], stated, atol=0.005)
    q, k, v = 3 * scope["q"], 3 * scope["k"], scope["v"]
    exact = scope["relattn"].softmax_attention(q, k, v)
    estimate = scope["relattn"].linear_attention(q, k, v, scope["feature_map"])
    of_mean = jnp.linalg.norm(v.mean(-2, keepdims=True) - exact)
    norm = jnp.linalg.norm(exact)
    assert jnp.linalg.norm(estimate - exact) > max(norm, of_mean)


def test_the_guide_runs_and_its_steps_continue_what_they_say():
    scope = run_examples((ROOT / "docs" / "using.md").read_text())
    i = scope["i"]
    np.testing.assert_allclose(
        scope["out_i"][:, 0], scope["whole"][:, i], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        scope["relative_2"], scope["relative"][..., 2, :], rtol=1e-4, atol=1e-5
    )
    assert scope["logits"].shape == scope["of_mine"].shape == (2, 10)
    assert not np.isnan(scope["masked"]).any()
