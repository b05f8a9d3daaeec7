"""The text the miniature models learn: seeded conversations in the six task groups of Spec-Bench.

Four groups have one right answer (EXACT_GROUPS): whoever knows the rules can compute it from the
prompt. Two are open (mt_bench: stories, advice and talk about them; summarization): many answers
are good, and the choice of words is what a draft cannot foresee. Knows nothing about tokens.
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


def table(text):
    """{kind: its phrases}. A kind begins a line; phrases end at " / " or at the end of a line."""
    kinds = {}
    for line in text.strip().split("\n"):
        if not line.startswith(" "):
            kind, _, line = line.partition(":")
        kinds.setdefault(kind, []).extend(line.strip().split(" / "))
    return kinds


def speaker(rng, **words):
    """A function that says one of several phrases, at random, with ``words`` filled in."""
    return lambda phrases: rng.choice(phrases).format(**words)


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


# A country's facts but for its capital.
FACTS = table("""
currency: crown / thaler / florin / ducat / shilling / guilder / penny / mark
national animal: bear / eagle / wolf / lion / stag / otter / heron / lynx / swan / fox
main export: wool / copper / wine / timber / salt / honey / silk / cheese / glass / tea""")


def _world():
    """Thirty-two fictional countries, the same in every run: what question answering must know."""
    rng, taken, world = random.Random("world"), set(), {}

    def coin(ends):
        syllables = "Ba Do Ka Lu Mi No Ra Sel Ta Vor", "bi da lo mu ne ra si to", ends
        name = "".join(rng.choice(each.split()) for each in syllables)
        if name in taken:
            return coin(ends)
        taken.add(name)
        return name

    for _ in range(32):  # the capital is coined before its country
        facts = {"capital": coin("burg ton dal mar")}
        facts |= {attribute: rng.choice(values) for attribute, values in FACTS.items()}
        world[coin("nia via land stan")] = facts
    return world


WORLD = _world()
CITIES = [facts["capital"] for facts in WORLD.values()][:16]

# Stories and advice, with questions about them: mt_bench.
STORY = table("""
hero: fox / girl / boy / robot / baker / bear / sailor / cat / princess / knight / painter / mouse
    farmer / dragon
trait: brave / curious / shy / clever / gentle / lonely / cheerful / stubborn / patient / careless
place: a deep forest / a small village / an old castle / a quiet harbour / a city of glass
    a snowy valley / a house by the sea / a green hill / a lighthouse / a busy market town
thing: a silver key / an old map / a tiny lamp / a strange stone / a golden feather / a broken clock
    a letter without a name / a wooden flute / a blue button / a box of seeds
friend: a wise owl / an old sailor / a talking frog / a little girl / a tired wizard / a kind baker
    a young wolf / a clockmaker
trouble: a storm broke the bridge / the river rose over the fields / all the lights went out
    the winter came too early / a thief took the bread / the well ran dry / a fog hid every path
    the bells stopped ringing
deed: built a new one in three days / asked everyone for help
    followed the light to the end of the valley / sang until the morning came
    gave away the last piece of bread / waited and listened / climbed the highest tower
    found the hidden door
lesson: a friend is worth more than gold / small steps lead far / it is good to ask for help
    patience opens every door / kindness comes back / courage grows when it is shared""")
PLOT = table("""
begin: Once upon a time there was {a_trait} {hero} called {name} who lived in {place}.
    In {place} there lived {a_trait} {hero} whose name was {name}.
    Long ago, {name} the {trait} {hero} lived in {place}.
find: One morning {she} found {thing} under a tree.
    One day {she} discovered {thing} on the way home.
    Nobody knew that {she} kept {thing} under {her} bed.
meet: On the road {she} met {friend}. / Then {friend} knocked at the door.
    That evening {friend} came by and asked for a place to sleep.
speak: "Take good care of the {bare_thing}," said the stranger.
    "I have looked for this {bare_thing} for years," said the stranger.
    They talked all night and became friends. / They shared some soup and told old stories.
trouble: But the next day {trouble}. / Soon after that, {trouble}.
    Then, without warning, {trouble}.
fear: Everybody was afraid. / People did not know what to do. / {name} was not afraid.
deed: {name} took a deep breath and {deed}. / So {name} {deed}. / Together they {deed}.
end: In the end {name} learned that {lesson}. / Since that day everybody knows that {lesson}.
    And {name} never forgot that {lesson}.""")
ABOUT_STORY = table("""
{name} had {thing}.: What did {name} find? / Which thing did {name} have?
{name} met {friend}.: Who came to {name}? / Who did {name} meet?
{name} lived in {place}.: Where does the story take place? / Where did {name} live?
We can learn that {lesson}.: What is the moral? / What can we learn from it?""")
ADVICE = table("""
a long trip: pack a warm coat / make a list of what you need / check the weather / charge your phone
    leave a key with a friend / take some water and bread / look at a map before you go
