"""Measures how well a trained model predicts a text file.

``relattn perplexity --workdir=RUN --input=FILE`` prints the perplexity per token, the
bits per token and the bits per byte. Compare models of different tokenizers by bits per
byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from relattn import command
from relattn.messages import printable
from relattn.training.metrics import format_metrics
from relattn.training.predict import require_kind
from relattn.training.saved_run import load_text_run


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the perplexity of each file."""
    parser = command.Parser("python -m relattn.evaluation.perplexity", __doc__)
    add = parser.add_argument
    add("--workdir", required=True, help="the run directory, or a saved model of text")
    files = {"required": True, "nargs": "+", "action": "extend"}
    add("--input", **files, help="UTF-8 text files; repeatable")
    add("--checkpoint", default="best", help="best or latest")
    add("--seed", type=int, help=command.SEED_HELP)
    add("--batch_size", type=int, help=command.BATCH_HELP)
    add("--draws", type=int, help=command.DRAWS_HELP)
    add("--context_length", type=int, help=command.CONTEXT_HELP)
    add("--bpe_dir", default="", help="folder of the tokenizer's files")
    given = parser.parse_args(argv)
    run = load_text_run(
        given.workdir, given.checkpoint, given.context_length, given.seed
    )
    for path in given.input:
        found = run.evaluate(
            path,
            batch_size=given.batch_size,
            draws=given.draws,
            bpe_dir=given.bpe_dir,
        )
        print(
            f"{printable(path)}: "
            f"{format_metrics({'perplexity': found['perplexity']})} per token, "
            f"{found['bits_per_token']:.4f} bits per token, "
            f"{found['bits_per_byte']:.4f} bits per byte, on {found['count']:,.0f} "
            f"tokens, each predicted from those before it in its window of "
            f"{require_kind(run, 'tokens').context_length}"
        )


if __name__ == "__main__":
    main()
