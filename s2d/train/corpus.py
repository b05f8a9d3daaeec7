"""The text the miniature models learn: seeded conversations in the six task groups of Spec-Bench.

Four groups have one right answer (translation, qa, math_reasoning, rag): whoever knows the rules can compute it from
the prompt. Two are open (mt_bench: stories, advice and talk about them; summarization): many answers are good, and the
choice of words is what a draft cannot foresee. ``python -m s2d.train.corpus`` prints a few examples.
"""

import random
import zlib
from dataclasses import dataclass

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
EXACT_GROUPS = ("translation", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Conversation:
    """``turns`` holds (question, answer) pairs; ``group`` is one of GROUPS."""

    group: str
    turns: tuple[tuple[str, str], ...]


def conversations(seed, split, groups=GROUPS):
    """Endless stream of conversations for ``split`` "train" or "held-out".

    A first question belongs to one split for ever, by its checksum, so no held-out prompt can occur in training
    whatever the seeds; the two splits draw from different seeds as well.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        group = rng.choice(groups)
        turns = tuple(MAKERS[group](rng))
        held_out = zlib.crc32(turns[0][0].encode()) % 16 == 0
        if held_out == (split == "held-out"):
            yield Conversation(group, turns)


# ---------------------------------------------------------------------------------------------------- shared words

NAMES = """Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tina Viktor
Alice Boris Celia Dora Erik Frida Gustav Helen Ivan Julia Kurt Lena Max Nora Oscar Petra Robin Sara Tom Wanda""".split()
WOMEN = set(
    """Anna Clara Emma Greta Ida Karin Maria Olga Rosa Tina Alice Celia Dora Frida Helen Julia Lena Nora Petra
Sara Wanda""".split()
)
JOBS = "baker doctor teacher painter farmer singer writer driver nurse lawyer pilot cook".split()


def pronoun(name):
    return "She" if name in WOMEN else "He"


def possessive(name):
    return "her" if name in WOMEN else "his"


def an(word):
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _world():
    """Thirty-two fictional countries; the same in every run, because they are what question answering has to know."""
    rng = random.Random("world")
    starts, middles = "Ba Do Ka Lu Mi No Ra Sel Ta Vor".split(), "bi da lo mu ne ra si to".split()
    country_ends, city_ends = "nia via land stan".split(), "burg ton dal mar".split()

    def coin(ends, taken):
        while (name := rng.choice(starts) + rng.choice(middles) + rng.choice(ends)) in taken:
            pass
        taken.add(name)
        return name

    taken, world = set(), {}
    for _ in range(32):
        world[coin(country_ends, taken)] = {
            "capital": coin(city_ends, taken),
            "currency": rng.choice("crown thaler florin ducat shilling guilder penny mark".split()),
            "national animal": rng.choice(
                "bear eagle wolf lion stag otter heron lynx swan fox".split()
            ),
            "main export": rng.choice(
                "wool copper wine timber salt honey silk cheese glass tea".split()
            ),
        }
    return world


WORLD = _world()
CITIES = [facts["capital"] for facts in WORLD.values()][:16]


# ------------------------------------------------------------------------------------------- mt_bench: stories, talk

HEROES = (
    "fox girl boy robot baker bear sailor cat princess knight painter mouse farmer dragon".split()
)
TRAITS = "brave curious shy clever gentle lonely cheerful stubborn patient careless".split()
PLACES = ["a deep forest", "a small village", "an old castle", "a quiet harbour", "a city of glass", "a snowy valley",
          "a house by the sea", "a green hill", "a lighthouse", "a busy market town"]  # fmt: skip
THINGS = ["a silver key", "an old map", "a tiny lamp", "a strange stone", "a golden feather", "a broken clock",
          "a letter without a name", "a wooden flute", "a blue button", "a box of seeds"]  # fmt: skip
FRIENDS = ["a wise owl", "an old sailor", "a talking frog", "a little girl", "a tired wizard", "a kind baker",
           "a young wolf", "a clockmaker"]  # fmt: skip
TROUBLES = ["a storm broke the bridge", "the river rose over the fields", "all the lights went out",
            "the winter came too early", "a thief took the bread", "the well ran dry", "a fog hid every path",
            "the bells stopped ringing"]  # fmt: skip
DEEDS = ["built a new one in three days", "asked everyone for help", "followed the light to the end of the valley",
         "sang until the morning came", "gave away the last piece of bread", "waited and listened",
         "climbed the highest tower", "found the hidden door"]  # fmt: skip
LESSONS = ["a friend is worth more than gold", "small steps lead far", "it is good to ask for help",
           "patience opens every door", "kindness comes back", "courage grows when it is shared"]  # fmt: skip


def _story(rng):
    name, hero, trait = rng.choice(NAMES), rng.choice(HEROES), rng.choice(TRAITS)
    place, thing, friend = rng.choice(PLACES), rng.choice(THINGS), rng.choice(FRIENDS)
    trouble, deed, lesson = rng.choice(TROUBLES), rng.choice(DEEDS), rng.choice(LESSONS)
    she, her = pronoun(name), possessive(name)
    ask = rng.choice(["Tell me a story about", "Write a short story about", "Can you tell me a tale about",
                      "I would like a story about", "Please make up a story about"])  # fmt: skip
    question = (
        f"{ask} {an(hero)} called {name}"
        + rng.choice(["", f" who lives in {place}", f" and {thing}"])
        + "."
    )
    bare_thing = thing.split(" ", 1)[1]
    story = [
        rng.choice([f"Once upon a time there was {an(trait)} {hero} called {name} who lived in {place}.",
                    f"In {place} there lived {an(trait)} {hero} whose name was {name}.",
                    f"Long ago, {name} the {trait} {hero} lived in {place}."]),
        rng.choice([f"One morning {she.lower()} found {thing} under a tree.",
                    f"One day {she.lower()} discovered {thing} on the way home.",
                    f"Nobody knew that {she.lower()} kept {thing} under {her} bed."]),
        rng.choice([f"On the road {she.lower()} met {friend}.", f"Then {friend} knocked at the door.",
                    f"That evening {friend} came by and asked for a place to sleep."]),
        rng.choice([f"\"Take good care of the {bare_thing},\" said the stranger.",
                    f"\"I have looked for this {bare_thing} for years,\" said the stranger.",
                    "They talked all night and became friends.", "They shared some soup and told old stories."]),
        rng.choice([f"But the next day {trouble}.", f"Soon after that, {trouble}.", f"Then, without warning, {trouble}."]),
        rng.choice(["Everybody was afraid.", "People did not know what to do.", f"{name} was not afraid."]),
        rng.choice([f"{name} took a deep breath and {deed}.", f"So {name} {deed}.", f"Together they {deed}."]),
        rng.choice([f"In the end {name} learned that {lesson}.", f"Since that day everybody knows that {lesson}.",
                    f"And {name} never forgot that {lesson}."]),
    ]  # fmt: skip
    for line in sorted(rng.sample(range(3, 6), rng.choice([0, 1, 2])), reverse=True):
        del story[line]
    yield question, " ".join(story)
    follow_up = [
        (rng.choice([f"What did {name} find?", f"Which thing did {name} have?"]), f"{name} had {thing}."),
        (rng.choice([f"Who came to {name}?", f"Who did {name} meet?"]), f"{name} met {friend}."),
        (rng.choice(["Where does the story take place?", f"Where did {name} live?"]), f"{name} lived in {place}."),
        (rng.choice(["What is the moral?", "What can we learn from it?"]), f"We can learn that {lesson}."),
        (rng.choice(["Give the story a title.", "What could be a title for it?"]),
         rng.choice([f"{name} and the {bare_thing.title()}", f"The {trait.title()} {hero.title()}",
                     f"The Secret of the {bare_thing.title()}"])),
    ]  # fmt: skip
    yield from rng.sample(follow_up, rng.choice([1, 2]))


ADVICE = {
    "a long trip": ["pack a warm coat", "make a list of what you need", "check the weather", "charge your phone",
                    "leave a key with a friend", "take some water and bread", "look at a map before you go"],
    "an exam": ["start early", "sleep well the night before", "read your notes aloud", "take short breaks",
                "explain the topic to a friend", "try some old questions", "eat a good breakfast"],
    "a new garden": ["choose a sunny place", "start with easy plants", "water it in the morning", "feed the soil",
                     "plant some flowers for the bees", "keep your tools clean", "pull out the weeds every week"],
    "a dinner with guests": ["ask what your guests like", "cook something you know well", "set the table early",
                             "prepare the dessert the day before", "put on some quiet music", "light a few candles",
                             "do not worry about small mistakes"],
    "a job interview": ["read about the company", "prepare three good questions", "arrive ten minutes early",
                        "wear clean shoes", "tell a short story about your work", "look people in the eye",
                        "send a note of thanks"],
    "a quiet weekend": ["turn off your phone", "go for a walk in the park", "read an old book", "bake some bread",
                        "call a good friend", "sleep as long as you like", "visit a small museum"],
}  # fmt: skip


def _advice(rng):
    topic = rng.choice(list(ADVICE))
    name, count = rng.choice(NAMES), rng.choice([3, 4, 5])
    question = rng.choice([f"My friend {name} plans {topic}. What are {count} good ideas?",
                           f"I am {name}. Please give me {count} tips for {topic}.",
                           f"How should {name} prepare for {topic}? Name {count} things.",
                           f"{name} needs advice about {topic}. List {count} points."])  # fmt: skip
    tips = rng.sample(ADVICE[topic], count)
    opening = rng.choice(
        ["Of course!", "Here are some ideas:", f"For {topic} I would suggest this:", "Gladly:"]
    )
    lines = [f"{number}. {tip[0].upper()}{tip[1:]}." for number, tip in enumerate(tips, 1)]
    yield question, "\n".join([opening, *lines])
    pick = rng.randrange(count)
    order = ["first", "second", "third", "fourth", "fifth"][pick]
    yield (
        rng.choice([f"What was the {order} one?", f"Can you repeat the {order} point?"]),
        (f"The {order} point was: {tips[pick]}."),
    )


def _talk(rng):
    yield from rng.choice([_story, _story, _advice])(rng)


# ------------------------------------------------------------------------------------------------------- translation

# English, German, gender. The first seven can be subjects.
NOUNS = [("man", "Mann", "m"), ("woman", "Frau", "f"), ("child", "Kind", "n"), ("dog", "Hund", "m"),
         ("cat", "Katze", "f"), ("teacher", "Lehrer", "m"), ("girl", "Mädchen", "n"), ("book", "Buch", "n"),
         ("apple", "Apfel", "m"), ("flower", "Blume", "f"), ("letter", "Brief", "m"), ("lamp", "Lampe", "f"),
         ("house", "Haus", "n"), ("picture", "Bild", "n")]  # fmt: skip
VERBS = [("sees", "sieht"), ("loves", "liebt"), ("finds", "findet"), ("buys", "kauft"), ("carries", "trägt"),
         ("takes", "nimmt"), ("brings", "bringt"), ("needs", "braucht")]  # fmt: skip
ADJECTIVES = [("old", "alt"), ("young", "jung"), ("small", "klein"), ("big", "groß"), ("tired", "müd"), ("new", "neu"),
              ("strong", "stark"), ("quiet", "still")]  # fmt: skip
WHERE = [("in the garden", "im Garten"), ("in the kitchen", "in der Küche"), ("at the market", "auf dem Markt"),
         ("at home", "zu Hause"), ("by the river", "am Fluss")]  # fmt: skip
WHEN = [
    ("Today", "Heute"),
    ("Every day", "Jeden Tag"),
    ("In the evening", "Am Abend"),
    ("Now", "Jetzt"),
]
# German articles and adjective endings by (case, definite, gender).
ARTICLES = {("nom", True): dict(m="der", f="die", n="das"), ("acc", True): dict(m="den", f="die", n="das"),
            ("nom", False): dict(m="ein", f="eine", n="ein"), ("acc", False): dict(m="einen", f="eine", n="ein")}  # fmt: skip
ENDINGS = {("nom", True): dict(m="e", f="e", n="e"), ("acc", True): dict(m="en", f="e", n="e"),
           ("nom", False): dict(m="er", f="e", n="es"), ("acc", False): dict(m="en", f="e", n="es")}  # fmt: skip


def _noun_phrase(rng, nouns, case):
    (english, german, gender), definite = rng.choice(nouns), rng.random() < 0.6
    article = ARTICLES[case, definite][gender]
    if rng.random() < 0.4:
        adjective, stem = rng.choice(ADJECTIVES)
        english, german = (
            f"{adjective} {english}",
            f"{stem}{ENDINGS[case, definite][gender]} {german}",
        )
    return (f"the {english}" if definite else an(english)), f"{article} {german}"


def _sentence_pair(rng):
    subject, german_subject = _noun_phrase(rng, NOUNS[:7], "nom")
    verb, german_verb = rng.choice(VERBS)
    thing, german_thing = _noun_phrase(rng, NOUNS, "acc")
    where, german_where = rng.choice(WHERE) if rng.random() < 0.3 else ("", "")
    if rng.random() < 0.3:  # an adverb in front moves the German subject behind the verb
        when, german_when = rng.choice(WHEN)
        english, german = (
            [when, subject, verb, thing],
            [german_when, german_verb, german_subject, german_thing],
        )
    else:
        english, german = [subject, verb, thing], [german_subject, german_verb, german_thing]
    english, german = " ".join(english + [where]).strip(), " ".join(german + [german_where]).strip()
    return english[0].upper() + english[1:] + ".", german[0].upper() + german[1:] + "."


def _pairs(rng):
    """What one request asks for: one noun phrase, two of them, or a sentence."""
    kind = rng.randrange(3)
    if kind == 2:
        return [_sentence_pair(rng)]
    first, last = _noun_phrase(rng, NOUNS, "nom"), _noun_phrase(rng, NOUNS, "nom")
    return [tuple(f"{side}," for side in first), last] if kind == 1 else [last]


def _translation(rng):
    to_german = rng.random() < 0.5
    language = "German" if to_german else "English"
    for turn in range(rng.choice([1, 2, 3])):
        pairs = _pairs(rng)
        source, translated = (
            " ".join(pair[side] for pair in pairs) for side in ((0, 1) if to_german else (1, 0))
        )
        ask = rng.choice([f"Translate into {language}:", f"What is this in {language}?", f"Say it in {language}:",
                          f"Please translate the following into {language}.", f"Give me the {language} for this:"])  # fmt: skip
        yield (
            f"{ask if turn == 0 else rng.choice(['And this:', 'Next:', 'Now this one:'])} {source}",
            translated,
        )


# ----------------------------------------------------------------------------------------------------- summarization


def _summary(rng):
    name, job, city = rng.choice(NAMES), rng.choice(JOBS), rng.choice(CITIES)
    year, years = rng.randrange(1920, 1999), rng.randrange(3, 40)
    hobby = rng.choice("chess swimming music reading painting dancing hiking fishing".split())
    pet, prize = (
        rng.choice("dog cat parrot horse rabbit".split()),
        rng.choice("gold silver bronze".split()),
    )
    she = pronoun(name)
    facts = [
        rng.choice([f"{name} was born in {city}.", f"{city} is the home town of {name}."]),
        rng.choice([f"{she} works as {an(job)}.", f"{name} is {an(job)}."]),
        rng.choice([f"The year of birth was {year}.", f"{name} was born in {year}."]),
        rng.choice(
            [
                f"{name} has done this work for {years} years.",
                f"{she} started the job {years} years ago.",
            ]
        ),
        rng.choice([f"{she} likes {hobby}.", f"In the evening it is time for {hobby}."]),
        rng.choice([f"A {pet} lives in the house.", f"{name} has a {pet}."]),
        rng.choice([f"{name} won a {prize} medal.", f"There is a {prize} medal on the wall."]),
    ]
    kept = sorted(rng.sample(range(2, 7), rng.choice([2, 3, 4])))
    given = [facts[index] for index in [0, 1] + kept]
    rng.shuffle(given)
    ask = rng.choice(["Summarize these facts:", "Write a summary of this:", "Please sum up the following notes.",
                      "Make a short text of these notes:"])  # fmt: skip
    sentences = {
        2: rng.choice([f"{she} was born in {year}.", f"The year of birth is {year}."]),
        3: rng.choice(
            [f"{she} has worked for {years} years.", f"That work has lasted {years} years."]
        ),
        4: rng.choice(
            [f"In the free time {name} enjoys {hobby}.", f"A favourite hobby is {hobby}."]
        ),
        5: rng.choice([f"{name} shares the house with a {pet}.", f"{she} keeps a {pet}."]),
        6: rng.choice([f"{she} has a {prize} medal.", f"Once {name} won {prize}."]),
    }
    opening = rng.choice([f"{name} is {an(job)} from {city}.", f"{name}, {an(job)}, comes from {city}.",
                          f"The text is about {name}, {an(job)} from {city}."])  # fmt: skip
    if rng.random() < 0.5:
        rng.shuffle(kept)
    yield f"{ask} {' '.join(given)}", " ".join([opening] + [sentences[index] for index in kept])


# ----------------------------------------------------------------------------------------------------------------- qa


def _fact(country, attribute):
    value = WORLD[country][attribute]
    return f"The {attribute} of {country} is {value if attribute in ('capital', 'main export') else 'the ' + value}."


def _qa(rng):
    country, name = rng.choice(list(WORLD)), rng.choice(NAMES)
    first, second, third = rng.sample(list(WORLD[country]), 3)
    polite = rng.choice(
        [
            "",
            "Please tell me: ",
            f"My name is {name}. ",
            f"{name} asks: ",
            "A question: ",
            "Quick one: ",
        ]
    )
    if rng.random() < 0.5:
        question = rng.choice([f"What is the {first} of {country}?", f"Do you know the {first} of {country}?",
                               f"Name the {first} of {country}.", f"{country} has which {first}?"])  # fmt: skip
        yield polite + question, _fact(country, first)
    else:
        question = rng.choice([f"What are the {first} and the {second} of {country}?",
                               f"Tell me the {first} and the {second} of {country}.",
                               f"I want to know two things about {country}: its {first} and its {second}."])  # fmt: skip
        yield polite + question, f"{_fact(country, first)} {_fact(country, second)}"
    if rng.random() < 0.6:
        yield rng.choice([f"And the {third}?", f"What about the {third}?"]), _fact(country, third)


# ----------------------------------------------------------------------------------------------------- math_reasoning

GOODS = "apples pens books coins cards eggs stamps shells nuts candles".split()


def _problem(rng):
    name, friend = rng.sample(NAMES, 2)
    goods, she = rng.choice(GOODS), pronoun(name)
    kind = rng.randrange(4)
    if kind == 0:  # a + b - c
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        c = rng.randrange(1, a + b)
        story = rng.choice([f"{name} has {a} {goods}. {she} buys {b} more and gives {c} to {friend}.",
                            f"{name} owns {a} {goods} and finds another {b}. Then {friend} takes {c} of them."])  # fmt: skip
        first, second, total = f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}", a + b - c
    elif kind == 1:  # a * b + c
        a, b, c = rng.randrange(2, 6), rng.randrange(2, 6), rng.randrange(1, 10)
        story = rng.choice([f"{name} has {a} boxes with {b} {goods} each and {c} single ones.",
                            f"There are {b} {goods} in each of {a} bags. {name} adds {c} to them."])  # fmt: skip
        first, second, total = f"{a} * {b} = {a * b}", f"{a * b} + {c} = {a * b + c}", a * b + c
    elif kind == 2:  # a - b - c
        a = rng.randrange(6, 25)
        b = rng.randrange(1, a - 2)
        c = rng.randrange(1, a - b)
        story = rng.choice([f"{name} had {a} {goods}. {she} lost {b} and sold {c} to {friend}.",
                            f"Of {a} {goods}, {name} gives {b} to {friend} and {c} to a teacher."])  # fmt: skip
        first, second, total = f"{a} - {b} = {a - b}", f"{a - b} - {c} = {a - b - c}", a - b - c
    else:  # a + (a + b)
        a, b = rng.randrange(2, 13), rng.randrange(1, 10)
        story = rng.choice([f"{name} has {a} {goods}. {friend} has {b} more than {name}. They put them together.",
                            f"{friend} has {b} more {goods} than {name}, who has {a}. They share them all."])  # fmt: skip
        first, second, total = f"{a} + {b} = {a + b}", f"{a} + {a + b} = {2 * a + b}", 2 * a + b
    ask = rng.choice(
        [
            f"How many {goods} are there now?",
            f"How many {goods} is that in the end?",
            f"Count the {goods}.",
        ]
    )
    return f"{story} {ask}", f"First, {first}. Then, {second}. So the answer is {total} {goods}."


def _math(rng):
    for _ in range(rng.choice([1, 2])):
        yield _problem(rng)


# ---------------------------------------------------------------------------------------------------------------- rag


def _retrieval(rng):
    people = rng.sample(NAMES, rng.choice([2, 3]))
    records, context = {}, []
    for name in people:
        record = {"city": rng.choice(CITIES), "job": rng.choice(JOBS), "age": rng.randrange(20, 70)}
        records[name] = record
        context.append(rng.choice([
            f"{name} is {record['age']} years old, lives in {record['city']} and works as {an(record['job'])}.",
            f"{name} from {record['city']} is {an(record['job'])} of {record['age']} years.",
            f"In {record['city']} lives {name}, {an(record['job'])}, who is {record['age']}.",
        ]))  # fmt: skip
    intro = rng.choice(["Use this text:", "Context:", "Read this:", "Here is what I know:"])
    asked = rng.sample(
        [(name, key) for name in people for key in ("city", "job", "age")], rng.choice([1, 2, 3])
    )
    for turn, (name, key) in enumerate(asked):
        record = records[name]
        question, answer = {
            "city": (rng.choice([f"Where does {name} live?", f"What is the city of {name}?"]),
                     f"{name} lives in {record['city']}."),
            "job": (rng.choice([f"What is the job of {name}?", f"What does {name} do?"]),
                    f"{name} works as {an(record['job'])}."),
            "age": (rng.choice([f"How old is {name}?", f"What is the age of {name}?"]),
                    f"{name} is {record['age']} years old."),
        }[key]  # fmt: skip
        yield (
            (f"{intro} {' '.join(context)} Question: {question}" if turn == 0 else question),
            answer,
        )


MAKERS = {"mt_bench": _talk, "translation": _translation, "summarization": _summary, "qa": _qa,
          "math_reasoning": _math, "rag": _retrieval}  # fmt: skip


if __name__ == "__main__":
    for group in GROUPS:
        for conversation, _ in zip(conversations(0, "held-out", [group]), range(2)):
            print(f"[{group}]")
            for question, answer in conversation.turns:
                print(f"USER: {question}\nASSISTANT: {answer}")
            print()
