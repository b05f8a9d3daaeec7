"""The text the miniature models learn: seeded conversations in the six task groups of Spec-Bench.

Four groups have one right answer (translation, qa, math_reasoning, rag): whoever knows the rules
can compute it from the prompt. Two are open (mt_bench: stories, advice and talk about them;
summarization): many answers are good, and the choice of words is what a draft cannot foresee.
Knows nothing about tokens. ``python -m s2d.train.corpus`` prints a few examples.
"""

import random
import zlib
from dataclasses import dataclass
from functools import cache

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


# ------------------------------------------------------------------------ shared words and ways


@cache
def phrases(text):
    """The lines of a text, or what " / " divides."""
    return [line.strip() for line in text.replace(" / ", "\n").strip().split("\n")]


def speaker(rng, **words):
    """A function that says one of the phrases of a text, at random, with ``words`` filled in."""
    return lambda text: rng.choice(phrases(text)).format(**words)


NAMES = """Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa
    Simon Tina Viktor Alice Boris Celia Dora Erik Frida Gustav Helen Ivan Julia Kurt Lena Max Nora
    Oscar Petra Robin Sara Tom Wanda""".split()
WOMEN = """Anna Clara Emma Greta Ida Karin Maria Olga Rosa Tina Alice Celia Dora Frida Helen Julia
    Lena Nora Petra Sara Wanda""".split()
JOBS = "baker doctor teacher painter farmer singer writer driver nurse lawyer pilot cook".split()


def pronoun(name):
    return "She" if name in WOMEN else "He"


def an(word):
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _world():
    """Thirty-two fictional countries, the same in every run: what question answering must know."""
    rng, taken, world = random.Random("world"), set(), {}

    def coin(ends):
        starts, middles = "Ba Do Ka Lu Mi No Ra Sel Ta Vor", "bi da lo mu ne ra si to"
        name = "".join(rng.choice(parts.split()) for parts in (starts, middles, ends))
        if name in taken:
            return coin(ends)
        taken.add(name)
        return name

    kinds = {
        "currency": "crown thaler florin ducat shilling guilder penny mark",
        "national animal": "bear eagle wolf lion stag otter heron lynx swan fox",
        "main export": "wool copper wine timber salt honey silk cheese glass tea",
    }
    for _ in range(32):
        # The capital is coined before its country.
        facts = {"capital": coin("burg ton dal mar")}
        facts |= {attribute: rng.choice(words.split()) for attribute, words in kinds.items()}
        world[coin("nia via land stan")] = facts
    return world


WORLD = _world()
CITIES = [facts["capital"] for facts in WORLD.values()][:16]


# --------------------------------------------------------------------- mt_bench: stories, talk

STORY = {
    "name": "\n".join(NAMES),
    "hero": """fox / girl / boy / robot / baker / bear / sailor / cat / princess / knight / painter
        mouse / farmer / dragon""",
    "trait": """brave / curious / shy / clever / gentle / lonely / cheerful / stubborn / patient
        careless""",
    "place": """a deep forest / a small village / an old castle / a quiet harbour / a city of glass
        a snowy valley / a house by the sea / a green hill / a lighthouse / a busy market town""",
    "thing": """a silver key / an old map / a tiny lamp / a strange stone / a golden feather
        a broken clock / a letter without a name / a wooden flute / a blue button
        a box of seeds""",
    "friend": """a wise owl / an old sailor / a talking frog / a little girl / a tired wizard
        a kind baker / a young wolf / a clockmaker""",
    "trouble": """a storm broke the bridge / the river rose over the fields
        all the lights went out / the winter came too early / a thief took the bread
        the well ran dry / a fog hid every path / the bells stopped ringing""",
    "deed": """built a new one in three days / asked everyone for help
        followed the light to the end of the valley / sang until the morning came
        gave away the last piece of bread / waited and listened / climbed the highest tower
        found the hidden door""",
    "lesson": """a friend is worth more than gold / small steps lead far
        it is good to ask for help / patience opens every door / kindness comes back
        courage grows when it is shared""",
}
ASK_STORY = """Tell me a story about / Write a short story about / Can you tell me a tale about
    I would like a story about / Please make up a story about"""
