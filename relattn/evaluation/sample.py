"""Text from a trained model.

``python -m relattn.evaluation.sample --workdir=RUN --prompt=...`` prints the prompt and
the text with which the model continues it.
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

# More would only fill the memory.
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
        ValueError: If ``num_samples`` or ``seed`` is out of range, the run is not one
            of text, its vocabulary is not the tokenizer's, or
            `relattn.models.generate` raises it.
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


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints texts as the arguments say.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m relattn.evaluation.sample", __doc__)
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
