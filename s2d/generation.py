"""``generate`` and ``start``: options become a Decoder."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from .decoder import Decoder, Generation
from .draft import Exit, LayerExit, SortedDraft
from .model import Llama
from .ngram.costs import MAX_ROWS
from .ngram.table import TableExit
from .options import Options, check_whole
from .rules import Greedy, Rejection, Rule, SharedNoise
from .sampling import Draws, Noise

# By ``Options.init``; s2d/__init__.py adds the Decoder of roots.py.
DECODERS: dict[str, type[Decoder]] = {"draft": Decoder}


def generate(
    target: Llama,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Generation:
    """Continue ``tokens`` by speculative decoding.

    The text is what ``target`` alone would write, up to rounding. With ``coupled=False`` it is a
    draw from the same distribution, unless ``init`` is "target" (roots.py).

    Args:
        target: the model whose text is written.
        tokens: the ids of the prompt, a list, tensor or array of shape (T,) or (1, T).
        draft: a draft model; without one, exit 0 drafts alone.
        method, options: see ``Options``.

    Ends at EOS, after ``max_new_tokens``, or when the target's context is full. Raises ValueError
    for anything that cannot be run.
    """
    return start(target, tokens, draft, method, **options).run()


def start(
    target: Llama,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Decoder:
    """As ``generate``, but nothing has happened yet: iterate over the Decoder that is returned."""
    resolved = resolve(target, draft, Options(method, **options))
    return make_decoder(target, tokens, draft, resolved)


def resolve(target: Llama, draft_model: Llama | None, options: Options, batch: int = 1) -> Options:
    """``options`` with all defaults filled in, for ``batch`` prompts that share a target pass."""
    batch = check_whole("batch", batch, 1)
    options = options.checked()
    if draft_model is not None and options.method != "ar" and draft_model.device != target.device:
        places = f"{draft_model.device} and {target.device}"
        raise ValueError(f"draft and target must be on one device, not on {places}")
    if draft_model is not None and options.decision is not None and options.method != "ar":
        options.decision.prepare_for(draft_model)
    costs = None
    if options.may_need_costs(draft_model is not None):
        costs = target.pass_costs(rows=batch * MAX_ROWS)  # measured once; None on a GPU
        if costs is not None:
            costs = costs[batch - 1 :: batch]  # k rows of each prompt are k * batch rows of a pass
    if draft_model is None:
        return options.resolved(target.config, costs=costs)
    return options.resolved(target.config, draft_model.config, draft_model.drafting, costs)


def make_decoder(
    target: Llama, tokens: Sequence[int] | torch.Tensor, draft_model: Llama | None, options: Options
) -> Decoder:
    """A Decoder for resolved ``options``. Raises ValueError if the prompt cannot be continued."""
    tokens = as_ids(tokens)
    size = target.config.max_position_embeddings
    vocab_size = target.config.vocab_size
    if not 0 < len(tokens) < size:
        raise ValueError(f"the prompt has {len(tokens)} tokens; expected 1 to {size - 1}")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(f"the prompt's ids are not all within 0..{vocab_size - 1}")
    limit = min(len(tokens) + options.max_new_tokens, size)
    drafter = None
    decoder_class = Decoder
    if options.method != "ar":
        drafter = make_drafter(target, draft_model, options, limit)
        decoder_class = DECODERS[options.init]
    rule = make_rule(target, options)
    return decoder_class(target, drafter, rule, tokens, limit, options)


def as_ids(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """The ids of a prompt as a list. ``tokens``: a list, tensor or array, (T,) or (1, T)."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    try:
        return [index(token) for token in ids]  # plain ints
    except TypeError:
        raise ValueError(f"a prompt is a list of ids, not {tokens!r:.80}") from None


def make_rule(target: Llama, options: Options) -> Rule:
    """The rule that resolved ``options`` ask for."""
    if options.temperature == 0:
        return Greedy()
    warping = (options.temperature, options.top_p, options.top_k)  # see ``sampling.warp``
    # Plain decoding has nothing to reject: it always writes the text that the noise gives.
    if options.coupled or options.method == "ar":
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        noise = Noise(options.seed, target.config.vocab_size, target.device, dtype)
        return SharedNoise(*warping, noise)
    return Rejection(*warping, target.config.vocab_size, Draws(options.seed))


def make_drafter(
    target: Llama, draft_model: Llama | None, options: Options, limit: int
) -> SortedDraft:
    """The draft that resolved ``options`` ask for, with room for a context of ``limit`` tokens."""
    exits: list[Exit] = []
    previous = None
    for exit_layer, threshold in zip(options.exits, options.thresholds):
        if exit_layer == 0:
            vocab_size = target.config.vocab_size
            exits.append(TableExit(options.datastore, threshold, vocab_size, target.device))
        else:
            capacity = limit + options.tree.max_entries
            previous = LayerExit(draft_model, previous, exit_layer, threshold, capacity)
            exits.append(previous)
    return SortedDraft(
        exits,
        options.tree,
        min_prob=options.stop,
        decision=options.decision,
        node_count=options.node_count,
    )
