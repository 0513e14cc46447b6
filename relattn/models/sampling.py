"""Sampling from a model of text, token by token."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from relattn import spec


def sample_token(
    key: Key[Array, ""],
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
) -> Int[Array, " batch"]:
    """Draws a token from softmax(logits / temperature), the ``top_k`` likeliest only.

    Args:
        key: A PRNG key.
        logits: Shape ``[batch, vocab]``.
        temperature: 0 takes the likeliest token.
        top_k: Number of tokens to choose from; 0 for all.

    Returns:
        Token ids, shape ``[batch]``.

    Example:
        >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
        >>> sample_token(jax.random.key(0), logits, temperature=0.0).tolist()
        [1]
    """
    if temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    return _draw(key, logits, temperature, top_k)


def _draw(key, logits, temperature, top_k):
    """As `sample_token`, at a temperature above 0 that may be traced."""
    if top_k:
        kept = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kept, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def generate(
    model: nn.Module,
    variables: Mapping[str, Any],
    prompt: Int[Array, "batch prompt"] | Int[np.ndarray, "batch prompt"],
    num_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
) -> Int[Array, "batch total"]:
    """Continues prompts with tokens drawn from the model, one after the other.

    Decoding is incremental: every layer keeps what it needs of earlier tokens (keys and
    values, or its inputs) in the collection ``cache``, so that a token costs one row of
    attention and not a whole sequence. Prompts of another length and other
    temperatures, with the same length in the end, are not compiled anew.

    Args:
        model: A `GPT`.
        variables: Its variables.
        prompt: Token ids, at least one, shape ``[batch, prompt]``.
        num_tokens: Number of tokens to draw.
        key: A PRNG key; the same key draws the same tokens.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to choose from; 0 for all.

    Returns:
        The prompts and their continuations, shape ``[batch, prompt + num_tokens]``.

    Raises:
        ValueError: If the prompt is empty, holds an id that is not in the vocabulary,
            the whole is longer than the model's context, ``temperature`` is negative
            or not finite, or ``top_k`` is not from 0 to the size of the vocabulary.

    Example:
        >>> from relattn.models import GPT
        >>> model = GPT(vocab_size=11, context_length=7, dim=8, num_layers=1,
        ...             num_heads=2, mlp_dim=16)
        >>> prompt = jnp.array([[3, 5]])
        >>> variables = model.init(jax.random.key(0), prompt)
        >>> generate(model, variables, prompt, 4, key=jax.random.key(1)).shape
        (1, 6)
    """
    batch, length = prompt.shape
    total = length + num_tokens
    if not length or num_tokens < 1:
        raise ValueError(
            "generate needs a prompt of at least one token and num_tokens >= 1, got "
            f"{length} and {num_tokens}"
        )
    if total > model.context_length:
        raise ValueError(
            f"a prompt of {length} tokens and num_tokens={num_tokens} are longer than "
            f"the weights: config.model.context_length={model.context_length}"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 or a positive number, got {temperature}"
        )
    if not 0 <= top_k <= model.vocab_size:
        raise ValueError(
            f"top_k must be from 0 (all) to {model.vocab_size}, the size of the "
            f"vocabulary, got {spec.shorten(top_k)}"
        )
    ids = np.asarray(prompt)
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        raise ValueError(
            f"the prompt holds token id {ids.max() if ids.min() >= 0 else ids.min()}; "
            f"the model's vocabulary has ids 0 to {model.vocab_size - 1}"
        )
    forced = jnp.zeros((total, batch), jnp.int32).at[:length].set(ids.T)
    traced = (jnp.int32(length), jnp.float32(temperature))
    greedy = bool(temperature == 0)
    return _decode(model, greedy, top_k, variables, forced, key, *traced)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(model, greedy, top_k, variables, forced, key, length, temperature):
    apply = functools.partial(model.apply, mutable=["cache"])
    first = forced[0][:, None]
    _, shapes = jax.eval_shape(apply, variables, first, index=0)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def body(carry, index):
        cache, token = carry
        logits, cache = apply({**variables, **cache}, token[:, None], index=index)
        key_i, logits = jax.random.fold_in(key, index), logits[:, 0]
        if greedy:
            drawn = sample_token(key_i, logits, temperature=0.0)
        else:
            drawn = _draw(key_i, logits, temperature, top_k)
        token = jnp.where(index + 1 < length, forced[index + 1], drawn)
        return (cache, token), token

    steps = jnp.arange(len(forced) - 1)
    _, tokens = jax.lax.scan(body, (cache, forced[0]), steps)
    return jnp.concatenate([forced[:1], tokens]).T
