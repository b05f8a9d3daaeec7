"""An example of S2D by definition: ``python -m s2d.cli.definition``."""

from .ending import run_program

QUESTION = "What is the capital of Tadastan?"


def show() -> None:
    """Print the steps of an answer of a miniature: what each exit proposed, what was emitted."""
    import torch  # takes seconds

    from ..definition import generate
    from ..pair.loading import load_pair
    from ..sampling import Draws

    pair = load_pair("13b", device="cpu", dtype="float64", temperature=1.0, seed=0)
    options = pair.options
    draws = Draws(options.seed)
    like = torch.empty((1, pair.target.config.vocab_size), dtype=torch.float64)
    context = pair.tokenizer.encode_chat([QUESTION])
    print(f"{QUESTION} (temperature {options.temperature}, seed {options.seed})")
    steps = generate(
        pair.target, pair.draft, context, options, lambda position: draws.noise([position], like)[0]
    )
    for proposed, emitted in steps:
        for children, exit_layer, confidence in proposed.values():
            words = pair.tokenizer.decode(children) or "EOS"
            print(f"  exit {exit_layer} is {confidence:.0%} sure, and drafts {words!r}", flush=True)
        print(f"emitted {pair.tokenizer.decode(emitted) or 'EOS'!r}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_program("s2d.cli.definition", show))