PLOT = """
    Once upon a time there was {a_trait} {hero} called {name} who lived in {place}.
    In {place} there lived {a_trait} {hero} whose name was {name}.
    Long ago, {name} the {trait} {hero} lived in {place}.

    One morning {she} found {thing} under a tree.
    One day {she} discovered {thing} on the way home.
    Nobody knew that {she} kept {thing} under {her} bed.

    On the road {she} met {friend}. / Then {friend} knocked at the door.
    That evening {friend} came by and asked for a place to sleep.

    "Take good care of the {bare_thing}," said the stranger.
    "I have looked for this {bare_thing} for years," said the stranger.
    They talked all night and became friends. / They shared some soup and told old stories.

    But the next day {trouble}. / Soon after that, {trouble}. / Then, without warning, {trouble}.

    Everybody was afraid. / People did not know what to do. / {name} was not afraid.

    {name} took a deep breath and {deed}. / So {name} {deed}. / Together they {deed}.

    In the end {name} learned that {lesson}. / Since that day everybody knows that {lesson}.
    And {name} never forgot that {lesson}."""
FOLLOW_UP = (
    ("What did {name} find? / Which thing did {name} have?", "{name} had {thing}."),
    ("Who came to {name}? / Who did {name} meet?", "{name} met {friend}."),
    ("Where does the story take place? / Where did {name} live?", "{name} lived in {place}."),
    ("What is the moral? / What can we learn from it?", "We can learn that {lesson}."),
)
ASK_TITLE = "Give the story a title. / What could be a title for it?"


def _story(rng):
    words = {key: rng.choice(phrases(text)) for key, text in STORY.items()}
    name, hero, trait, place, thing, *_ = words.values()
    she, bare = pronoun(name).lower(), thing.split(" ", 1)[1]
    words |= {"she": she, "her": "her" if she == "she" else "his", "bare_thing": bare}
    words |= {"a_trait": an(trait)}
    say = speaker(rng, **words)
    ask = f"{say(ASK_STORY)} {an(hero)} called {name}"
    more = rng.choice(["", f" who lives in {place}", f" and {thing}"])
    story = [say(part) for part in PLOT.split("\n\n")]
    for line in sorted(rng.sample(range(3, 6), rng.choice([0, 1, 2])), reverse=True):
        del story[line]
    yield f"{ask}{more}.", " ".join(story)
    titles = [f"{name} and the {bare.title()}", f"The {trait.title()} {hero.title()}"]
    titles.append(f"The Secret of the {bare.title()}")
    follow_up = [(say(question), answer.format(**words)) for question, answer in FOLLOW_UP]
    follow_up.append((say(ASK_TITLE), rng.choice(titles)))
    yield from rng.sample(follow_up, rng.choice([1, 2]))


ADVICE = {
    "a long trip": """pack a warm coat / make a list of what you need / check the weather
        charge your phone / leave a key with a friend / take some water and bread
        look at a map before you go""",
    "an exam": """start early / sleep well the night before / read your notes aloud
        take short breaks / explain the topic to a friend / try some old questions
        eat a good breakfast""",
    "a new garden": """choose a sunny place / start with easy plants / water it in the morning
        feed the soil / plant some flowers for the bees / keep your tools clean
        pull out the weeds every week""",
    "a dinner with guests": """ask what your guests like / cook something you know well
        set the table early / prepare the dessert the day before / put on some quiet music
        light a few candles / do not worry about small mistakes""",
    "a job interview": """read about the company / prepare three good questions
        arrive ten minutes early / wear clean shoes / tell a short story about your work
        look people in the eye / send a note of thanks""",
    "a quiet weekend": """turn off your phone / go for a walk in the park / read an old book
        bake some bread / call a good friend / sleep as long as you like / visit a small museum""",
}
ASK_ADVICE = """My friend {name} plans {topic}. What are {count} good ideas?
    I am {name}. Please give me {count} tips for {topic}.
    How should {name} prepare for {topic}? Name {count} things.
    {name} needs advice about {topic}. List {count} points."""
GLADLY = "Of course! / Here are some ideas: / For {topic} I would suggest this: / Gladly:"


