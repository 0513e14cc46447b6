"""Turns the softmax attention of a trained model into linear attention.

`swap_attention` gives a model another attention and keeps its parameters;
`imitate_softmax` trains the feature maps of linear attention to reproduce the weights
of the softmax attention; `init_lora` and `merge_lora` are the low-rank changes with
which fine-tuning makes up for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Key

from relattn import spec
from relattn.messages import list_problems, shorten
from relattn.models import variable_names
from relattn.nn.linear_attention import LinearAttention
from relattn.nn.softmax_attention import SoftmaxAttention
from relattn.offsets import is_whole
from relattn.training.parallel import limit_in_flight

# Projections of the attentions of `relattn.models`, for `init_lora`.
PROJECTIONS = r"attention/(q|k|v|out)/kernel$"
_DIVERGENCE = "softmax_divergence"
# Smaller weights count as this one, because they may be zero, which has no logarithm.
_LEAST_WEIGHT = 1e-12

# Parameters by their path in the tree.
_Flat = dict[tuple[str, ...], Any]


def swap_attention(
    model: nn.Module,
    variables: Mapping[str, Any],
    attention: str,
    inputs: Array | np.ndarray,
    key: Key[Array, ""],
) -> tuple[nn.Module, dict[str, Any]]:
    """Replaces the attention of a model and keeps all of its parameters.

    Args:
        model: A `relattn.models.ViT` or `relattn.models.GPT`, or a setting of one.
        variables: Its variables.
        attention: Spec of the new attention.
        inputs: A batch of inputs, such as one image.
        key: Parameters and random features that the new attention adds are drawn from
            it.

    Returns:
        The new model and its variables.

    Raises:
        ValueError: If the new attention lacks a parameter of the old one or has one of
            another shape, the old one attends to a window and the new one cannot, the
            model has no attention, or ``variables`` are only its parameters.

    Example:
        >>> from relattn.models import ViT
        >>> vit = ViT(10, dim=8, num_heads=2, num_layers=3)
        >>> images, key = jnp.ones((1, 32, 32, 1)), jax.random.key(0)
        >>> variables = vit.init(key, images)
        >>> vit, variables = swap_attention(vit, variables, "hedgehog", images, key)
        >>> sorted(variables["params"]["blocks_0"]["attention"])
        ['k', 'key_projection', 'out', 'q', 'query_projection', 'v']
    """
    _check_variables(variables)
    if not hasattr(model, "attention"):
        raise ValueError(
            f"{type(model).__name__} has no attention to swap: pass a ViT or a GPT"
        )
    old = model.attention
    if _window(old) and spec.parse(attention)[0] != "softmax":
        raise ValueError(
            f"attention {old!r} attends to a window, and {attention!r} to all earlier "
            "tokens: swap model.clone(attention='softmax'), which it can imitate"
        )
    swapped = model.clone(attention=attention)
    kept = variable_names.flatten(model, {"params": variables["params"]})
    shapes = jax.eval_shape(swapped.init, key, inputs)
    shapes = {name: tree for name, tree in shapes.items() if name != "intermediates"}
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    taken: list[Any] = []
    for path, leaf in leaves:
        names, stacked = variable_names.leaf_names(swapped, path, leaf.shape)
        shape = leaf.shape[1:] if stacked else leaf.shape
        fits = [name in kept and kept[name].shape == shape for name in names]
        arrays = [kept.pop(name) for name in names] if all(fits) else []
        taken.append((np.stack(arrays) if stacked else arrays[0]) if arrays else None)
    if kept:
        lost = list_problems({"without a place": list(kept)})
        raise ValueError(
            f"attention {attention!r} does not keep the parameters of attention "
            f"{old!r} ({lost}): swap softmax for linear attention, such as 'hedgehog'"
        )

    @jax.jit
    def draw(key: Key[Array, ""], inputs: Array) -> list[Array]:
        # Under jit, initial parameters that nothing uses are not computed.
        new = swapped.init(key, inputs)
        drawn = jax.tree.leaves({name: new[name] for name in shapes})
        return [leaf for leaf, old in zip(drawn, taken, strict=True) if old is None]

    new = iter(draw(key, inputs))
    return swapped, jax.tree.unflatten(
        structure, [next(new) if old is None else jnp.asarray(old) for old in taken]
    )


def _check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ValueError if variables have no parameters."""
    if "params" not in variables:
        raise ValueError(
            "variables need the collection 'params', as those of model.init: pass "
            f"{{'params': params}}, got the names {', '.join(map(str, variables))}"
        )


