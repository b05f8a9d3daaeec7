"""Exit 0 (ngram/table.py) judged: how sure it is of the next token, and how often that is right.

At every position of the target's own greedy answers. A column is a tenth of confidence; 0 is where
the table knows no suffix of the context.
"""

import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean

from ..checkpoint import load_model
from ..checkpoint.names import find_target
from ..checkpoint.tokenizer import Tokenizer
from ..generation import generate
from ..ngram.datastore import Datastore, find_datastore
from ..ngram.table import ORDER, Text, distribution
from ..notices import progress
from .specbench import corpus_questions
from .tables import render


def report(args: Namespace) -> None:
    folder = find_target(args.target)
    target = load_model(folder, args.device, args.dtype)
    tokenizer = Tokenizer(folder)
    datastore = find_datastore(folder, target.config)
    options = dict(method="s2d-tree", exits=(0,), datastore=datastore)
    tenths = defaultdict(list)  # the next tenth above a confidence: whether it was right
    questions = corpus_questions(args.limit)
    for question in progress(questions, f"{folder.name}: questions", len(questions)):
        prompt = tokenizer.encode_prompt(question["turns"][:1])
        answer = generate(target, prompt, max_new_tokens=args.max_new_tokens, **options)
        for confidence, right in judge(prompt, answer.tokens, datastore):
            tenths[math.ceil(10 * confidence)].append(right)
    columns = [("confidence up to", "positions", "right")]
    for tenth, right in sorted(tenths.items()):
        columns.append((f"{tenth / 10:g}", str(len(right)), f"{mean(right):.0%}"))
    print(render([*zip(*columns)], args.markdown))


def judge(
    prompt: list[int], answer: list[int], datastore: Datastore | None = None
) -> Iterator[tuple[float, bool]]:
    """Yield (confidence, whether it was right) about each token of ``answer``.

    >>> [(round(confidence, 2), right) for confidence, right in judge([5, 6, 5], [6, 7])]
    [(0.2, True), (0.47, False)]
    """
    context = list(prompt)
    text = Text()
    tables = [text] if datastore is None else [text, datastore]
    text.grow(prompt)
    for token in answer:
        known = distribution(tables, context[-ORDER:])
        guess = max(known, key=known.get, default=None)
        yield known.get(guess, 0.0), guess == token
        text.grow([token])
        context.append(token)
