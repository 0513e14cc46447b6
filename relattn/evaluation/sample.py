"""Generates text with a trained model.

``python -m relattn.evaluation.sample --workdir=RUN --prompt=...`` prints the prompt and
its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from relattn import command, spec
from relattn.data import load_tokenizer
from relattn.models import generate
from relattn.training import load_run

# Guards against a typo that would fill the memory.
MAX_SAMPLES = 10**6


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
    """Continues a prompt with the model of a run.

    Args:
        workdir: The run directory.
        prompt: Text to continue, at least one token.
        num_samples: Number of continuations to draw.
        num_tokens: Number of tokens to draw; 0 fills the model's context.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.
        seed: Seed of the draws.
        checkpoint: ``"best"`` or ``"latest"``.
        bpe_dir: Folder of the ``gpt2`` tokenizer; see `relattn.data.load_tokenizer`.

    Returns:
        The texts, including the prompt.

    Raises:
        ValueError: If ``num_samples`` or ``seed`` is out of range, the run was not
            trained on text, its vocabulary does not match the tokenizer, or
            `relattn.models.generate` rejects an argument.
        CheckpointError: If there is no complete checkpoint, or it is damaged.
    """
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(
            f"num_samples must be from 1 to {MAX_SAMPLES}, got "
            f"{spec.shorten(num_samples)}"
        )
    if not 0 <= seed <= spec.LARGEST:
        raise ValueError(
            f"seed must be from 0 to {spec.LARGEST}, got {spec.shorten(seed)}"
        )
    run = load_run(workdir, checkpoint)
    if run.data.kind != "tokens":
        raise ValueError(f"the run in {workdir} was trained on images, not on text")
    tokenizer = load_tokenizer(run.data.tokenizer, bpe_dir)
    if tokenizer.vocab_size != run.data.vocab_size:
        raise ValueError(
            f"the checkpoint has a vocabulary of {run.data.vocab_size} tokens, but the "
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size}"
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


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the generated texts.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m relattn.evaluation.sample", __doc__)
    parser.add_argument("--workdir", required=True, help="the run directory")
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--num_samples", type=int, default=1, help="number of texts")
    parser.add_argument("--num_tokens", type=int, default=0, help="0 fills the context")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top_k", type=int, default=0, help="0: all tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--checkpoint", default="best", help="best or latest")
    parser.add_argument("--bpe_dir", default="", help="folder of GPT-2's vocabulary")
    given = parser.parse_args(argv)
    texts = sample(
        given.workdir,
        given.prompt,
        num_samples=given.num_samples,
        num_tokens=given.num_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
        checkpoint=given.checkpoint,
        bpe_dir=given.bpe_dir,
    )
    print("\n\n".join(texts))


if __name__ == "__main__":
    main()
