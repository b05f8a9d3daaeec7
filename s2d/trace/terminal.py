"""An answer on a terminal: streamed, each token in the colour of the exit it came from, and reported. Knows nothing about models."""

import os

from ..tokenizer import TextStream

COLORS = (
    36,
    33,
    35,
    32,
    34,
    31,
)  # of the exits, shallowest first, as ANSI escape sequences number them


def colors_of(exits, choice, out):
    """{exit layer: colour}, or {} for none: "always", "never", or "auto", where ``out`` is a terminal and NO_COLOR is not set."""
    wanted = choice == "always"
    if choice == "auto":
        wanted = (
            out
            and out.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
    return (
        {exit_layer: COLORS[number % len(COLORS)] for number, exit_layer in enumerate(exits)}
        if wanted
        else {}
    )


def paint(text, color):
    return f"\033[{color}m{text}\033[0m" if color and text else text


class Streamed:
    """A function for ``on_step`` that writes tokens to ``out`` as they come, and keeps them.

    ``colors`` {exit layer: colour}: what the target says itself is plain.
    """

    def __init__(self, tokenizer, out, colors):
        self.stream, self.out, self.colors, self.tokens = TextStream(tokenizer), out, colors, []

    def __call__(self, step):
        self.tokens += step.tokens
        if not self.colors:
            self.write(self.stream.push(step.tokens))
            return
        first = 0
        for end in range(1, len(step.tokens) + 1):  # a run of tokens from one source at a time
            if end == len(step.tokens) or step.sources[end] != step.sources[first]:
                self.write(
                    paint(
                        self.stream.push(step.tokens[first:end]),
                        self.colors.get(step.sources[first]),
                    )
                )
                first = end

    def write(self, text):
        print(text, end="", file=self.out, flush=True)

    def finish(self):
        """The end of the line, or of what there is of it."""
        print(self.stream.finish(), file=self.out, flush=True)


def speed(output):
    return len(output.tokens) / output.stats.seconds


def report(output, method, colors=()):
    """The short block under the text, with a legend where there are colours."""
    stats = output.stats
    lines = [
        f"tokens         {len(output.tokens)} in {stats.seconds:.2f} s, {speed(output):.1f} tokens/s",
        f"steps          {stats.steps}, mean accepted tokens {stats.mean_accepted_tokens:.2f}",
    ]
    if drafted := sum(stats.exit_counts.values()):
        shares = [
            f"{count / drafted:.0%} after layer {layer}"
            for layer, count in sorted(stats.exit_counts.items())
        ]
        lines.append(f"draft tokens   {drafted}: {', '.join(shares)}")
    if colors:
        legend = ", ".join(paint(f"after layer {layer}", color) for layer, color in colors.items())
        lines.append(f"colours        {legend}, the target's own plain")
    lossy = "no: with several roots from the target the text is not the target's own"
    lines.append(f"exact          {'yes' if output.exact else lossy}, method {method}")
    return "\n".join(lines)


def gain(output):
    """One line about an answer: what it took, and what the draft saved."""
    passes = (
        f"{output.stats.steps} passes of the target ({output.stats.mean_accepted_tokens:.2f} each)"
    )
    return f"{len(output.tokens)} tokens in {passes}, {speed(output):.1f} tokens/s"


def plan_of(step):
    """What a step of --method auto decided and why, beside what came of it; None for other methods."""
    proposal = step.proposal
    return proposal.plan and {
        "exits": proposal.exits, "nodes": proposal.level_sizes, **proposal.plan,
        "tokens": len(step.tokens), "ms": 1000 * step.seconds,
    }  # fmt: skip


def as_json(output, prompt, tokenizer, plans):
    stats, tuned = output.stats, {"plans": plans} if any(plans) else {}
    return {
        "text": tokenizer.decode(output.tokens),
        "tokens": output.tokens,
        "prompt_tokens": len(prompt),
        "exact": output.exact,
        "stats": {
            "steps": stats.steps,
            "mean_accepted_tokens": stats.mean_accepted_tokens,
            "accept_lengths": stats.accept_lengths,
            "acceptance_rate": stats.acceptance_rate,
            "exit_counts": dict(sorted(stats.exit_counts.items())),
            "draft_forwards": stats.draft_forwards,
            "seconds": stats.seconds,
            "tokens_per_second": speed(output),
        },
        **tuned,
    }
