"""The text the miniature models learn: seeded conversations in the six task groups of Spec-Bench.

Two groups are open (mt_bench: stories, advice and talk about them; summarization): many answers
are good, and the choice of words is what a draft cannot foresee. In the others there is one right
answer: whoever knows the rules can compute it from the prompt.
"""

import random
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Turn = tuple[str, str]  # (question, answer)
# {table: {kind: phrases}}, whose {words} are filled in. In "about story" and "about person" a kind
# is an answer, and its phrases ask for it.
TABLES = tomllib.loads(Path(__file__).with_name("phrases.toml").read_text(encoding="utf-8"))
PHRASES = TABLES["phrases"]
WORDS = TABLES["words"]
PRONOUNS = TABLES["pronouns"]
NAMES = list(PRONOUNS)
JOBS = WORDS["jobs"]
NOUNS = WORDS["nouns"]  # the first seven can be subjects
# Thirty-two fictional countries: what question answering must know, as WORLD["Kamuvia"]["capital"].
WORLD = TABLES["world"]
CITIES = [facts["capital"] for facts in WORLD.values()][:16]


def make_speaker(rng: random.Random, **words: Any) -> Callable[[list[str]], str]:
    """A function that says one of several phrases, at random, with ``words`` filled in."""
    return lambda phrases: rng.choice(phrases).format(**words)


def add_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def tell_story(rng: random.Random) -> Iterator[Turn]:
    words = {"name": rng.choice(NAMES)}
    words |= {kind: rng.choice(phrases) for kind, phrases in TABLES["story"].items()}
    words["she"] = PRONOUNS[words["name"]].lower()
    words["her"] = "her" if words["she"] == "she" else "his"
    _, words["bare_thing"] = words["thing"].split(" ", 1)
    words["a_trait"] = add_article(words["trait"])
    words["a_hero"] = add_article(words["hero"])
    words |= {kind.title(): word.title() for kind, word in words.items()}
    say = make_speaker(rng, **words)
    question = f"{say(PHRASES['story'])}{say(PHRASES['story about'])}."
    story = {part: say(phrases) for part, phrases in TABLES["plot"].items()}
    left_out = rng.sample(["speak", "trouble", "fear"], rng.choice([0, 1, 2]))
    told = (sentence for part, sentence in story.items() if part not in left_out)
    yield question, " ".join(told)
    about = TABLES["about story"].items()
    turns = [(say(questions), answer.format(**words)) for answer, questions in about]
    turns.append((say(PHRASES["about title"]), say(PHRASES["title"])))
    yield from rng.sample(turns, rng.choice([1, 2]))


def give_advice(rng: random.Random) -> Iterator[Turn]:
    advice = TABLES["advice"]
    topic = rng.choice(list(advice))
    name = rng.choice(NAMES)
    count = rng.choice([3, 4, 5])
    say = make_speaker(rng, name=name, count=count, topic=topic)
    question = say(PHRASES["advice"])
    tips = rng.sample(advice[topic], count)
    lines = [f"{number}. {tip.capitalize()}." for number, tip in enumerate(tips, 1)]
    yield question, "\n".join([say(PHRASES["gladly"]), *lines])
    pick = rng.randrange(count)
    order = WORDS["order"][pick]
    say = make_speaker(rng, order=order)
    yield say(PHRASES["again"]), f"The {order} point was: {tips[pick]}."


def talk(rng: random.Random) -> Iterator[Turn]:
    return rng.choice([tell_story, tell_story, give_advice])(rng)


def make_noun_phrase(rng: random.Random, nouns: list[list[str]], role: str) -> tuple[str, str]:
    """In English and in German; ``role`` is "subject" or "object"."""
    english, german, gender = rng.choice(nouns)
    determiner = "the" if rng.random() < 0.6 else "a"
    forms = TABLES["articles and endings"][f"{determiner}, {role}"]
    article, ending = forms["mfn".index(gender)]
    if rng.random() < 0.4:
        adjective, stem = rng.choice(WORDS["adjectives"])
        english, german = f"{adjective} {english}", f"{stem}{ending} {german}"
    with_article = add_article(english) if determiner == "a" else f"the {english}"
    return with_article, f"{article} {german}"


def make_sentence_pair(rng: random.Random) -> list[str]:
    """In English and in German."""
    subject = make_noun_phrase(rng, NOUNS[:7], "subject")
    verb = rng.choice(WORDS["verbs"])
    thing = make_noun_phrase(rng, NOUNS, "object")
    where = [rng.choice(WORDS["where"])] if rng.random() < 0.3 else []
    english = german = [subject, verb, thing, *where]
    if rng.random() < 0.3:  # an adverb in front moves the German subject behind the verb
        when = rng.choice(WORDS["when"])
        english = [when, subject, verb, thing, *where]
        german = [when, verb, subject, thing, *where]
    texts = (" ".join(pair[0] for pair in english), " ".join(pair[1] for pair in german))
    return [text[0].upper() + text[1:] + "." for text in texts]


def translate(rng: random.Random) -> Iterator[Turn]:
    to_german = rng.random() < 0.5
    say = make_speaker(rng, language="German" if to_german else "English")
    for turn in range(rng.choice([1, 2, 3])):
        kind = rng.randrange(3)  # a noun phrase, two of them, or a sentence
        if kind == 2:
            sides = make_sentence_pair(rng)
        else:
            first = make_noun_phrase(rng, NOUNS, "subject")
            last = make_noun_phrase(rng, NOUNS, "subject")
            sides = [", ".join(pair) for pair in zip(first, last)] if kind else last
        source, translated = sides if to_german else reversed(sides)
        ask = say(PHRASES["translation"])
        yield f"{say(PHRASES['next']) if turn else ask} {source}", translated