def _advice(rng):
    topic = rng.choice(list(ADVICE))
    name, count = rng.choice(NAMES), rng.choice([3, 4, 5])
    say = speaker(rng, name=name, count=count, topic=topic)
    question, tips = say(ASK_ADVICE), rng.sample(phrases(ADVICE[topic]), count)
    lines = [f"{number}. {tip[0].upper()}{tip[1:]}." for number, tip in enumerate(tips, 1)]
    yield question, "\n".join([say(GLADLY), *lines])
    pick = rng.randrange(count)
    order = "first second third fourth fifth".split()[pick]
    again = rng.choice([f"What was the {order} one?", f"Can you repeat the {order} point?"])
    yield again, f"The {order} point was: {tips[pick]}."


def _talk(rng):
    yield from rng.choice([_story, _story, _advice])(rng)


# --------------------------------------------------------------------------------- translation


# English, German, gender. The first seven can be subjects.
NOUNS = """man Mann m, woman Frau f, child Kind n, dog Hund m, cat Katze f, teacher Lehrer m,
    girl Mädchen n, book Buch n, apple Apfel m, flower Blume f, letter Brief m, lamp Lampe f,
    house Haus n, picture Bild n"""
NOUNS = [tuple(noun.split()) for noun in NOUNS.split(",")]
VERBS = """sees sieht, loves liebt, finds findet, buys kauft, carries trägt, takes nimmt,
    brings bringt, needs braucht""".split(",")
ADJECTIVES = """old alt, young jung, small klein, big groß, tired müd, new neu, strong stark,
    quiet still""".split(",")
WHERE = """in the garden = im Garten / in the kitchen = in der Küche
    at the market = auf dem Markt / at home = zu Hause / by the river = am Fluss"""
WHEN = "Today = Heute / Every day = Jeden Tag / In the evening = Am Abend / Now = Jetzt"
# German articles and endings of adjectives by (case, definite, gender).
FORMS = {
    ("nom", True): dict(m=("der", "e"), f=("die", "e"), n=("das", "e")),
    ("acc", True): dict(m=("den", "en"), f=("die", "e"), n=("das", "e")),
    ("nom", False): dict(m=("ein", "er"), f=("eine", "e"), n=("ein", "es")),
    ("acc", False): dict(m=("einen", "en"), f=("eine", "e"), n=("ein", "es")),
}


def _noun_phrase(rng, nouns, case):
    (english, german, gender), definite = rng.choice(nouns), rng.random() < 0.6
    article, ending = FORMS[case, definite][gender]
    if rng.random() < 0.4:
        adjective, stem = rng.choice(ADJECTIVES).split()
        english, german = f"{adjective} {english}", f"{stem}{ending} {german}"
    return (f"the {english}" if definite else an(english)), f"{article} {german}"


def _sentence_pair(rng):
    subject, verb = _noun_phrase(rng, NOUNS[:7], "nom"), rng.choice(VERBS).split()
    thing = _noun_phrase(rng, NOUNS, "acc")
    where = [rng.choice(phrases(WHERE)).split(" = ")] if rng.random() < 0.3 else []
    english, german = [subject, verb, thing, *where], [subject, verb, thing, *where]
    if rng.random() < 0.3:  # an adverb in front moves the German subject behind the verb
        when = rng.choice(phrases(WHEN)).split(" = ")
        english, german = [when, *english], [when, verb, subject, thing, *where]
    texts = [" ".join(pair[0] for pair in english), " ".join(pair[1] for pair in german)]
    return [text[0].upper() + text[1:] + "." for text in texts]


def _pairs(rng):
    """What one request asks for: one noun phrase, two of them, or a sentence."""
    kind = rng.randrange(3)
    if kind == 2:
        return [_sentence_pair(rng)]
    first, last = _noun_phrase(rng, NOUNS, "nom"), _noun_phrase(rng, NOUNS, "nom")
    return [[f"{side}," for side in first], last] if kind == 1 else [last]


TRANSLATE = """Translate into {language}: / What is this in {language}? / Say it in {language}:
    Please translate the following into {language}. / Give me the {language} for this:"""
AND_THIS = "And this: / Next: / Now this one:"


