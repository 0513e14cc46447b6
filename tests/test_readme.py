"""The README says what holds: its examples run, its tables list every mechanism."""

import collections
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from relattn.evaluation.translation import VARIANTS, all_pairs
from studies.presets import PRESETS
from tests import test_contracts
from tests.mechanisms import MECHANISMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# The tests of a column; a mechanism has a tick if it is an argument of all of them.
CONTRACTS = {
    "reference, value and gradient": [
        test_contracts.test_equals_the_naive_reference_in_value_and_gradient
    ],
    "unbiased": [test_contracts.test_is_unbiased_within_four_standard_errors],
    "causal, bit for bit": [test_contracts.test_the_future_changes_nothing_bit_for_bit],
    "batch independent, masked exactly": [
        test_contracts.test_an_example_does_not_depend_on_its_batch,
        test_contracts.test_what_masked_keys_hold_does_not_matter,
    ],
    "finite": [test_contracts.test_stays_finite_when_a_key_is_loud],
    "vmap, jit, pmap": [
        test_contracts.test_vmap_equals_leading_axes,
        test_contracts.VariantsTest,
    ],
    "lowers for cpu, cuda, tpu": [test_contracts.test_lowers_for_cpu_cuda_and_tpu],
}


def arguments_of(test):
    """Names of the mechanisms that a contract's test runs for."""
    if test is test_contracts.VariantsTest:
        found = re.findall(
            r"^test_variants_agree_(.*)__with", "\n".join(dir(test)), re.M
        )
        variants = collections.Counter(found)
        # By jit, by pmap, and without either.
        return {name for name in variants if variants[name] == 3}
    assert not {"skip", "skipif", "xfail"} & {mark.name for mark in test.pytestmark}
    return {
        mechanism.name
        for mark in test.pytestmark
        if mark.args[0] == "mechanism"
        for mechanism in mark.args[1]
    }


def contract_table():
    """A row for each mechanism that tests/test_contracts.py tests."""
    lines = ["| kernel | " + " | ".join(CONTRACTS) + " |"]
    lines.append("| --- " * (len(CONTRACTS) + 1) + "|")
    kept = [set.intersection(*map(arguments_of, tests)) for tests in CONTRACTS.values()]
    for mechanism in MECHANISMS:
        cells = ["✓" if mechanism.name in names else "–" for names in kept]
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