def summarise(rng: random.Random) -> Iterator[Turn]:
    name = rng.choice(NAMES)
    words = dict(name=name, she=PRONOUNS[name], a_job=add_article(rng.choice(JOBS)))
    words |= dict(city=rng.choice(CITIES), year=rng.randrange(1920, 1999))
    words |= dict(years=rng.randrange(3, 40), hobby=rng.choice(WORDS["hobbies"]))
    words |= dict(pet=rng.choice(WORDS["pets"]), prize=rng.choice(WORDS["prizes"]))
    say = make_speaker(rng, **words)
    notes = {kind: say(phrases) for kind, phrases in TABLES["notes"].items()}
    kinds = [kind for kind in notes if kind not in ("city", "job")]  # which the opening tells
    kept = sorted(rng.sample(kinds, rng.choice([2, 3, 4])), key=kinds.index)
    given = [notes[kind] for kind in ("city", "job", *kept)]
    rng.shuffle(given)
    ask = say(PHRASES["summary"])
    sentences = {kind: say(TABLES["summaries"][kind]) for kind in kinds}
    opening = say(TABLES["summaries"]["begin"])
    if rng.random() < 0.5:
        rng.shuffle(kept)
    yield f"{ask} {' '.join(given)}", " ".join([opening, *(sentences[kind] for kind in kept)])


def answer_questions(rng: random.Random) -> Iterator[Turn]:
    country = rng.choice(list(WORLD))
    facts = {kind: f"The {kind} of {country} is {fact}." for kind, fact in WORLD[country].items()}
    name = rng.choice(NAMES)
    first, second, third = rng.sample(list(facts), 3)
    say = make_speaker(rng, country=country, first=first, second=second, third=third, name=name)
    polite = say(PHRASES["polite"])
    if rng.random() < 0.5:
        yield polite + say(PHRASES["fact"]), facts[first]
    else:
        yield polite + say(PHRASES["facts"]), f"{facts[first]} {facts[second]}"
    if rng.random() < 0.6:
        yield say(PHRASES["other fact"]), facts[third]


def calculate(rng: random.Random) -> Iterator[Turn]:
    for _ in range(rng.choice([1, 2])):
        name, friend = rng.sample(NAMES, 2)
        goods = rng.choice(WORDS["goods"])
        problem, told = rng.choice(list(TABLES["problems"].items()))
        if problem == "a + b - c":
            a, b = rng.randrange(2, 13), rng.randrange(2, 13)
            c = rng.randrange(1, a + b)
            steps = [f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}"]
        elif problem == "a * b + c":
            a, b, c = rng.randrange(2, 6), rng.randrange(2, 6), rng.randrange(1, 10)
            steps = [f"{a} * {b} = {a * b}", f"{a * b} + {c} = {a * b + c}"]
        elif problem == "a - b - c":
            a = rng.randrange(6, 25)
            b = rng.randrange(1, a - 2)
            c = rng.randrange(1, a - b)
            steps = [f"{a} - {b} = {a - b}", f"{a - b} - {c} = {a - b - c}"]
        else:
            a, b, c = rng.randrange(2, 13), rng.randrange(1, 10), 0
            steps = [f"{a} + {b} = {a + b}", f"{a} + {a + b} = {2 * a + b}"]
        words = dict(name=name, friend=friend, goods=goods, she=PRONOUNS[name])
        say = make_speaker(rng, a=a, b=b, c=c, **words)
        question = f"{say(told)} {say(PHRASES['how many'])}"
        answer = f"So the answer is {steps[1].split()[-1]} {goods}."
        yield question, f"First, {steps[0]}. Then, {steps[1]}. {answer}"


def retrieve(rng: random.Random) -> Iterator[Turn]:
    people = {}
    context = []
    for name in rng.sample(NAMES, rng.choice([2, 3])):
        person = dict(name=name, city=rng.choice(CITIES), a_job=add_article(rng.choice(JOBS)))
        people[name] = person | {"age": rng.randrange(20, 70)}
        say = make_speaker(rng, **people[name])
        context.append(say(PHRASES["person"]))
    before = f"{rng.choice(PHRASES['context'])} {' '.join(context)} Question: "
    about = TABLES["about person"]
    pairs = [(name, answer) for name in people for answer in about]
    for name, answer in rng.sample(pairs, rng.choice([1, 2, 3])):
        say = make_speaker(rng, **people[name])
        questions = {each: say(phrases) for each, phrases in about.items()}
        yield before + questions[answer], answer.format(**people[name])
        before = ""


MAKERS = {
    "mt_bench": talk,
    "translation": translate,
    "summarization": summarise,
    "qa": answer_questions,
    "math_reasoning": calculate,
    "rag": retrieve,
}
GROUPS = tuple(MAKERS)


def conversations(seed: int, split: str, groups: Sequence[str] = GROUPS) -> Iterator[list[Turn]]:
    """Endless stream of conversations for ``split`` "train" or "held-out".

    A first question belongs to one split for ever, by its checksum, so no held-out prompt can occur
    in training whatever the seeds; the two splits draw from different seeds as well.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        turns = list(MAKERS[rng.choice(groups)](rng))
        question, _ = turns[0]
        held_out = zlib.crc32(question.encode()) % 16 == 0
        if held_out == (split == "held-out"):
            yield turns