an exam: start early / sleep well the night before / read your notes aloud / take short breaks
    explain the topic to a friend / try some old questions / eat a good breakfast
a new garden: choose a sunny place / start with easy plants / water it in the morning
    feed the soil / plant some flowers for the bees / keep your tools clean
    pull out the weeds every week
a dinner with guests: ask what your guests like / cook something you know well / set the table early
    prepare the dessert the day before / put on some quiet music / light a few candles
    do not worry about small mistakes
a job interview: read about the company / prepare three good questions / arrive ten minutes early
    wear clean shoes / tell a short story about your work / look people in the eye
    send a note of thanks
a quiet weekend: turn off your phone / go for a walk in the park / read an old book
    bake some bread / call a good friend / sleep as long as you like / visit a small museum""")
PHRASES = table("""
story: Tell me a story about / Write a short story about / Can you tell me a tale about
    I would like a story about / Please make up a story about
title: Give the story a title. / What could be a title for it?
advice: My friend {name} plans {topic}. What are {count} good ideas?
    I am {name}. Please give me {count} tips for {topic}.
    How should {name} prepare for {topic}? Name {count} things.
    {name} needs advice about {topic}. List {count} points.
gladly: Of course! / Here are some ideas: / For {topic} I would suggest this: / Gladly:
again: What was the {order} one? / Can you repeat the {order} point?
translation: Translate into {language}: / What is this in {language}? / Say it in {language}:
    Please translate the following into {language}. / Give me the {language} for this:
next: And this: / Next: / Now this one:
summary: Summarize these facts: / Write a summary of this: / Please sum up the following notes.
    Make a short text of these notes:
fact: What is the {first} of {country}? / Do you know the {first} of {country}?
    Name the {first} of {country}. / {country} has which {first}?
facts: What are the {first} and the {second} of {country}?
    Tell me the {first} and the {second} of {country}.
    I want to know two things about {country}: its {first} and its {second}.
other fact: And the {third}? / What about the {third}?
how many: How many {goods} are there now? / How many {goods} is that in the end?
    Count the {goods}.
context: Use this text: / Context: / Read this: / Here is what I know:
person: {name} is {age} years old, lives in {city} and works as {a_job}.
    {name} from {city} is {a_job} of {age} years.
    In {city} lives {name}, {a_job}, who is {age}.""")


def _story(rng):
    words = {"name": rng.choice(NAMES)}
    words |= {kind: rng.choice(phrases) for kind, phrases in STORY.items()}
    name, hero, trait, place, thing, *_ = words.values()
    she, bare = pronoun(name).lower(), thing.split(" ", 1)[1]
    words |= {"she": she, "her": "her" if she == "she" else "his"}
    words |= {"bare_thing": bare, "a_trait": an(trait)}
    say = speaker(rng, **words)
    ask = f"{say(PHRASES['story'])} {an(hero)} called {name}"
    more = rng.choice(["", f" who lives in {place}", f" and {thing}"])
    story = [say(part) for part in PLOT.values()]
    for line in sorted(rng.sample(range(3, 6), rng.choice([0, 1, 2])), reverse=True):
        del story[line]
    yield f"{ask}{more}.", " ".join(story)
    titles = [f"{name} and the {bare.title()}", f"The {trait.title()} {hero.title()}"]
    titles.append(f"The Secret of the {bare.title()}")
    turns = [(say(questions), answer.format(**words)) for answer, questions in ABOUT_STORY.items()]
    turns.append((say(PHRASES["title"]), rng.choice(titles)))
    yield from rng.sample(turns, rng.choice([1, 2]))


def _advice(rng):
    topic, name, count = rng.choice(list(ADVICE)), rng.choice(NAMES), rng.choice([3, 4, 5])
    say = speaker(rng, name=name, count=count, topic=topic)
    question, tips = say(PHRASES["advice"]), rng.sample(ADVICE[topic], count)
    lines = [f"{number}. {tip[0].upper()}{tip[1:]}." for number, tip in enumerate(tips, 1)]
    yield question, "\n".join([say(PHRASES["gladly"]), *lines])
    pick = rng.randrange(count)
    order = "first second third fourth fifth".split()[pick]
    yield speaker(rng, order=order)(PHRASES["again"]), f"The {order} point was: {tips[pick]}."


def _talk(rng):
    yield from rng.choice([_story, _story, _advice])(rng)


WORDS = table("""
nouns: man Mann m / woman Frau f / child Kind n / dog Hund m / cat Katze f / teacher Lehrer m
    girl Mädchen n / book Buch n / apple Apfel m / flower Blume f / letter Brief m / lamp Lampe f
    house Haus n / picture Bild n