def _window(attention: str) -> int:
    """Returns the window of an attention's spec; 0 for all tokens."""
    name, options = spec.parse(attention)
    return options.get("window", 0) if name == "softmax" else 0


def softmax_divergences(
    model: nn.Module, variables: Mapping[str, Any], inputs: Array | np.ndarray
) -> Float[Array, " layers"]:
    """Measures how far linear attention is from softmax attention, layer by layer.

    sum_j a_ij log(a_ij / b_ij), the Kullback-Leibler divergence, averaged over
    examples, heads and queries without padding. b are the weights of the linear
    attention, a those of softmax attention with the same queries, keys, mask and
    position. Up to the entropy of a, this is the cross-entropy that Hedgehog and
    LoLCATs minimise.

    A layer passes on the output of softmax, so every layer sees what it sees in the
    model with softmax attention.

    Args:
        model: A model with linear attention in some layers.
        variables: Its variables.
        inputs: A batch of its inputs.

    Returns:
        The divergence of each layer with linear attention; its gradients reach the
        feature map of this layer alone.

    Raises:
        ValueError: If no layer has linear attention, or one has heads without keys.

    Example:
        >>> from relattn.models import ViT
        >>> vit = ViT(10, dim=8, num_heads=2, num_layers=3, attention="hedgehog")
        >>> images = jnp.ones((1, 32, 32, 1))
        >>> variables = vit.init(jax.random.key(0), images)
        >>> softmax_divergences(vit, variables, images).shape
        (3,)

    Source:
        Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with
        Softmax Mimicry, section 4.2; Zhang et al., LoLCATs: On Low-Rank Linearizing of
        Large Language Models, section 3.1.
    """
    with nn.intercept_methods(_pass_on_softmax):
        _, sown = cast(tuple, model.apply(variables, inputs, mutable=["intermediates"]))
    found = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(sown)
        if _DIVERGENCE in jax.tree_util.keystr(path)
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear attention: give it one by "
            "swap_attention(model, variables, 'hedgehog', inputs, key)"
        )
    found.sort(key=lambda entry: _in_order(entry[0]))
    return jnp.concatenate([jnp.ravel(leaf) for _, leaf in found])


def _in_order(path: str) -> list[Any]:
    """Returns a key that sorts block_2 before block_10."""
    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path)]


