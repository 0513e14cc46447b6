"""Samples text from a model: prefill of the prompt, then token by token."""

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
    """Draws a token from softmax(logits / temperature), restricted to ``top_k`` tokens.

    Args:
        key: A PRNG key.
        logits: Shape ``[batch, vocab]``.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.

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
    """Same as `sample_token`, for a temperature > 0 that may be traced."""
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
    """Continues prompts with tokens drawn from the model.

    One call of the model computes the prompt and fills the cache: the keys and values,
    inputs or state of every layer, in the collection ``cache``. Each further token then
    costs one row of attention. The prompt is padded to the final length, so that a
    prompt of another length with the same final length, or another temperature, does
    not recompile.

    Args:
        model: A `GPT`.
        variables: Its variables.
        prompt: Token ids, at least one, shape ``[batch, prompt]``.
        num_tokens: Number of tokens to draw.
        key: A PRNG key; the same key draws the same tokens.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.

    Returns:
        The prompts and their continuations, shape ``[batch, prompt + num_tokens]``.

    Raises:
        ValueError: If the prompt is empty or has an id that is not in the vocabulary,
            prompt and continuation are longer than the model's context, ``temperature``
            is negative or not finite, or ``top_k`` is not from 0 to the size of the
            vocabulary.

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
            f"config.model.context_length={model.context_length}"
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
            f"the prompt has token id {ids.max() if ids.min() >= 0 else ids.min()}; "
            f"the model's vocabulary has ids 0 to {model.vocab_size - 1}"
        )
    tokens = jnp.zeros((batch, total), jnp.int32).at[:, :length].set(ids)
    traced = (jnp.int32(length), jnp.float32(temperature))
    greedy = bool(temperature == 0)
    return _generate(model, greedy, top_k, variables, tokens, key, *traced)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(model, greedy, top_k, variables, tokens, key, length, temperature):
    """Replaces the tokens from ``length`` on, which are padding, by drawn tokens."""
    apply = functools.partial(model.apply, mutable=["cache"])

    def draw(logits, index):
        key_i = jax.random.fold_in(key, index)
        if greedy:
            return sample_token(key_i, logits[:, 0], temperature=0.0)
        return _draw(key_i, logits[:, 0], temperature, top_k)

    def step(index, carry):
        tokens, cache, drawn = carry
        tokens = tokens.at[:, index].set(drawn)
        logits, cache = apply({**variables, **cache}, drawn[:, None], index=index)
        return tokens, cache, draw(logits, index)

    # Prefill: one call for the prompt, padded to the final length.
    logits, cache = apply(variables, tokens, index=length - 1)
    carry = (tokens, cache, draw(logits, length - 1))
    tokens, _, last = jax.lax.fori_loop(length, tokens.shape[1] - 1, step, carry)
    return tokens.at[:, -1].set(last)
