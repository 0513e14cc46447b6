"""Generates text with a trained model.

``relattn sample --workdir=RUN --prompt=...`` prints the prompt and its continuation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from relattn import command
from relattn.messages import printable, shorten
from relattn.training.saved_run import load_text_run

# Guards against a typo that would fill the memory.
MAX_SAMPLES = 10**6


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the generated texts."""
    parser = command.Parser("python -m relattn.evaluation.sample", __doc__)
    add = parser.add_argument
    add("--workdir", required=True, help="the run directory, or a saved model of text")
    add("--prompt", default="\n", help="text to continue")
    add("--num_samples", type=int, default=1, help="number of texts")
    add(
        "--num_tokens",
        type=int,
        default=0,
        help="number of tokens to draw; 0 fills the context",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="divisor of the logits; 0 takes the most likely token",
    )
    add(
        "--top_k",
        type=int,
        default=0,
        help="how many of the most likely tokens to draw from; 0 for all",
    )
    add(
        "--top_p",
        type=float,
        default=1.0,
        help="draw from the most likely tokens whose probabilities sum to this; 1 for "
        "all",
    )
    add("--stop", default="", help="text of the token that ends a sample")
    add(
        "--bos",
        action="store_true",
        help="begin with the tokens that the tokenizer.json puts before a text, such "
        "as <s>, as transformers does",
    )
    add("--seed", type=int, default=0, help="seed of the draws")
    add("--checkpoint", default="best", help="best or latest")
    add("--context_length", type=int, help=command.CONTEXT_HELP)
    add("--bpe_dir", default="", help="folder of the tokenizer's files")
    given = parser.parse_args(argv)
    if not 1 <= given.num_samples <= MAX_SAMPLES:
        raise ValueError(
            f"num_samples must be from 1 to {MAX_SAMPLES}, got "
            f"{shorten(given.num_samples)}"
        )
    run = load_text_run(given.workdir, given.checkpoint, given.context_length)
    texts = run.generate(
        [given.prompt] * given.num_samples,
        num_tokens=given.num_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        stop=given.stop,
        bos=given.bos,
        seed=given.seed,
        bpe_dir=given.bpe_dir,
    )
    text = "\n\n".join(texts)
    if sys.stdout.isatty():
        # A terminal obeys control characters, which a model of bytes may draw.
        text = "".join(c if c in "\n\t" else printable(c) for c in text)
    print(text)


if __name__ == "__main__":
    main()