verbs: sees sieht / loves liebt / finds findet / buys kauft / carries trägt / takes nimmt
    brings bringt / needs braucht
adjectives: old alt / young jung / small klein / big groß / tired müd / new neu / strong stark
    quiet still
where: in the garden = im Garten / in the kitchen = in der Küche / at the market = auf dem Markt
    at home = zu Hause / by the river = am Fluss
when: Today = Heute / Every day = Jeden Tag / In the evening = Am Abend / Now = Jetzt""")
NOUNS = [noun.split() for noun in WORDS["nouns"]]  # the first seven can be subjects
# German articles and endings of adjectives, by case, whether definite, and gender.
FORMS = {
    ("nom", True): {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    ("acc", True): {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    ("nom", False): {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")},
    ("acc", False): {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")},
}


def _noun_phrase(rng, nouns, case):
    (english, german, gender), definite = rng.choice(nouns), rng.random() < 0.6
    article, ending = FORMS[case, definite][gender]
    if rng.random() < 0.4:
        adjective, stem = rng.choice(WORDS["adjectives"]).split()
        english, german = f"{adjective} {english}", f"{stem}{ending} {german}"
    return (f"the {english}" if definite else an(english)), f"{article} {german}"


def _sentence_pair(rng):
    subject, verb = _noun_phrase(rng, NOUNS[:7], "nom"), rng.choice(WORDS["verbs"]).split()
    thing = _noun_phrase(rng, NOUNS, "acc")
    where = [rng.choice(WORDS["where"]).split(" = ")] if rng.random() < 0.3 else []
    english, german = [subject, verb, thing, *where], [subject, verb, thing, *where]
    if rng.random() < 0.3:  # an adverb in front moves the German subject behind the verb
        when = rng.choice(WORDS["when"]).split(" = ")
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


def _translation(rng):
    to_german = rng.random() < 0.5
    say = speaker(rng, language="German" if to_german else "English")
    for turn in range(rng.choice([1, 2, 3])):
        sides = [" ".join(side) for side in zip(*_pairs(rng))]
        source, translated = sides if to_german else reversed(sides)
        ask = say(PHRASES["translation"])
        yield f"{say(PHRASES['next']) if turn else ask} {source}", translated


NOTES = table("""
city: {name} was born in {city}. / {city} is the home town of {name}.
job: {she} works as {a_job}. / {name} is {a_job}.
year: The year of birth was {year}. / {name} was born in {year}.
years: {name} has done this work for {years} years. / {she} started the job {years} years ago.
hobby: {she} likes {hobby}. / In the evening it is time for {hobby}.
pet: A {pet} lives in the house. / {name} has a {pet}.
prize: {name} won a {prize} medal. / There is a {prize} medal on the wall.""")
SUMMARIES = table("""
begin: {name} is {a_job} from {city}. / {name}, {a_job}, comes from {city}.
    The text is about {name}, {a_job} from {city}.
