"""The text the miniature models learn: seeded conversations in the six task groups of Spec-Bench.

Four groups have one right answer (EXACT_GROUPS): whoever knows the rules can compute it from the
prompt. Two are open (mt_bench: stories, advice and talk about them; summarization): many answers
are good, and the choice of words is what a draft cannot foresee.
"""

import random
import zlib
from dataclasses import dataclass
from pathlib import Path

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
EXACT_GROUPS = ("translation", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Conversation:
    """``turns`` holds (question, answer) pairs; ``group`` is one of GROUPS."""

    group: str
    turns: tuple[tuple[str, str], ...]


def conversations(seed, split, groups=GROUPS):
    """Endless stream of conversations for ``split`` "train" or "held-out".

    A first question belongs to one split for ever, by its checksum, so no held-out prompt can occur
    in training whatever the seeds; the two splits draw from different seeds as well.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        group = rng.choice(groups)
        turns = tuple(MAKERS[group](rng))
        held_out = zlib.crc32(turns[0][0].encode()) % 16 == 0
        if held_out == (split == "held-out"):
            yield Conversation(group, turns)


def read_tables():
    """{title: {kind: its phrases}} of phrases.txt; " / " is between phrases."""
    tables, text = {}, Path(__file__).with_name("phrases.txt").read_text(encoding="utf-8")
    for section in text.strip().split("\n\n"):
        title, *lines = section.split("\n")
        pairs = (line.split(": ", 1) for line in lines)
        tables[title.strip("[]")] = {kind: phrases.split(" / ") for kind, phrases in pairs}
    return tables


TABLES = read_tables()
PHRASES, WORDS = TABLES["phrases"], TABLES["words"]
NAMES, WOMEN, JOBS = WORDS["names"], WORDS["women"], WORDS["jobs"]
NOUNS = [noun.split() for noun in WORDS["nouns"]]  # the first seven can be subjects
# Thirty-two fictional countries: what question answering must know.
_, *ATTRIBUTES = TABLES["world"]
WORLD = {name: dict(zip(ATTRIBUTES, facts)) for name, *facts in zip(*TABLES["world"].values())}
CITIES = TABLES["world"]["capital"][:16]


def speaker(rng, **words):
    """A function that says one of several phrases, at random, with ``words`` filled in."""
    return lambda phrases: rng.choice(phrases).format(**words)


def pronoun(name):
    return "She" if name in WOMEN else "He"


def an(word):
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _story(rng):
    words = {"name": rng.choice(NAMES)}
    words |= {kind: rng.choice(phrases) for kind, phrases in TABLES["story"].items()}
    name, hero, trait, place, thing, *_ = words.values()
    she, bare = pronoun(name).lower(), thing.split(" ", 1)[1]
    words |= {"she": she, "her": "her" if she == "she" else "his"}
    words |= {"bare_thing": bare, "a_trait": an(trait)}
    words |= {kind.title(): word.title() for kind, word in words.items()}
    say = speaker(rng, **words)
    ask = f"{say(PHRASES['story'])} {an(hero)} called {name}"
    more = rng.choice(["", f" who lives in {place}", f" and {thing}"])
    story = [say(part) for part in TABLES["plot"].values()]
    left_out = rng.sample(range(3, 6), rng.choice([0, 1, 2]))
    told = (sentence for number, sentence in enumerate(story) if number not in left_out)
    yield f"{ask}{more}.", " ".join(told)
    about = TABLES["about story"].items()
    turns = [(say(questions), answer.format(**words)) for answer, questions in about]
    turns.append((say(PHRASES["about title"]), say(PHRASES["title"])))
    yield from rng.sample(turns, rng.choice([1, 2]))


def _advice(rng):
    advice = TABLES["advice"]
    topic, name, count = rng.choice(list(advice)), rng.choice(NAMES), rng.choice([3, 4, 5])
    say = speaker(rng, name=name, count=count, topic=topic)
    question, tips = say(PHRASES["advice"]), rng.sample(advice[topic], count)
    lines = [f"{number}. {tip[0].upper()}{tip[1:]}." for number, tip in enumerate(tips, 1)]
    yield question, "\n".join([say(PHRASES["gladly"]), *lines])
    pick = rng.randrange(count)
    order = "first second third fourth fifth".split()[pick]
    yield speaker(rng, order=order)(PHRASES["again"]), f"The {order} point was: {tips[pick]}."


def _talk(rng):
    yield from rng.choice([_story, _story, _advice])(rng)


def _noun_phrase(rng, nouns, role):
    """In English and in German; ``role`` is "subject" or "object"."""
    english, german, gender = rng.choice(nouns)
    determiner = "the" if rng.random() < 0.6 else "a"
    forms = TABLES["articles and endings"][f"{determiner}, {role}"]
    article, ending = forms["mfn".index(gender)].split()
    if rng.random() < 0.4:
        adjective, stem = rng.choice(WORDS["adjectives"]).split()
        english, german = f"{adjective} {english}", f"{stem}{ending} {german}"
    return (an(english) if determiner == "a" else f"the {english}"), f"{article} {german}"


def _sentence_pair(rng):
    subject, verb = _noun_phrase(rng, NOUNS[:7], "subject"), rng.choice(WORDS["verbs"]).split()
    thing = _noun_phrase(rng, NOUNS, "object")
    where = [rng.choice(WORDS["where"]).split(" = ")] if rng.random() < 0.3 else []
    english = german = [subject, verb, thing, *where]
    if rng.random() < 0.3:  # an adverb in front moves the German subject behind the verb
        when = rng.choice(WORDS["when"]).split(" = ")
        english, german = [when, *english], [when, verb, subject, thing, *where]
    texts = " ".join(pair[0] for pair in english), " ".join(pair[1] for pair in german)
    return [text[0].upper() + text[1:] + "." for text in texts]


def _translation(rng):
    to_german = rng.random() < 0.5
    say = speaker(rng, language="German" if to_german else "English")
    for turn in range(rng.choice([1, 2, 3])):
        kind = rng.randrange(3)  # a noun phrase, two of them, or a sentence
        if kind == 2:
            sides = _sentence_pair(rng)
        else:
            first, last = (_noun_phrase(rng, NOUNS, "subject") for _ in range(2))
            sides = [", ".join(pair) for pair in zip(first, last)] if kind else last
        source, translated = sides if to_german else reversed(sides)
        ask = say(PHRASES["translation"])
        yield f"{say(PHRASES['next']) if turn else ask} {source}", translated


def _summary(rng):
    words = {"name": rng.choice(NAMES), "a_job": an(rng.choice(JOBS)), "city": rng.choice(CITIES)}
    words |= {"year": rng.randrange(1920, 1999), "years": rng.randrange(3, 40)}
    words |= {"hobby": rng.choice(WORDS["hobbies"]), "pet": rng.choice(WORDS["pets"])}
    words |= {"prize": rng.choice(["gold", "silver", "bronze"]), "she": pronoun(words["name"])}
    say = speaker(rng, **words)
    notes = [say(note) for note in TABLES["notes"].values()]
    kept = sorted(rng.sample(range(2, 7), rng.choice([2, 3, 4])))
    given = [notes[index] for index in [0, 1, *kept]]
    rng.shuffle(given)
    ask, (begin, *others) = say(PHRASES["summary"]), TABLES["summaries"].values()
    sentences = [say(other) for other in others]
    opening = say(begin)
    if rng.random() < 0.5:
        rng.shuffle(kept)
    yield f"{ask} {' '.join(given)}", " ".join([opening, *(sentences[i - 2] for i in kept)])


def _fact(country, attribute):
    the = "" if attribute in ("capital", "main export") else "the "
    return f"The {attribute} of {country} is {the}{WORLD[country][attribute]}."


def _qa(rng):
    country, name = rng.choice(list(WORLD)), rng.choice(NAMES)
    first, second, third = rng.sample(list(WORLD[country]), 3)
    say = speaker(rng, country=country, first=first, second=second, third=third, name=name)
    polite = say(["", *(f"{each} " for each in PHRASES["polite"])])
    if rng.random() < 0.5:
        yield polite + say(PHRASES["fact"]), _fact(country, first)
    else:
        yield polite + say(PHRASES["facts"]), f"{_fact(country, first)} {_fact(country, second)}"
    if rng.random() < 0.6:
        yield say(PHRASES["other fact"]), _fact(country, third)


def _math(rng):
    for _ in range(rng.choice([1, 2])):
        (name, friend), goods = rng.sample(NAMES, 2), rng.choice(WORDS["goods"])
        (problem, told), number, c = rng.choice(list(TABLES["problems"].items())), rng.randrange, 0
        if problem == "a + b - c":
            a, b = number(2, 13), number(2, 13)
            c = number(1, a + b)
            steps = f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}"
        elif problem == "a * b + c":
            a, b, c = number(2, 6), number(2, 6), number(1, 10)
            steps = f"{a} * {b} = {a * b}", f"{a * b} + {c} = {a * b + c}"
        elif problem == "a - b - c":
            a = number(6, 25)
            b = number(1, a - 2)
            c = number(1, a - b)
            steps = f"{a} - {b} = {a - b}", f"{a - b} - {c} = {a - b - c}"
        else:
            a, b = number(2, 13), number(1, 10)
            steps = f"{a} + {b} = {a + b}", f"{a} + {a + b} = {2 * a + b}"
        say = speaker(rng, name=name, friend=friend, goods=goods, she=pronoun(name), a=a, b=b, c=c)
        question = f"{say(told)} {say(PHRASES['how many'])}"
        answer = f"So the answer is {steps[1].split()[-1]} {goods}."
        yield question, f"First, {steps[0]}. Then, {steps[1]}. {answer}"


def _retrieval(rng):
    people, context = {}, []
    for name in rng.sample(NAMES, rng.choice([2, 3])):
        city, job, age = rng.choice(CITIES), rng.choice(JOBS), rng.randrange(20, 70)
        people[name] = dict(name=name, city=city, a_job=an(job), age=age)
        context.append(speaker(rng, **people[name])(PHRASES["person"]))
    before = f"{rng.choice(PHRASES['context'])} {' '.join(context)} Question: "
    about = TABLES["about person"]
    pairs = [(name, answer) for name in people for answer in about]
    for name, answer in rng.sample(pairs, rng.choice([1, 2, 3])):
        say = speaker(rng, **people[name])
        questions = {each: say(phrases) for each, phrases in about.items()}
        yield before + questions[answer], answer.format(**people[name])
        before = ""


MAKERS = dict(zip(GROUPS, (_talk, _translation, _summary, _qa, _math, _retrieval)))