def _translation(rng):
    to_german = rng.random() < 0.5
    say = speaker(rng, language="German" if to_german else "English")
    for turn in range(rng.choice([1, 2, 3])):
        sides = [" ".join(side) for side in zip(*_pairs(rng))]
        source, translated = sides if to_german else reversed(sides)
        ask = say(TRANSLATE)
        yield f"{say(AND_THIS) if turn else ask} {source}", translated


# ------------------------------------------------------------------------------- summarization


HOBBIES = "chess swimming music reading painting dancing hiking fishing".split()
PETS = "dog cat parrot horse rabbit".split()
# A fact each line, two ways to say it. The first two notes are in every text, and in OPENING.
NOTES = """{name} was born in {city}. / {city} is the home town of {name}.
    {she} works as {a_job}. / {name} is {a_job}.
    The year of birth was {year}. / {name} was born in {year}.
    {name} has done this work for {years} years. / {she} started the job {years} years ago.
    {she} likes {hobby}. / In the evening it is time for {hobby}.
    A {pet} lives in the house. / {name} has a {pet}.
    {name} won a {prize} medal. / There is a {prize} medal on the wall.""".split("\n")
SUMMARIES = """{she} was born in {year}. / The year of birth is {year}.
    {she} has worked for {years} years. / That work has lasted {years} years.
    In the free time {name} enjoys {hobby}. / A favourite hobby is {hobby}.
    {name} shares the house with a {pet}. / {she} keeps a {pet}.
    {she} has a {prize} medal. / Once {name} won {prize}.""".split("\n")
SUMMARIZE = """Summarize these facts: / Write a summary of this:
    Please sum up the following notes. / Make a short text of these notes:"""
OPENING = """{name} is {a_job} from {city}. / {name}, {a_job}, comes from {city}.
    The text is about {name}, {a_job} from {city}."""


def _summary(rng):
    words = {"name": rng.choice(NAMES), "a_job": an(rng.choice(JOBS)), "city": rng.choice(CITIES)}
    words |= {"year": rng.randrange(1920, 1999), "years": rng.randrange(3, 40)}
    words |= {"hobby": rng.choice(HOBBIES), "pet": rng.choice(PETS)}
    words |= {"prize": rng.choice(["gold", "silver", "bronze"]), "she": pronoun(words["name"])}
    say = speaker(rng, **words)
    facts = [say(note) for note in NOTES]
    kept = sorted(rng.sample(range(2, 7), rng.choice([2, 3, 4])))
    given = [facts[index] for index in [0, 1, *kept]]
    rng.shuffle(given)
    ask = say(SUMMARIZE)
    sentences = [say(fact) for fact in SUMMARIES]
    opening = say(OPENING)
    if rng.random() < 0.5:
        rng.shuffle(kept)
    yield f"{ask} {' '.join(given)}", " ".join([opening, *(sentences[i - 2] for i in kept)])


# ------------------------------------------------------------------------------------------ qa


def _fact(country, attribute):
    value = WORLD[country][attribute]
    the = "" if attribute in ("capital", "main export") else "the "
    return f"The {attribute} of {country} is {the}{value}."


POLITE = (
    "",
    "Please tell me: ",
    "My name is {name}. ",
    "{name} asks: ",
    "A question: ",
    "Quick one: ",
)
ONE_FACT = """What is the {first} of {country}? / Do you know the {first} of {country}?
    Name the {first} of {country}. / {country} has which {first}?"""
TWO_FACTS = """What are the {first} and the {second} of {country}?
    Tell me the {first} and the {second} of {country}.
    I want to know two things about {country}: its {first} and its {second}."""


def _qa(rng):
    country, name = rng.choice(list(WORLD)), rng.choice(NAMES)
    first, second, third = rng.sample(list(WORLD[country]), 3)
    say = speaker(rng, country=country, first=first, second=second, third=third)
    polite = rng.choice(POLITE).format(name=name)
    if rng.random() < 0.5:
        yield polite + say(ONE_FACT), _fact(country, first)
    else:
        yield polite + say(TWO_FACTS), f"{_fact(country, first)} {_fact(country, second)}"
    if rng.random() < 0.6:
        yield say("And the {third}? / What about the {third}?"), _fact(country, third)


# ------------------------------------------------------------------------------ math_reasoning

