"""What type checkers and editors see: no error in the package, types in a script."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relattn import kernels, nn

ROOT = Path(__file__).parents[1]

SCRIPT = """
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import relattn
from relattn import GPT, ViT, kernels, load_pretrained, nn
from relattn.models import SIZES

x = jnp.ones((2, 5, 4))
w = kernels.draw_orthogonal(jax.random.key(0), 7, 4)
phi = partial(kernels.positive_features, projection=w)
weights = jnp.ones((12, 4, 2, 2))
gpt = GPT(vocab_size=11, context_length=4, dim=8, num_layers=1, num_heads=2)
vit = ViT(10, **SIZES["A"])
images = np.zeros((1, 4, 4, 3), np.uint8)
options: dict[str, Any] = {"precision": "highest"}


class Mine(nn.MultiHeadAttention):
    def attend(self, q, k, v, context):
        return v


relattn.register_attention("mine", Mine)
"""

# The types of expressions after the script, as regular expressions.
TYPES = {
    "kernels.linear_attention(x, x, x, phi)": r"Array",
    "kernels.linear_attention(x, x, x, phi, return_normalizer=True)": (
        r"tuple\[Array, Array\]"
    ),
    # Either an array or a pair, so that no use of it is an error.
    "kernels.linear_attention(x, x, x, phi, **options)": r"Unknown",
    "kernels.causal_linear_attention(x, x, x, phi)": r"Array",
    "kernels.causal_linear_attention(x, x, x, phi, return_state=True)": (
        r"tuple\[Array, LinearState\]"
    ),
    "kernels.toeplitz_linear_attention(x, x, x, phi, jnp.ones(9), grid=(1, 5))": (
        r"Array"
    ),
    "relattn.kernels.softmax_attention(x, x, x)": r"Array",
    "kernels.softmax_attention(x, x, x, return_logsumexp=True)": (
        r"tuple\[Array, Array\]"
    ),
    "relattn.nn.dot_product_attention(x, x, x)": r"Array",
    "nn.dot_product_attention(x, x, x, return_residual=True)": r"tuple\[Array, Array\]",
    "nn.attention_fn('favor')": r"\(\.\.\.\) -> Array",
    **{
        f"kernels.translution(x, *3 * (weights,), index={index})": r"Array"
        for index in (
            "kernels.Offsets((1, 5))",
            "kernels.CausalOffsets(5)",
            "kernels.Pairs(5)",
        )
    },
    "Mine(dim=4, num_heads=2).__call__": r"\(x: Array, .*\) -> Array",
    "gpt.__call__": r"\(tokens: Array, .*\) -> Array",
    "vit.__call__": r"\(images: Array, .*\) -> Array",
    "relattn.generate(gpt, {}, [[1, 2]], 3, key=jax.random.key(0))": r"Array",
    "load_pretrained('x').preprocess(images)": r"Array",
    "relattn.build_model({'name': 'vit', 'dim': 8}, num_classes=3)": r"Module",
    "relattn.training.load_run('x').evaluate()": r"dict\[str, float\]",
    "relattn.load_run('x').generate('to be')": r"str",
    "relattn.load_run('x').generate(['to be'], seed=1)": r"list\[str\]",
    "relattn.load_run('x').predict(images).probabilities": r"ndarray\[.*\]",
}


@pytest.fixture
def pyright():
    """Returns a function that checks a folder: its messages by their severity."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'relattn[types]'")

    def check(folder):
        command = [sys.executable, "-m", "pyright", "--outputjson"]
        command += ["--pythonpath", sys.executable, "--project", str(folder)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.stdout, run.stderr
        found = {"error": [], "warning": [], "information": []}
        for one in json.loads(run.stdout)["generalDiagnostics"]:
            place = f"{one['file']}:{one['range']['start']['line'] + 1}"
            found[one["severity"]].append(f"{place}: {one['message']}")
        return found

    return check


@pytest.fixture
def check_script(pyright, tmp_path):
    def check(text):
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
        return pyright(tmp_path)

    return check


@pytest.mark.slow
def test_the_package_has_no_type_errors(pyright):
    found = pyright(ROOT)
    assert not found["error"] + found["warning"], "\n".join(found["error"])


@pytest.mark.slow
def test_users_see_types(check_script):
    lines = "".join(f"reveal_type({expression})\n" for expression in TYPES)
    found = check_script(SCRIPT + lines)
    assert not found["error"] + found["warning"]
    revealed = [text.rpartition('" is "')[2][:-1] for text in found["information"]]
    for (expression, expected), shown in zip(TYPES.items(), revealed, strict=True):
        assert re.fullmatch(expected, shown), (expression, shown)


@pytest.mark.slow
def test_users_see_mistakes(check_script):
    mistakes = {
        "relattn.softmax_atention": '"softmax_atention" is not a known attribute',
        "kernels.linear_attention(x, x, x, phi, eps=1)": "No overloads for",
        "kernels.linear_attention(x, x, x, phi) + 'a'": 'Operator "+"',
        "gpt(x, deterministc=True)": 'parameter named "deterministc"',
    }
    found = check_script(SCRIPT + "\n".join(mistakes))["error"]
    for problem, shown in zip(mistakes.values(), found, strict=True):
        assert problem in shown


@pytest.mark.parametrize(
    "function, flag",
    [
        (kernels.linear_attention, "return_normalizer"),
        (kernels.causal_linear_attention, "return_state"),
        (kernels.toeplitz_linear_attention, "return_normalizer"),
        (kernels.softmax_attention, "return_logsumexp"),
        (nn.dot_product_attention, "return_residual"),
    ],
)
def test_overloads_have_the_arguments_of_the_kernel(function, flag):
    module = inspect.getmodule(inspect.unwrap(function))
    tree = ast.parse(inspect.getsource(module))
    plain, pair, kernel = (
        {
            arg.arg: ast.unparse(arg.annotation)
            for arg in [*node.args.args, *node.args.kwonlyargs]
        }
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__
    )
    assert plain.pop(flag) == "Literal[False]"
    assert pair.pop(flag) == "Literal[True]"
    assert kernel.pop(flag) == "bool"
    assert list(plain.items()) == list(pair.items()) == list(kernel.items())