year: {she} was born in {year}. / The year of birth is {year}.
years: {she} has worked for {years} years. / That work has lasted {years} years.
hobby: In the free time {name} enjoys {hobby}. / A favourite hobby is {hobby}.
pet: {name} shares the house with a {pet}. / {she} keeps a {pet}.
prize: {she} has a {prize} medal. / Once {name} won {prize}.""")
HOBBIES = "chess swimming music reading painting dancing hiking fishing".split()
PETS = "dog cat parrot horse rabbit".split()


def _summary(rng):
    words = {"name": rng.choice(NAMES), "a_job": an(rng.choice(JOBS)), "city": rng.choice(CITIES)}
    words |= {"year": rng.randrange(1920, 1999), "years": rng.randrange(3, 40)}
    words |= {"hobby": rng.choice(HOBBIES), "pet": rng.choice(PETS)}
    words |= {"prize": rng.choice(["gold", "silver", "bronze"]), "she": pronoun(words["name"])}
    say = speaker(rng, **words)
    facts = [say(note) for note in NOTES.values()]
    kept = sorted(rng.sample(range(2, 7), rng.choice([2, 3, 4])))
    given = [facts[index] for index in [0, 1, *kept]]
    rng.shuffle(given)
    ask, (begin, *summaries) = say(PHRASES["summary"]), SUMMARIES.values()
    sentences = [say(summary) for summary in summaries]
    opening = say(begin)
    if rng.random() < 0.5:
        rng.shuffle(kept)
    yield f"{ask} {' '.join(given)}", " ".join([opening, *(sentences[i - 2] for i in kept)])


POLITE = "|Please tell me: |My name is {name}. |{name} asks: |A question: |Quick one: ".split("|")


def _fact(country, attribute):
    the = "" if attribute in ("capital", "main export") else "the "
    return f"The {attribute} of {country} is {the}{WORLD[country][attribute]}."


def _qa(rng):
    country, name = rng.choice(list(WORLD)), rng.choice(NAMES)
    first, second, third = rng.sample(list(WORLD[country]), 3)
    say = speaker(rng, country=country, first=first, second=second, third=third, name=name)
    polite = say(POLITE)
    if rng.random() < 0.5:
        yield polite + say(PHRASES["fact"]), _fact(country, first)
    else:
        yield polite + say(PHRASES["facts"]), f"{_fact(country, first)} {_fact(country, second)}"
    if rng.random() < 0.6:
        yield say(PHRASES["other fact"]), _fact(country, third)


GOODS = "apples pens books coins cards eggs stamps shells nuts candles".split()
PROBLEMS = table("""
a + b - c: {name} has {a} {goods}. {she} buys {b} more and gives {c} to {friend}.
    {name} owns {a} {goods} and finds another {b}. Then {friend} takes {c} of them.
a * b + c: {name} has {a} boxes with {b} {goods} each and {c} single ones.
    There are {b} {goods} in each of {a} bags. {name} adds {c} to them.
a - b - c: {name} had {a} {goods}. {she} lost {b} and sold {c} to {friend}.
    Of {a} {goods}, {name} gives {b} to {friend} and {c} to a teacher.
a + (a + b): {name} has {a} {goods}. {friend} has {b} more than {name}. They put them together.
    {friend} has {b} more {goods} than {name}, who has {a}. They share them all.""")


def _problem(rng):
    name, friend = rng.sample(NAMES, 2)
    goods, problem, c, number = rng.choice(GOODS), rng.choice(list(PROBLEMS)), 0, rng.randrange
    if problem == "a + b - c":
        a, b = number(2, 13), number(2, 13)
        c = number(1, a + b)
        steps = (a, "+", b, a + b), (a + b, "-", c, a + b - c)
    elif problem == "a * b + c":
        a, b, c = number(2, 6), number(2, 6), number(1, 10)
        steps = (a, "*", b, a * b), (a * b, "+", c, a * b + c)
    elif problem == "a - b - c":
        a = number(6, 25)
        b = number(1, a - 2)
        c = number(1, a - b)
        steps = (a, "-", b, a - b), (a - b, "-", c, a - b - c)
    else:
        a, b = number(2, 13), number(1, 10)
        steps = (a, "+", b, a + b), (a, "+", a + b, 2 * a + b)
    say = speaker(rng, name=name, friend=friend, goods=goods, she=pronoun(name), a=a, b=b, c=c)
    question = f"{say(PROBLEMS[problem])} {say(PHRASES['how many'])}"
    first, second = ("{} {} {} = {}".format(*step) for step in steps)
    return question, f"First, {first}. Then, {second}. So the answer is {steps[1][3]} {goods}."


def _math(rng):
    for _ in range(rng.choice([1, 2])):
        yield _problem(rng)


ABOUT_PERSON = table("""
{name} lives in {city}.: Where does {name} live? / What is the city of {name}?
{name} works as {a_job}.: What is the job of {name}? / What does {name} do?
{name} is {age} years old.: How old is {name}? / What is the age of {name}?""")


def _retrieval(rng):
    people, context = {}, []
    for name in rng.sample(NAMES, rng.choice([2, 3])):
        city, job, age = rng.choice(CITIES), rng.choice(JOBS), rng.randrange(20, 70)
        people[name] = dict(name=name, city=city, a_job=an(job), age=age)
        context.append(speaker(rng, **people[name])(PHRASES["person"]))
    before = f"{rng.choice(PHRASES['context'])} {' '.join(context)} Question: "
    pairs = [(name, answer) for name in people for answer in ABOUT_PERSON]
    for name, answer in rng.sample(pairs, rng.choice([1, 2, 3])):
        say = speaker(rng, **people[name])
        questions = {each: say(phrases) for each, phrases in ABOUT_PERSON.items()}
        yield before + questions[answer], answer.format(**people[name])
        before = ""


MAKERS = dict(zip(GROUPS, (_talk, _translation, _summary, _qa, _math, _retrieval)))
