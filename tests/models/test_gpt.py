"""Tests the GPT and `generate`: causality, lengths, prefill and decoding."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import build_model, generate
from relattn.models.sampling import sample_token
from relattn.nn.blocks import FeedForward
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal_like, quick_jit, run

CONFIG = {"name": "gpt", "dim": 12, "num_layers": 2, "num_heads": 2, "mlp_dim": 17}
VOCAB, LENGTH = 13, 7
# tests/nn/test_attention.py decodes with a layer of each attention.
PAIRS = [
    ("softmax", "learnable_sincos"),
    ("favor", "sincos_bias"),
    ("relu(num_features=5)", "circulant_string"),
    ("translution", "none"),
    ("lor_translution(rank=2, relative='q')", "rope1d"),
    ("softmax", "constrained_sincos"),
    ("softmax", "learned + relative_value"),
    ("gated_positional", "sincos"),
    ("softmax", "rope1d"),
    ("favor", "none"),
    ("translution(relative='qv')", "learnable_sincos"),
    ("lor_translution(rank=2, relative='v')", "none"),
    ("lor_translution(rank=2, base=False, average=True)", "none"),
]


LLAMA = {
    "position": "rope1d",
    "norm_type": "rms_norm",
    "activation": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
    "head_norm": False,
    "num_kv_heads": 1,
}


def build(**options):
    return build_model(CONFIG | options, vocab_size=VOCAB, context_length=LENGTH)


def make(**options):
    """Returns a model, variables so large that every part matters, and tokens."""
    model = build(**options)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (3, LENGTH), np.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    variables = normal_like(shapes, scale=0.3)
    return model, variables, tokens


@pytest.mark.quick("softmax-learned + relative_value", "translution-none")
@pytest.mark.parametrize(
    ("attention", "position"),
    PAIRS,
)
def test_decoding_equals_full_recomputation(attention, position):
    expect_decoding_equals_full_recomputation(
        *make(attention=attention, position=position)
    )


def expect_decoding_equals_full_recomputation(model, variables, tokens):
    apply = quick_jit(model.apply)
    full = np.asarray(apply(variables, tokens))
    # Earlier outputs do not depend on later tokens, bit for bit.
    changed = np.asarray(apply(variables, tokens * (np.arange(LENGTH) < 5)))
    np.testing.assert_array_equal(changed[:, :5], full[:, :5])
    assert not np.allclose(changed[:, 5:], full[:, 5:])
    # A shorter sequence has the same outputs.
    np.testing.assert_allclose(apply(variables, tokens[:, :4]), full[:, :4], atol=2e-5)
    out = generate(
        model, variables, tokens[:, :2], 5, key=jax.random.key(3), temperature=0.0
    )
    out = np.asarray(out)
    np.testing.assert_array_equal(out[:, :2], tokens[:, :2])
    logits = np.asarray(apply(variables, out))
    np.testing.assert_array_equal(logits[:, 1:-1].argmax(-1), out[:, 2:])


@pytest.mark.quick("softmax(window=3)")
@pytest.mark.parametrize(
    "attention", ["softmax", "softmax(window=3)", "hedgehog", "favor"]
)
def test_llama_decodes_with_any_attention(attention):
    model, variables, tokens = make(attention=attention, **LLAMA)
    names = map(
        jax.tree_util.keystr,
        dict(jax.tree_util.tree_leaves_with_path(variables["params"])),
    )
    assert not [name for name in names if "bias" in name]
    expect_decoding_equals_full_recomputation(model, variables, tokens)


def record_lengths(lengths):
    """Records the lengths of the sequences in layers, in a context."""

    def record(call, args, kwargs, context):
        if isinstance(context.module, FeedForward):
            lengths.append(args[0].shape[1])
        return call(*args, **kwargs)

    return nn.intercept_methods(record)


@pytest.mark.quick("rope1d")
@pytest.mark.parametrize("position", ["rope1d", "irpe_gate", "learned + t5_bias"])
def test_short_sequences_are_not_padded(position):
    model, variables, tokens = make(position=position)
    lengths = []

    @quick_jit
    def both(variables, tokens):
        padded = jnp.pad(tokens[:, :4], ((0, 0), (0, LENGTH - 4)))
        with record_lengths(lengths):
            short = model.apply(variables, tokens[:, :4])
        return short, model.apply(variables, padded)[:, :4]

    np.testing.assert_allclose(*both(variables, tokens), rtol=1e-5, atol=2e-5)
    assert set(lengths) == {4}


@pytest.mark.quick("favor-none")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "learned + relative_bias"),
        ("favor", "none"),
        ("translution", "none"),
        ("lor_translution(rank=2)", "rope1d"),
    ],
)
def test_tokens_equal_those_drawn_from_full_forward_passes(attention, position):
    model, variables, tokens = make(attention=attention, position=position)
    key, options = jax.random.key(3), {"temperature": 0.7, "top_k": 5}

    @quick_jit
    def draw(variables, tokens, index):
        logits = model.apply(variables, tokens)[:, index]
        return sample_token(jax.random.fold_in(key, index), logits, **options)

    expected = tokens * (np.arange(LENGTH) < 3)
    for index in range(2, LENGTH - 1):
        expected[:, index + 1] = draw(variables, expected, index)
    out = generate(model, variables, tokens[:, :3], LENGTH - 3, key=key, **options)
    np.testing.assert_array_equal(out, expected)


def test_a_prompt_is_one_call_of_the_model():
    model, variables, tokens = make()
    lengths = []
    with record_lengths(lengths):
        # No other test has this top_k, so that the program is traced here.
        generate(model, variables, tokens[:, :3], 4, key=jax.random.key(0), top_k=4)
    # The prompt, padded to the final length, and a token.
    assert set(lengths) == {7, 1}


@pytest.mark.slow
def test_a_key_determines_the_tokens():
    model, variables, tokens = make()

    def draw(seed, **options):
        key = jax.random.key(seed)
        return generate(model, variables, tokens[:, :1], 6, key=key, **options)

    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    np.testing.assert_array_equal(draw(0, top_k=1), draw(1, temperature=0.0))


def test_each_token_is_drawn_with_a_different_key():
    model, variables, tokens = make()
    uniform = jax.tree.map(np.zeros_like, variables)
    out = generate(model, uniform, tokens[:, :1], 6, key=jax.random.key(0))
    out = np.asarray(out)
    # The same key would draw the same token six times.
    assert all(len(np.unique(row)) > 2 for row in out[:, 1:])


def make_lively(**options):
    """Returns `make` with weights from which texts do not end in one token."""
    model, variables, tokens = make(**options)

    def scaled(path, leaf):
        return leaf * (0 if "bias" in jax.tree_util.keystr(path) else 3)

    params = jax.tree_util.tree_map_with_path(scaled, variables["params"])
    return model, {**variables, "params": params}, np.concatenate(tokens)


def continued(model, variables, prompt, total):
    """Continues one text greedily by full forward passes, window by window."""
    apply = quick_jit(model.apply)
    text, window = list(map(int, prompt)), LENGTH - LENGTH // 2
    start = 0 if len(text) < LENGTH else len(text) - window
    while len(text) < total:
        if len(text) - start == LENGTH:
            start = len(text) - window
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(text) - start] = text[start:]
        text.append(int(apply(variables, padded)[0, len(text) - start - 1].argmax()))
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "position"),
    PAIRS,
)
def test_a_text_does_not_depend_on_the_prompts_beside_it(attention, position):
    model, variables, tokens = make_lively(attention=attention, position=position)
    # Below, at and beyond the context of 7.
    prompts = [tokens[:length] for length in (8, 1, 7, 13, 6)]
    out = generate(
        model, variables, prompts, 11, key=jax.random.key(0), temperature=0.0
    )
    for row, prompt in zip(out.tolist(), prompts, strict=True):
        assert row == continued(model, variables, prompt, 24)


@pytest.mark.slow
def test_a_text_ends_with_the_stop_token_beside_longer_ones():
    model, variables, tokens = make_lively(attention="favor", position="sincos_bias")
    prompts = [tokens[:1], tokens[:9]]
    expected = [continued(model, variables, prompt, 17) for prompt in prompts]
    # Ends the first text in its second window.
    stop = next(token for token in expected[0][8:] if token not in expected[0][1:8])
    for row, prompt in zip(expected, prompts, strict=True):
        if stop in row[len(prompt) :]:
            end = row.index(stop, len(prompt))
            row[end:] = [stop] * (17 - end)
    options = {"temperature": 0.0, "stop_token": stop}
    out = generate(model, variables, prompts, 8, key=jax.random.key(0), **options)
    assert out.tolist() == expected


@pytest.mark.slow
def test_draws_do_not_depend_on_the_prompts_beside_a_text():
    model, variables, tokens = make_lively()
    prompts = [tokens[:9], tokens[:2], tokens[:7]]
    draw = functools.partial(generate, model, variables, top_k=9, top_p=0.9)
    # A row draws the same beside other prompts, and the first as if alone.
    out = draw(prompts, 8, key=jax.random.key(0))
    beside = draw([tokens[3:], tokens[:2], tokens[:1]], 17, key=jax.random.key(0))
    np.testing.assert_array_equal(beside[1, :17], out[1])
    alone = draw(prompts[:1], 8, key=jax.random.key(0))
    np.testing.assert_array_equal(out[:1], alone)
    # With a key for each prompt, every text is as if alone.
    keys = jax.random.split(jax.random.key(0), 3)
    out = draw(prompts, 8, key=keys)
    for row, prompt, key in zip(out, prompts, keys, strict=True):
        np.testing.assert_array_equal(row, draw([prompt], 17 - len(prompt), key=key)[0])
    assert len({tuple(row) for row in draw([[1]] * 3, 9, key=keys).tolist()}) == 3


def test_a_text_longer_than_the_context_is_continued_window_by_window():
    model, variables, tokens = make()
    options = {"key": jax.random.key(0), "temperature": 0.0}
    out = np.asarray(generate(model, variables, tokens[:, :3], 10, **options))
    assert out.shape == (len(tokens), 13)
    first = generate(model, variables, tokens[:, :3], LENGTH - 3, **options)
    np.testing.assert_array_equal(out[:, :LENGTH], first)
    # The second window begins with the last 4 of 7 tokens, the third with those of it.
    for start, stop in ((3, 10), (6, 13)):
        known = start + (LENGTH + 1) // 2
        window = generate(
            model, variables, out[:, start:known], stop - known, **options
        )
        np.testing.assert_array_equal(out[:, start:stop], window)


def test_a_text_ends_with_the_stop_token():
    model, variables, tokens = make()
    options = {"key": jax.random.key(0), "temperature": 0.0}
    plain = np.asarray(generate(model, variables, tokens[:, :2], 11, **options))
    stop = int(plain[0, 4])
    # A stop token in the prompt ends nothing.
    prompt = np.array(tokens[:, :2])
    out = generate(model, variables, prompt, 11, stop_token=stop, **options)
    for row, expected in zip(np.asarray(out), plain, strict=True):
        ends = np.flatnonzero(expected[2:] == stop)
        end = ends[0] + 3 if len(ends) else len(row)
        np.testing.assert_array_equal(row[:end], expected[:end])
        assert (row[end:] == stop).all()


def test_tokens_as_likely_as_the_last_one_kept_are_drawn_too():
    logits = jax.device_put(np.log(np.float32([[0.1, 0.3, 0.3, 0.3]])))
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        draw = functools.partial(sample_token, logits=logits, **options)
        drawn = run(jax.vmap(draw), jax.random.split(jax.random.key(0), 50))
        assert {*drawn.ravel().tolist()} == {1, 2, 3}


def test_top_p_keeps_the_fewest_tokens_with_that_probability():
    logits = jax.device_put(np.log(np.float32([[0.1, 0.45, 0.15, 0.3]])))
    keys = jax.random.split(jax.random.key(0), 307)
    expected = {0.4: {1}, 0.5: {1, 3}, 0.8: {1, 2, 3}, 1.0: {0, 1, 2, 3}}
    for top_p, kept in expected.items():
        draw = functools.partial(sample_token, logits=logits, top_p=top_p)
        assert set(run(jax.vmap(draw), keys).ravel().tolist()) == kept


def test_prompt_lengths_and_temperatures_do_not_recompile(monkeypatch):
    traced = []
    categorical = jax.random.categorical

    def count(*args):
        traced.append(args)
        return categorical(*args)

    monkeypatch.setattr(jax.random, "categorical", count)
    model, variables, tokens = make()

    def draw(length, temperature):
        return generate(
            model,
            variables,
            tokens[:, :length],
            7 - length,
            key=jax.random.key(0),
            temperature=temperature,
            # No other test has this top_k, so that the program is traced here.
            top_k=3,
        )

    first = draw(2, 1.0)
    once = len(traced)
    cold = draw(5, 1e-6)
    np.testing.assert_array_equal(draw(2, jnp.float32(1.0)), first)
    np.testing.assert_array_equal(cold[:, :5], tokens[:, :5])
    assert len(traced) == once > 0
    np.testing.assert_array_equal(draw(5, 0.0), cold)
    # Logits divided by these overflow, and the last is 0 as a float32.
    for tiny in (1e-38, 1e-39, 1e-99):
        np.testing.assert_array_equal(draw(5, tiny), cold)


def test_samples_follow_the_distribution():
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    draw = functools.partial(sample_token, temperature=0.5, top_k=3)
    draws = run(draw, jax.random.key(0), np.tile(logits, (4000, 1)))
    expected = np.array([0.25, 0.09, 0.0225, 0.0]) / 0.3625
    found = np.bincount(draws, minlength=4) / 4000
    # Four standard errors of the frequencies in 4,000 draws.
    errors = 4 * np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(found - expected) <= errors).all()


def test_draws_from_bfloat16_logits_do_not_prefer_the_first_tokens():
    logits = jnp.zeros((1, 3000), jnp.bfloat16)
    draw = functools.partial(sample_token, logits=logits)
    drawn = run(jax.vmap(draw), jax.random.split(jax.random.key(0), 100))
    # Four standard errors of the mean of 100 uniform draws.
    assert abs(drawn.mean() - 1499.5) < 4 * 3000 / np.sqrt(12 * 100)


def test_a_causal_table_has_a_row_for_each_offset():
    _, variables, _ = make(attention="translution")
    table = variables["params"]["blocks_0"]["attention"]["k_table"]
    assert table.shape == (2, LENGTH, 12, 2, 6)


def test_bfloat16_models_have_float32_logits():
    model, variables, tokens = make(dtype="bfloat16", attention="lor_translution")
    logits = np.asarray(jax.jit(model.apply)(variables, tokens))
    assert logits.dtype == np.float32 and np.isfinite(logits).all()


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_out_of_range_give_nan(token):
    model, variables, tokens = make()
    tokens[:, 3] = token
    assert jnp.isnan(run(model.apply, variables, tokens)).all()
    apply = functools.partial(model.apply, key_mask=jnp.asarray(tokens != token))
    assert jnp.isfinite(run(apply, variables, tokens)).all()


@pytest.mark.parametrize("dtype", ["uint16", "uint64"])
def test_ids_may_have_any_dtype_of_integers(dtype):
    model, variables, tokens = make()
    expected = run(model.apply, variables, tokens)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = quick_jit(model.apply)(variables, tokens.astype(dtype))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_ids_of_numpy_do_not_warn():
    """NumPy makes int64, which JAX has only if it is enabled."""
    model, variables, tokens = make()
    ids = np.asarray(tokens, np.int64)
    assert jax.eval_shape(lambda: model.apply(variables, ids)).dtype == np.float32


def test_a_sequence_longer_than_the_context_raises():
    model, variables, tokens = make()
    message = "sequence of 14 tokens is longer than context_length=7"
    with pytest.raises(ValueError, match=message):
        model.apply(variables, jax.device_put(np.tile(tokens, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1 (all), got 0.0"),
        ({"stop_token": 13}, "stop_token has token id 13"),
        ({"prompt": [[3], []]}, "at least one token and num_tokens >= 1, got 0 and 2"),
        ({"num_tokens": 0}, "num_tokens >= 1, got 2 and 0"),
        ({"prompt": np.zeros((3, 0), np.int32)}, "at least one token"),
        (
            {"prompt": np.array([[3, 13]])},
            "token id 13; the model's vocabulary has ids",
        ),
        ({"prompt": np.array([[3, -1]])}, "token id -1"),
        ({"prompt": [3, 5]}, "a list of such prompts, got one of shape ()"),
        ({"prompt": np.array([[3.7]])}, "of shape (1,) and dtype float64"),
        ({"prompt": np.ones((1, 2, 2), int)}, "got one of shape (2, 2)"),
        ({"num_tokens": 2.0}, "num_tokens must be an integer, got 2.0"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"stop_token": 1.5}, "stop_token must be an integer, got 1.5"),
        ({"temperature": -1.0}, "0 or a positive number, got -1.0"),
        ({"top_k": -2}, "from 0 (all) to 13, the size of the vocabulary, got -2"),
        (
            {"key": jax.random.split(jax.random.key(0), 2)},
            "one key, or one for each of the 3 prompts, got keys of shape (2,)",
        ),
    ],
)
def test_invalid_arguments_of_generate_raise(change, message):
    model, variables, tokens = make()
    arguments = {"prompt": tokens[:, :2], "num_tokens": 2, "key": jax.random.key(0)}
    with unchecked_annotations(), pytest.raises(ValueError, match=re.escape(message)):
        generate(model, variables, **(arguments | change))
    if {*change} <= {"temperature", "top_k", "top_p"}:
        logits = jnp.zeros((1, VOCAB))
        with pytest.raises(ValueError, match=re.escape(message)):
            sample_token(jax.random.key(0), logits, **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "banded"}, "attention 'banded' has no causal form"),
        ({"num_relative_layers": 5}, "num_relative_layers must be from 0"),
        ({"context_length": 5}, "model 'gpt' has no option 'context_length'"),
    ],
)
def test_invalid_configs_raise(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**options)


def test_shapes_of_tokens_and_their_mask_are_checked():
    model, variables, tokens = make()
    for given, key_mask, message in (
        (tokens[0], None, "tokens have shape (7,), expected [batch, n]: add the axis"),
        (tokens.astype(float), None, "tokens must be whole numbers, got float"),
        (tokens, np.ones((3, 5), bool), "key_mask has shape (3, 5), expected (3, 7)"),
        (tokens, np.ones((2, 7), bool), "key_mask has shape (2, 7), expected (3, 7)"),
    ):
        call = functools.partial(model.apply, key_mask=key_mask)
        expected = pytest.raises(ValueError, match=re.escape(message))
        with unchecked_annotations(), expected:
            jax.eval_shape(call, variables, given)


def test_a_text_model_for_images_raises():
    with pytest.raises(ValueError, match="'gpt' is for tokens and needs vocab_size"):
        build_model(CONFIG, num_classes=3, image_shape=(4, 4, 1))


def test_padding_and_other_segments_have_no_effect():
    model, variables, tokens = make(position="rope1d")
    apply = quick_jit(model.apply)
    exists = np.arange(LENGTH) >= np.array([[0], [2], [3]])
    logits = np.asarray(apply(variables, tokens, key_mask=exists))
    changed = apply(variables, np.where(exists, tokens, 0), key_mask=exists)
    np.testing.assert_array_equal(np.asarray(changed)[exists], logits[exists])
    unmasked = np.asarray(apply(variables, tokens))
    assert not np.allclose(unmasked[1:], logits[1:], atol=1e-3)
    # The last tokens alone, and packed behind others.
    packed = np.asarray(apply(variables, tokens, segment_ids=exists.astype(int)))
    alone = apply(variables, tokens[2:, 3:])
    np.testing.assert_allclose(packed[2:, 3:], alone, atol=2e-5)
