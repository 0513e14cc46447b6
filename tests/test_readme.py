"""README and docs: examples run, tables are current, links resolve."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn import kernels
from relattn.data import load_data
from studies.presets import PRESETS
from studies.translation import VARIANTS, all_pairs
from tests.helpers.export import unchecked_annotations
from tools import tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = (*tables.DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


def read(name):
    return (ROOT / name).read_text("utf-8")


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= 200


def test_every_table_is_in_a_document():
    assert {name for name, _ in tables.read_tables()} == {*tables.TABLES}


@pytest.mark.parametrize("name", [n for n in tables.TABLES if n != "translation"])
def test_table_is_current(name):
    current = tables.TABLES[name]()
    for found, text in tables.read_tables():
        assert found != name or text == current, "run make tables"


def test_translation_table_lists_every_pair():
    """tests/test_pairs.py compares its numbers."""
    table = dict(tables.read_tables())["translation"]
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", table, re.M)
    assert rows == [*all_pairs(), *VARIANTS], "run make tables"


def test_table_of_studies_lists_every_preset_and_its_runs():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", read("docs/results.md"), re.M)
    runs = {name: sum(len(r.runs) for r in p.rows) for name, p in PRESETS.items()}
    assert [(name, int(number)) for name, number in rows] == [*runs.items()]


def test_options_are_described():
    """Every position and attention has a row in the page that describes it."""
    for page, names in (
        ("positions", tables.POSITIONS),
        ("attentions", tables.ATTENTIONS),
    ):
        described = read(f"docs/{page}.md").split("<!-- table")[0]
        missing = {name for name in names if f"`{name}`" not in described}
        assert not missing, f"the first table of docs/{page}.md has no row of {missing}"
    titles = re.findall(r"^### (\w+)$", read("docs/formulas.md"), re.M)
    expected = [*tables.ATTENTIONS, *tables.POSITIONS]
    assert titles == expected, (
        "docs/formulas.md needs a section for each, in this order"
    )


def test_the_index_lists_every_mechanism():
    """docs/pages.py replaces two lines of the page by the names of the registry."""
    text = read("docs/index.md")
    assert text.count("\nmechanisms/{attention}\n") == 1
    assert text.count("\nmechanisms/{position}\n") == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path):
    # In code, brackets are no link.
    text = re.sub(r"`[^`\n]*`", "", path.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text("utf-8")), target


def anchors(text):
    """Returns the anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    text = path.read_text("utf-8")
    tests = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py", text)) <= tests
    for module in re.findall(
        r"python -m ((?:relattn|studies|benchmarks|tools)[\w.]*)", text
    ):
        file = ROOT / module.rstrip(".").replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), (
            module
        )


def run_examples(text):
    """Runs the Python of a document as one program, and returns its names."""
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(example, scope)
    return scope


def test_every_page_with_python_is_run_by_a_test():
    """docs/positions.md is run by tests/evaluation/test_compare.py."""
    pages = {path.name for path in tables.DOCUMENTS if "```python" in path.read_text()}
    run = {"data.md", "drop_in.md", "nnx.md", "positions.md", "pretrained.md"}
    run |= {"README.md", "index.md", "using.md", "export.md", "training.md"}
    assert pages == run


@pytest.mark.slow
def test_first_example_has_the_stated_error():
    text = read("README.md")
    scope = run_examples(text)
    stated = float(re.search(r"# (0\.\d+)$", text, re.M)[1])
    np.testing.assert_allclose(scope["error"], stated, atol=0.005)
    q, k, v = 3 * scope["q"], 3 * scope["k"], scope["v"]
    softmax = kernels.softmax_attention(q, k, v)
    estimate = kernels.linear_attention(q, k, v, scope["feature_map"])
    error_of_mean = jnp.linalg.norm(v.mean(-2, keepdims=True) - softmax)
    norm = jnp.linalg.norm(softmax)
    assert jnp.linalg.norm(estimate - softmax) > max(norm, error_of_mean)