def _pass_on_softmax(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Sows the divergence of linear attention from softmax, whose output it returns."""
    module = context.module
    if not isinstance(module, LinearAttention) or context.method_name != "attend":
        return call(*args, **kwargs)
    # Without gradients: a layer does not learn to change its tokens.
    q, k, v = jax.lax.stop_gradient(args[:3])
    if k is None or k.shape[-3] != v.shape[-3]:
        raise ValueError(
            f"{type(module).__name__} has heads without keys, which cannot imitate "
            "softmax: use attention 'hedgehog', 'relu' or 'favor'"
        )
    softmax = SoftmaxAttention(
        dim=module.dim,
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        causal=module.causal,
        dtype=module.dtype,
        parent=None,
    )
    # A [v, I] = [A v, A]
    identity = jnp.broadcast_to(jnp.eye(v.shape[-2]), (*v.shape[:-1], v.shape[-2]))
    columns = jnp.concatenate([v.astype(identity.dtype), identity], axis=-1)
    exact = softmax.apply({}, q, k, columns, *args[3:], method="attend")
    out, expected = jnp.split(cast(Array, exact), [v.shape[-1]], axis=-1)
    found = jnp.maximum(call(q, k, identity, *args[3:], **kwargs), _LEAST_WEIGHT)
    ratio = jnp.where(expected > 0, expected, 1.0) / jnp.where(expected > 0, found, 1.0)
    divergences, exists = jnp.sum(expected * jnp.log(ratio), axis=-1), None
    # Queries that are padding do not count.
    mask = args[3].key_mask
    if mask is not None and args[3].memory is None:
        exists = jnp.broadcast_to(mask, divergences.shape)
    divergence = jnp.mean(divergences, where=exists)
    # A layer may be traced twice: the last value replaces those before.
    module.sow(
        "intermediates",
        _DIVERGENCE,
        divergence,
        reduce_fn=lambda _, new: new,
        init_fn=lambda: divergence,
    )
    return out.astype(v.dtype)


def imitate_softmax(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Array | np.ndarray],
    optimizer: optax.GradientTransformation,
    *,
    on_step: Callable[[int], object] | None = None,
) -> tuple[dict[str, Any], Float[np.ndarray, "steps layers"]]:
    """Trains feature maps to reproduce the weights of softmax attention.

    Minimises the sum of `softmax_divergences` over the layers, whose terms share no
    parameter. All parameters but those of the feature maps stay as they are.

    Args:
        model: A model with learned feature maps, such as attention ``"hedgehog"``.
        variables: Its variables, with the parameters of a model that was trained with
            softmax attention, see `swap_attention`.
        batches: Inputs of the model, one batch for each update.
        optimizer: The optimiser.
        on_step: Called with the number of updates after each.

    Returns:
        The variables with trained feature maps, and the divergence of each layer before
        each update.

    Raises:
        ValueError: If the model has no learned feature maps, ``variables`` are only its
            parameters, ``optimizer`` is not of optax, there is no batch, or one is not
            an array.

    Example:
        >>> from relattn.models import ViT
        >>> vit = ViT(10, dim=8, num_heads=2, num_layers=3, attention="hedgehog")
        >>> images = jax.random.normal(jax.random.key(0), (2, 32, 32, 1))
        >>> variables = vit.init(jax.random.key(1), images)
        >>> _, divergences = imitate_softmax(
        ...     vit, variables, [images] * 5, optax.adam(1e-2))
        >>> divergences.shape, bool((divergences[-1] < divergences[0]).all())
        ((5, 3), True)

    Source:
        See `softmax_divergences`.
    """
    _check_variables(variables)
    if not hasattr(optimizer, "init"):
        raise ValueError(
            "optimizer must be one of optax, such as optax.adam(1e-2), got "
            f"{shorten(optimizer)}"
        )
    if not isinstance(batches, Iterable) or hasattr(batches, "shape"):
        raise ValueError(
            "batches must be an iterable of batches of inputs, not an array: pass "
            "[images] for one update, or list(images) if its first axis counts updates"
        )
    frozen = dict(variables)
    trained, opt_state, history = None, None, []

    @jax.jit
    def update(trained, frozen, opt_state, inputs):
        def loss(trained: _Flat) -> tuple[Array, Array]:
            params = replace_params(frozen["params"], trained)
            found = softmax_divergences(model, {**frozen, "params": params}, inputs)
            return found.sum(), found

        gradients, found = jax.grad(loss, has_aux=True)(trained)
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, found

    for inputs in batches:
        if not hasattr(inputs, "shape"):
            raise ValueError(
                "each batch must be an array of inputs, without labels, got "
                f"{type(inputs).__name__}: pass batch['image'], for example"
            )
        if trained is None:
            trained = feature_map_params(model, variables, inputs)
            if not trained:
                raise ValueError(
                    f"{type(model).__name__} with attention "
                    f"{getattr(model, 'attention', '')!r} has no learned feature maps: "
                    "use 'hedgehog' or 'relu'"
                )
            opt_state = optimizer.init(trained)
        trained, opt_state, found = update(trained, frozen, opt_state, inputs)
        history.append(found)
        limit_in_flight(history)
        if on_step is not None:
            on_step(len(history))
    if trained is None:
        raise ValueError("batches is empty: pass a batch of inputs for each update")
    params = replace_params(frozen["params"], trained)
    return {**frozen, "params": params}, np.stack(jax.device_get(history))


def feature_map_params(
    model: nn.Module, variables: Mapping[str, Any], inputs: Array | np.ndarray
) -> dict[tuple[str, ...], Any]:
    """Finds the parameters of learned feature maps.

    Args:
        model: A model with linear attention.
        variables: Its variables.
        inputs: A batch of its inputs.

    Returns:
        The parameters by their path; none if no attention learns its feature map.
    """
    paths = set()

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, LinearAttention) and context.method_name == "__call__":
            names = type(module).feature_map_params
            paths.update((*module.path, name) for name in names)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(model.apply, variables, inputs)
    flat = _flatten(variables["params"])
    return {path: leaf for path, leaf in flat.items() if path in paths}


def _flatten(params: Mapping[str, Any]) -> _Flat:
    return cast(_Flat, flatten_dict(params))


def replace_params(
    params: Mapping[str, Any], new: Mapping[tuple[str, ...], Any]
) -> dict[str, Any]:
    """Replaces parameters by their path.

    Args:
        params: A tree of parameters.
        new: Some of them, see `feature_map_params`.

    Returns:
        The tree with the new parameters.

    Example:
        >>> replace_params({"a": {"b": 1, "c": 2}}, {("a", "b"): 3})
        {'a': {'b': 3, 'c': 2}}
    """
    return unflatten_dict({**_flatten(params), **new})


def init_lora(
    params: Mapping[str, Any],
    key: Key[Array, ""],
    *,
    rank: int = 8,
    pattern: str = PROJECTIONS,
) -> dict[tuple[str, ...], dict[str, Any]]:
    """Creates low-rank changes of matrices, initially zero (LoRA).

    W' = W + scale a b, a ``[inputs, rank]`` uniform in +-1/sqrt(inputs), b ``[rank,
    outputs]`` zero.

    Args:
        params: A tree of parameters.
        key: A PRNG key.
        rank: Number of columns of a.
        pattern: Regular expression that finds the matrices by path, such as
            ``"blocks_0/attention/q/kernel"``; by default the attentions' projections.

    Returns:
        ``{"a": ..., "b": ...}`` by the path of the matrix. Leading axes, such as that
        of stacked layers, are those of the matrix.

    Raises:
        ValueError: If the pattern finds no matrix or is not a regular expression,
            or ``rank`` is not a whole number of at least 1.

    Example:
        >>> params = {"attention": {"q": {"kernel": jnp.ones((3, 5))}}}
        >>> lora = init_lora(params, jax.random.key(0), rank=2)
        >>> jax.tree.map(jnp.shape, lora)
        {('attention', 'q', 'kernel'): {'a': (3, 2), 'b': (2, 5)}}

    Source:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, section 4.1.
    """
    if not is_whole(rank) or rank < 1:
        raise ValueError(
            f"rank must be a whole number of at least 1, got {shorten(rank)}"
        )
    flat = _flatten(params)
    try:
        matches = re.compile(pattern).search
    except (TypeError, re.error) as error:
        raise ValueError(
            f"pattern={pattern!r} is not a regular expression ({error})"
        ) from error
    found = {
        path: leaf
        for path, leaf in flat.items()
        if matches("/".join(path)) and leaf.ndim >= 2
    }
    if not found:
        raise ValueError(
            f"pattern={pattern!r} finds none of the matrices "
            f"{', '.join('/'.join(path) for path, leaf in flat.items())}"
        )
    lora = {}
    for (path, leaf), one in zip(
        found.items(), jax.random.split(key, len(found)), strict=True
    ):
        *leading, inputs, outputs = leaf.shape
        bound = inputs**-0.5
        shape = (*leading, inputs, rank)
        lora[path] = {
            "a": jax.random.uniform(one, shape, leaf.dtype, -bound, bound),
            "b": jnp.zeros((*leading, rank, outputs), leaf.dtype),
        }
    return lora


def merge_lora(
    params: Mapping[str, Any],
    lora: Mapping[tuple[str, ...], Mapping[str, Any]],
    *,
    scale: float = 2.0,
) -> dict[str, Any]:
    """Adds low-rank changes to their matrices, W' = W + scale a b.

    Args:
        params: A tree of parameters.
        lora: See `init_lora`.
        scale: Factor of the changes, alpha / rank in the papers.

    Returns:
        The tree with changed matrices.

    Raises:
        ValueError: If ``params`` lack a matrix of ``lora``.

    Example:
        >>> lora = {("w",): {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 2))}}
        >>> merge_lora({"w": jnp.eye(2)}, lora)["w"].tolist()
        [[3.0, 2.0], [2.0, 3.0]]
    """
    flat = _flatten(params)
    if missing := lora.keys() - flat.keys():
        raise ValueError(
            "params lack the matrices of "
            f"{', '.join(sorted('/'.join(path) for path in missing))}: pass the params "
            "that init_lora took"
        )
    changed = {
        path: flat[path] + scale * (change["a"] @ change["b"])
        for path, change in lora.items()
    }
    return replace_params(params, changed)