GOODS = "apples pens books coins cards eggs stamps shells nuts candles".split()
PROBLEMS = (
    """{name} has {a} {goods}. {she} buys {b} more and gives {c} to {friend}.
    {name} owns {a} {goods} and finds another {b}. Then {friend} takes {c} of them.""",
    """{name} has {a} boxes with {b} {goods} each and {c} single ones.
    There are {b} {goods} in each of {a} bags. {name} adds {c} to them.""",
    """{name} had {a} {goods}. {she} lost {b} and sold {c} to {friend}.
    Of {a} {goods}, {name} gives {b} to {friend} and {c} to a teacher.""",
    """{name} has {a} {goods}. {friend} has {b} more than {name}. They put them together.
    {friend} has {b} more {goods} than {name}, who has {a}. They share them all.""",
)
HOW_MANY = """How many {goods} are there now? / How many {goods} is that in the end?
    Count the {goods}."""


def _problem(rng):
    name, friend = rng.sample(NAMES, 2)
    goods, kind, c = rng.choice(GOODS), rng.randrange(4), 0
    if kind == 0:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        c = rng.randrange(1, a + b)
        steps = (a, "+", b, a + b), (a + b, "-", c, a + b - c)
    elif kind == 1:
        a, b, c = rng.randrange(2, 6), rng.randrange(2, 6), rng.randrange(1, 10)
        steps = (a, "*", b, a * b), (a * b, "+", c, a * b + c)
    elif kind == 2:
        a = rng.randrange(6, 25)
        b = rng.randrange(1, a - 2)
        c = rng.randrange(1, a - b)
        steps = (a, "-", b, a - b), (a - b, "-", c, a - b - c)
    else:
        a, b = rng.randrange(2, 13), rng.randrange(1, 10)
        steps = (a, "+", b, a + b), (a, "+", a + b, 2 * a + b)
    words = dict(name=name, friend=friend, goods=goods, she=pronoun(name), a=a, b=b, c=c)
    say = speaker(rng, **words)
    question = f"{say(PROBLEMS[kind])} {say(HOW_MANY)}"
    first, second = ("{} {} {} = {}".format(*step) for step in steps)
    return question, f"First, {first}. Then, {second}. So the answer is {steps[1][3]} {goods}."


def _math(rng):
    for _ in range(rng.choice([1, 2])):
        yield _problem(rng)


# ----------------------------------------------------------------------------------------- rag

RECORD = """{name} is {age} years old, lives in {city} and works as {a_job}.
    {name} from {city} is {a_job} of {age} years.
    In {city} lives {name}, {a_job}, who is {age}."""
INTROS = "Use this text: / Context: / Read this: / Here is what I know:"
ASKED = {
    "city": ("Where does {name} live? / What is the city of {name}?", "{name} lives in {city}."),
    "job": ("What is the job of {name}? / What does {name} do?", "{name} works as {a_job}."),
    "age": ("How old is {name}? / What is the age of {name}?", "{name} is {age} years old."),
}


def _retrieval(rng):
    people, context = {}, []
    for name in rng.sample(NAMES, rng.choice([2, 3])):
        city, job, age = rng.choice(CITIES), rng.choice(JOBS), rng.randrange(20, 70)
        people[name] = dict(name=name, city=city, a_job=an(job), age=age)
        context.append(speaker(rng, **people[name])(RECORD))
    before = f"{rng.choice(phrases(INTROS))} {' '.join(context)} Question: "
    pairs = [(name, key) for name in people for key in ASKED]
    for name, key in rng.sample(pairs, rng.choice([1, 2, 3])):
        say = speaker(rng, **people[name])
        questions = {each: say(question) for each, (question, _) in ASKED.items()}
        yield before + questions[key], ASKED[key][1].format(**people[name])
        before = ""


MAKERS = dict(zip(GROUPS, (_talk, _translation, _summary, _qa, _math, _retrieval)))


if __name__ == "__main__":
    for group in GROUPS:
        for conversation, _ in zip(conversations(0, "held-out", [group]), range(2)):
            print(f"[{group}]")
            for question, answer in conversation.turns:
                print(f"USER: {question}\nASSISTANT: {answer}")
            print()