def test_quick_starts_run():
    scope = run_examples(read("docs/index.md"))
    assert scope["out"].shape == (8, 1024, 32)
    assert scope["y"].shape == scope["x"].shape
    plain = scope["layer"].clone(attention_fn=nn.dot_product_attention)
    shapes = jax.eval_shape(plain.init, jax.random.key(3), scope["x"])
    assert jax.tree.map(jnp.shape, scope["variables"]) == jax.tree.map(
        jnp.shape, shapes
    )
    logits, _ = jax.eval_shape(
        scope["model"].init_with_output, jax.random.key(4), jnp.zeros((2, 28, 28, 1))
    )
    assert logits.shape == (2, 10)


@pytest.mark.usefixtures("registries")
def test_own_data_are_selected_by_name():
    run_examples(read("docs/data.md"))
    config = ConfigDict({"source": "noise", "num_validation": 70})
    assert load_data(config).info.num_train == 630


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_guide_runs_and_its_decoding_steps_equal_the_causal_kernels():
    # The page exports a model with a symbolic number of tokens.
    with unchecked_annotations():
        scope = run_examples(read("docs/using.md"))
    i = scope["i"]
    np.testing.assert_allclose(
        scope["out_i"][:, 0], scope["whole"][:, i], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        scope["relative_2"], scope["relative"][..., 2, :], rtol=1e-4, atol=1e-5
    )
    assert scope["logits"].shape == scope["cosine_logits"].shape == (2, 10)
    assert scope["kerple_logits"].shape == scope["pooled_logits"].shape == (2, 10)
    kerple = scope["Kerple"](dim=8, num_heads=2, num_layers=1)
    # Of the softplus, r1 and r2 of two heads.
    r = np.log(np.expm1([[[[2.0], [4.0]]], [[[3.0], [5.0]]]]))
    (layer,) = kerple.apply({"params": {"r": r}}, (3,), 0)
    # Offsets -2 .. 2.
    expected = -np.array([[2], [4]]) * np.log1p([[3], [5]] * np.array([2, 1, 0, 1, 2]))
    np.testing.assert_allclose(layer.tables["bias"], expected, rtol=1e-6)
    assert not np.isnan(scope["masked"]).any()
    direct = scope["gpt"].apply(scope["weights"], jnp.zeros((3, 17), jnp.int32))
    np.testing.assert_allclose(scope["exported_logits"], direct, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_guide_trains_its_own_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = read("docs/training.md")
    config, program = re.findall(r"```python\n(.*?)```", page, re.S)
    Path("mine.py").write_text(config)
    scope = {}
    exec(program, scope)
    assert scope["result"]["step"] == 20
    assert scope["run"].config.model.position == "rope2d"


@pytest.mark.slow
def test_drop_in_guide_runs():
    scope = run_examples(read("docs/drop_in.md"))
    assert scope["softmax"].shape == scope["linear"].shape == scope["biased"].shape
    assert scope["out"].shape == scope["nnx_out"].shape == (2, 49, 32)
    assert not np.isnan(scope["out"]).any()


@pytest.mark.slow
def test_pretrained_guide_has_the_stated_accuracies(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = read("docs/pretrained.md")
    scope = run_examples(text)
    assert scope["predictions"].shape == (1, 3)
    stated = dict(re.findall(r"^(\w+) = .*# (0\.\d+)$", text, re.M))
    vit = {"own", "lowest", "highest", "by_softmax"}
    performer = {"unshifted", "one_patch", "half_patch", "two_patches"}
    softmax = {"softmax_unshifted", "softmax_two_patches", "every_class"}
    assert stated.keys() == vit | performer | softmax
    for name, value in stated.items():
        np.testing.assert_allclose(scope[name], float(value), atol=0.02)


@pytest.mark.slow
def test_export_guide_loads_what_it_writes():
    """tests/helpers/onnx_models.py runs the whole page, where jax2onnx is installed."""
    text, _, onnx = read("docs/export.md").partition("## ONNX")
    with unchecked_annotations():
        scope = run_examples(text)
    assert 'format="onnx"' in onnx
    assert scope["same"]
    np.testing.assert_allclose(
        scope["stablehlo_logits"], scope["logits"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_nnx_guide_trains_a_vit():
    scope = run_examples(read("docs/nnx.md"))
    assert scope["accuracy"] > 0.7
    assert scope["num_projections"] == 2
