"""Text from a trained model: ``python -m relattn.sample --workdir=RUN --prompt=...``.

Prints the prompt and what the model makes of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from relattn.data import load_tokenizer
from relattn.models.gpt import generate
from relattn.training import load_run
from relattn.training.errors import USER_ERRORS, is_user_error


def sample(
    workdir: str | Path,
    prompt: str,
    *,
    num_samples: int = 1,
    num_tokens: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    checkpoint: str = "best",
    bpe_dir: str = "",
) -> list[str]:
    """Continues a text by a run's model.

    Args:
        workdir: The run directory.
        prompt: The text to go on from, at least a token long.
        num_samples: Number of texts, of different draws.
        num_tokens: Tokens to draw; 0 for as many as the model's context holds.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Number of likeliest tokens to choose from; 0 for all.
        seed: Of the draws.
        checkpoint: ``"best"`` or ``"latest"``.
        bpe_dir: Of the tokenizer ``gpt2``, as in `relattn.data.load_tokenizer`.

    Returns:
        The texts, prompt included.

    Raises:
        ValueError: If the run is not one of text, its vocabulary is not the
            tokenizer's, or `relattn.models.gpt.generate` refuses.
        CheckpointError: If there is no complete checkpoint, or it is damaged.
    """
    run = load_run(workdir, checkpoint)
    if run.data.kind != "tokens":
        raise ValueError(f"the run in {workdir} was trained on images, not on text")
    tokenizer = load_tokenizer(run.data.tokenizer, bpe_dir)
    if tokenizer.vocab_size != run.data.vocab_size:
        raise ValueError(
            f"the checkpoint has a vocabulary of {run.data.vocab_size} tokens, the "
            f"tokenizer {tokenizer.name!r} one of {tokenizer.vocab_size}"
        )
    tokens = tokenizer.encode(prompt).astype(np.int32)
    room = run.data.context_length - len(tokens)
    out = generate(
        run.model,
        run.variables,
        np.tile(tokens, (num_samples, 1)),
        num_tokens or max(room, 1),
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
    )
    return [tokenizer.decode(text) for text in np.asarray(out)]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints texts as the arguments say.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = argparse.ArgumentParser(
        prog="python -m relattn.sample", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--workdir", required=True, help="the run directory")
    parser.add_argument("--prompt", default="\n", help="the text to go on from")
    parser.add_argument("--num_samples", type=int, default=1, help="number of texts")
    parser.add_argument(
        "--num_tokens", type=int, default=0, help="0: as many as the context holds"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: likeliest")
    parser.add_argument("--top_k", type=int, default=0, help="0: the whole vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--checkpoint", default="best", help="best or latest")
    parser.add_argument("--bpe_dir", default="", help="GPT-2's vocabulary, see README")
    try:
        texts = sample(**vars(parser.parse_args(argv)))
    except (ImportError, *USER_ERRORS) as error:
        if not isinstance(error, ImportError) and not is_user_error(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
