"""Samples text from a model: prefill of the prompt, then token by token."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from relattn.kernels.precision import widen
from relattn.messages import shorten


def sample_token(
    key: Key[Array, ""],
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Array, " batch"]:
    """Draws a token from softmax(logits / temperature), restricted to likely tokens.

    Tokens that are as likely as the last one of ``top_k`` or ``top_p`` are kept too: no
    choice depends on the order of the vocabulary. ``top_k`` of transformers does the
    same.

    Args:
        key: A PRNG key.
        logits: Shape ``[batch, vocab]``.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.
        top_p: Draws from the fewest most likely tokens whose probabilities sum to at
            least ``top_p`` (nucleus sampling); 1 for all.

    Returns:
        Token ids, shape ``[batch]``.

    Raises:
        ValueError: If ``top_k`` is not an integer, or an option is out of range.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
        >>> sample_token(jax.random.key(0), logits, temperature=0.0).tolist()
        [1]
        >>> sample_token(jax.random.key(0), logits, top_p=0.5).tolist()
        [1]

    Source:
        Nucleus sampling: Holtzman et al., The Curious Case of Neural Text
        Degeneration, section 3.1.
    """
    _check_options(temperature, top_k, top_p, logits.shape[-1])
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    return _draw(key, logits, temperature, top_k, None if top_p == 1 else top_p)


def _draw(key, logits, temperature, top_k, top_p):
    """Does `sample_token` for a temperature > 0; a top_p of None keeps all tokens."""
    # In bfloat16 much of the noise would be equal, and the first tokens would win.
    logits = widen(logits)
    # Tokens below the k-th logit have probability 0.
    if top_k:
        kept = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    # The largest stays finite, 0, also where a tiny temperature is 0 as a float32.
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)
    # Tokens outside the nucleus have probability 0.
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token is kept if those before it sum to less than top_p.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where(before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


Prompts = (
    Int[Array, "batch prompt"]
    | Int[np.ndarray, "batch prompt"]
    | Sequence[Sequence[int] | Array | np.ndarray]
)


def generate(
    model: nn.Module,
    variables: Mapping[str, Any],
    prompt: Prompts,
    num_tokens: int,
    *,
    key: Key[Array, ""] | Key[Array, " prompts"],
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_token: int | None = None,
) -> Int[Array, "batch total"]:
    """Continues prompts with tokens drawn from the model.

    One call of the model computes the shortest prompt and fills the cache: the keys and
    values, inputs or state of every layer, in the collection ``cache``. Each further
    token, also of a longer prompt, then costs one row of attention. The prompt is
    padded to the final length, or to the context, so that a prompt of another length
    with the same final length, or another temperature, does not recompile.

    Where a text is longer than the model's context, the model reads it window by
    window: once a window is full, the next one begins with the last half of it, as does
    the first window of a prompt that fills the context. A text does not depend on the
    other prompts: each has its own windows and, at a temperature above 0, draws.

    Args:
        model: A `GPT`.
        variables: Its variables.
        prompt: Token ids, at least one in each prompt: an array ``[batch, prompt]``, or
            a list of prompts of different lengths.
        num_tokens: Number of tokens to draw after the longest prompt. Shorter prompts
            are continued to the same length.
        key: A PRNG key: what a text draws depends on the key and on the number of its
            row. Or a key for each prompt: the text is then that of the prompt alone
            with its key.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.
        top_p: Draws from the fewest most likely tokens whose probabilities sum to at
            least ``top_p``; 1 for all.
        stop_token: A token after which a text ends, once it is drawn; the rest of its
            row is the same token. None for no such token.

    Returns:
        The prompts and their continuations, shape ``[batch, prompt + num_tokens]`` of
        the longest prompt.

    Raises:
        ValueError: If a prompt is empty, is not a list of integers or has an id that is
            not in the vocabulary, the keys are not one for each prompt, an option is
            out of range, or ``num_tokens``, ``top_k`` or ``stop_token`` is not an
            integer.

    Example:
        >>> from relattn.models import GPT
        >>> model = GPT(vocab_size=11, context_length=7, dim=8, num_layers=1,
        ...             num_heads=2, mlp_dim=16)
        >>> prompt = [[3, 5], [2]]
        >>> variables = model.init(jax.random.key(0), jnp.array([[3, 5]]))
        >>> generate(model, variables, prompt, 9, key=jax.random.key(1)).shape
        (2, 11)
    """
    rows = [np.asarray(row) for row in prompt]
    _check_prompts(rows, num_tokens, stop_token, model.vocab_size)
    _check_options(temperature, top_k, top_p, model.vocab_size)
    if _is_per_row(key) and key.shape != (len(rows),):
        raise ValueError(
            f"expected one key, or one for each of the {len(rows)} prompts, got keys "
            f"of shape {key.shape}"
        )
    lengths = np.array([len(row) for row in rows], np.int32)
    total, context = int(lengths.max()) + num_tokens, model.context_length
    if context < 2:
        raise ValueError(
            f"context_length={context} has no room for a drawn token: "
            "use a model with a context of at least 2"
        )
    # The last column takes what windows draw after the end of a row.
    tokens = np.zeros((len(rows), total + 1), np.int32)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    static = (bool(temperature == 0), top_k, -1 if stop_token is None else stop_token)
    options = (jnp.float32(temperature), None if top_p == 1 else jnp.float32(top_p))
    step, width = context // 2, min(context, total)
    # The first token of each row's window. A row alone has the same windows.
    start = np.where(lengths < context, 0, lengths - (context - step))
    known, draws, shift = int((lengths - start).min()), key, 0
    while True:
        window = np.minimum(start[:, None] + np.arange(width), total)
        rest = total - start
        drawn = _generate(
            model,
            *static,
            variables,
            np.take_along_axis(tokens, window, axis=1),
            draws,
            jnp.int32(known),
            jnp.int32(min(width, rest.max())),
            lengths - start,
            *options,
        )
        np.put_along_axis(tokens, window, np.asarray(drawn), axis=1)
        if rest.max() <= width:
            return jnp.asarray(tokens[:, :-1])
        start, known, shift = start + step, context - step, shift + step
        draws = _fold_in(key, shift)


def _check_prompts(rows, num_tokens, stop_token, vocab_size):
    """Raises ValueError if prompts, or what ends their texts, are invalid."""
    for row in rows:
        # As ids, other numbers would be rounded towards zero.
        if row.ndim != 1 or row.size and row.dtype.kind not in "iu":
            raise ValueError(
                "prompt must be token ids, integers [batch, prompt] or a list of such "
                f"prompts, got one of shape {row.shape} and dtype {row.dtype}"
            )
    _check_integer("num_tokens", num_tokens)
    _check_integer("stop_token", stop_token)
    shortest = min(map(len, rows), default=None)
    if not shortest or num_tokens < 1:
        raise ValueError(
            "generate needs a prompt of at least one token and num_tokens >= 1, got "
            f"{'none' if shortest is None else shortest} and {num_tokens}"
        )
    ids = np.concatenate([*rows, [] if stop_token is None else [stop_token]])
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.max() if ids.min() >= 0 else ids.min()
        raise ValueError(
            f"the prompt or stop_token has token id {int(wrong)}; the model's "
            f"vocabulary has ids 0 to {vocab_size - 1}"
        )


def _check_options(temperature, top_k, top_p, vocab_size):
    """Raises ValueError if an option of the draws is invalid."""
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 or a positive number, got {temperature}"
        )
    _check_integer("top_k", top_k)
    if not 0 <= top_k <= vocab_size:
        raise ValueError(
            f"top_k must be from 0 (all) to {vocab_size}, the size of the "
            f"vocabulary, got {shorten(top_k)}"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (all), got {top_p}")


def _check_integer(name, value):
    """Raises ValueError unless a value is an integer or None."""
    if value is not None and np.asarray(value).dtype.kind not in "iu":
        raise ValueError(f"{name} must be an integer, got {shorten(value)}")


def _is_per_row(key):
    """Returns whether there is a key for each row; a raw key has an axis of its own."""
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim > 0


def _fold_in(key, number):
    """Does `jax.random.fold_in`, also for an array of keys."""
    if _is_per_row(key):
        return jax.vmap(jax.random.fold_in, (0, None))(key, number)
    return jax.random.fold_in(key, number)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    model, greedy, top_k, stop, variables, tokens, key, known, end, lengths,
    temperature, top_p,
):  # fmt: skip
    """Draws tokens ``known`` to ``end - 1``; those before ``lengths`` are prompts."""
    apply = functools.partial(model.apply, mutable=["cache"])

    def draw(logits, index):
        logits, key_i = logits[:, 0], _fold_in(key, index)
        if greedy:
            return sample_token(key_i, logits, temperature=0.0)
        options = (temperature, top_k, top_p)
        if _is_per_row(key):
            rows = logits[:, None]
            return jax.vmap(lambda key, row: _draw(key, row, *options)[0])(key_i, rows)
        return _draw(key_i, logits, *options)

    def write(tokens, index, drawn):
        """Writes drawn tokens at an index, except in a prompt or after the end."""
        last = tokens[:, index - 1]
        drawn = jnp.where((last == stop) & (index > lengths), stop, drawn)
        drawn = jnp.where(index < lengths, tokens[:, index], drawn)
        return tokens.at[:, index].set(drawn)

    def step(index, carry):
        tokens, cache, drawn = carry
        tokens = write(tokens, index, drawn)
        row = jax.lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
        logits, cache = apply({**variables, **cache}, row, index=index)
        return tokens, cache, draw(logits, index)

    # Prefill: one call for the prompt, padded to the width of the window.
    logits, cache = apply(variables, tokens, index=known - 1)
    carry = (tokens, cache, draw(logits, known - 1))
    tokens, _, drawn = jax.lax.fori_loop(known, end - 1, step, carry)
    return write(tokens, end - 1, drawn)
