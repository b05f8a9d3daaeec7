"""The rate rule at work: the decisions of a draft, and what is learnt from every step."""

from math import inf, log

from .chances import Chances, Level, Visit, bin_of
from .costs import DEEPEST, LARGEST, WIDEST, cheapest_growth
from .tree import TunedTree

PACE = 0.95  # of a step's tokens and milliseconds in the rate, one step later
IDLE = (
    16  # steps without a draft, or levels without a look at an exit, after which one is tried again
)
SAVINGS = 1.0  # tokens that an exit may have earned before they are needed, to pay for catching up
MEMORY = 32.0  # looks at an exit that what they saved before counts for, at most


class Tuner:
    """The decisions of one target and draft, and what it learns from every step. Outlives a generation.

    ``exits`` are the layers that the draft may leave after; ``priors`` {"greedy" or "sampled": (weights, chances)} come with the
    draft, as does its ``vocabulary``, where it has one. The draft asks, in this order: ``start``, then for each level
    ``passes_by`` and ``enough`` at every exit, ``width``, ``worth``, ``draw`` where a token was drawn, and ``expand``, at the end
    ``send``; after the target's pass the loop calls ``learn``. Prices are milliseconds by the rate, that is, in tokens.
    """

    def __init__(self, costs, exits, priors=None, vocabulary=None):
        self.costs, self.exits, self.vocabulary, self.known = costs, exits, vocabulary, {}
        self.chances = {
            kind: Chances(len(exits), (priors or {}).get(kind)) for kind in ("greedy", "sampled")
        }
        self.tokens = self.milliseconds = self.level_ms = (
            0.0  # of recent steps; of a level, on the mean
        )
        self.idle = 0  # steps since the last draft
        self.earned = [0.0] * len(
            exits
        )  # tokens that each exit added or would have, net of its price and of what it caught up on
        self.saved = {}  # by exit and what came before: the tokens' worth that a look there saves, and by how many looks
        self.passed = [0] * len(exits)  # levels since each exit was last looked at

    def start(self, n, sampling):
        """Begin a step after n tokens of context. Returns whether to draft at all."""
        self.sampling, self.sampled, self.drawn = sampling, sampling.temperature > 0, False
        self.now = self.chances["sampled" if self.sampled else "greedy"]
        self.target, self.growth, self.segments, self.look = self.costs_at(n)
        self.step = self.costs.step[self.sampled]
        self.levels, self.visits, self.paths, self.every_path = [], [], [1.0], []
        self.before = None  # the bin of the token before the next level's first place
        # Milliseconds of this draft, by the table; of these, without catching up; and for reading a prompt.
        self.drafting = self.steady = self.reading = 0.0
        self.sent = 0  # nodes that will probably be sent
        if not self.milliseconds:
            self.guess_rate()
        alone = 1.0 / (
            self.target[1] + self.step
        )  # always to be had, so nothing slower is worth as little as it is
        self.rate = max(self.tokens / self.milliseconds, alone)
        first = self.segments[0]
        self.level_price = self.rate * (self.level_ms + self.growth[1])
        self.row_price = self.rate * ((first[WIDEST] - first[1]) / (WIDEST - 1) + self.growth[1])
        chance = self.now.chance
        self.again = min(chance("after"), 0.99), min(chance("after_drawn"), 0.99)
        worth = max(
            self.value(chance("root")),
            self.value(chance("root_drawn"), drawn=True) if self.sampled else 0.0,
        )
        worth_it = worth > self.level_price + self.rate * self.costs.start
        self.idle = 0 if worth_it or self.idle == IDLE else self.idle + 1
        self.drafting = 0.0 if self.idle else self.costs.start
        return self.idle == 0

    def costs_at(self, n):
        """The table at n tokens of context, give or take some, as lists."""
        if n // 64 not in self.known:
            target, segments, look = self.costs.at(n)
            self.known[n // 64] = (
                target.tolist(),
                cheapest_growth(target).tolist(),
                segments.tolist(),
                look.tolist(),
            )
        return self.known[n // 64]

    def pass_ms(self, exit, rows):
        """What a segment takes for so many rows; those of a prompt are beyond the table."""
        costs = self.segments[exit]
        return costs[rows] if rows <= LARGEST else costs[LARGEST] * rows / LARGEST

    def guess_rate(self):
        """Before the first step: the rate of the best plain chain, at the chances that came with the draft."""
        self.level_ms, again = (
            self.segments[0][1] + self.look[1],
            self.now.chance("after_drawn" if self.sampled else "after"),
        )
        best, tokens = (0.0, 0.0, 1.0), 0.0
        for length in range(DEEPEST + 1):
            tokens += again**length
            milliseconds = (
                self.step
                + self.target[1 + length]
                + length * self.level_ms
                + self.costs.start * (length > 0)
            )
            best = max(best, (tokens / milliseconds, tokens, milliseconds))
        self.tokens, self.milliseconds = 4 * best[1], 4 * best[2]  # as if of four steps

    def tree(self, drafter, sampling):
        """What a SortedDraft puts its levels into."""
        return TunedTree(self, drafter, sampling)

    @property
    def another_row(self):
        """What one more node adds to the price of the target's pass."""
        return self.rate * self.growth[min(1 + self.sent, LARGEST)]

    def value(self, path, drawn=False, price=None):
        """Tokens that a path is worth that survives with the chance ``path``: its last one and, net of cost, what may follow.

        Each token that follows survives with the usual chance if the one before does, and its level costs ``price`` whether
        it does or not; so drafting goes on as long as the path's chance is worth that.
        """
        again, price = self.again[drawn], self.level_price if price is None else price
        if path * again <= price:
            return path
        levels = min(int(log(price / path) / log(again)), DEEPEST) if price > 0 else DEEPEST
        return path + path * again * (1.0 - again**levels) / (1.0 - again) - levels * price

    def passes_by(self, exit, rows, waiting):
        """Whether to go on to the next exit without a look at what this one, of this number, says of so many places.

        ``waiting`` (E,): see ``enough``.
        """
        self.drafting += self.pass_ms(exit, waiting[exit])
        self.steady += self.pass_ms(exit, rows)
        self.reading += self.pass_ms(exit, waiting[exit]) if waiting[exit] > LARGEST else 0.0
        if exit + 1 < len(self.exits) and self.skips(exit, rows, waiting):
            self.passed[exit] += 1
            return True
        self.passed[exit] = 0
        self.drafting += self.look[rows]
        self.steady += self.look[rows]
        return False

    def skips(self, exit, rows, waiting):
        """Whether looks at an exit, after such tokens, have saved less of late than they cost; now and then it is looked at again.

        A look saves something where the exit suffices.
        """
        debt = self.pass_ms(exit + 1, waiting[exit + 1]) - self.pass_ms(exit + 1, rows)
        saved, _ = self.saved.get((self.sampled, exit, self.before), (inf, 0.0))
        return self.passed[exit] < IDLE and saved + self.rate * debt < self.rate * self.look[rows]

    def enough(self, exit, sure, tokens, logits, waiting):
        """Whether the exit of this number suffices for the R places of a level.

        There it is ``sure`` (R,) of its ``tokens`` (R,), lists, by its ``logits`` (R, K). ``waiting`` (E,) are the places each
        segment has to run over to get there. A deeper exit is worth it when it adds more tokens, at these places and after
        them, than its segments take of time. What they have to catch up on besides, above all a prompt, serves all later places,
        nobody knows how many: so it is paid out of what that exit has earned, where it was used or would have been. Without a
        history that is how to rent skis: buy them when the rent has come to their price, and never pay more than twice the best.
        """
        bins = [bin_of(each) for each in sure]
        self.visits.append(Visit(exit, tokens, bins, logits))
        exits, rows, now = len(self.exits), len(bins), self.now
        if exit + 1 == exits:
            return True
        drawn = self.drawn or (self.sampled and not self.levels)
        here, there = ("drawn", "deeper_drawn") if drawn else ("first", "deeper")
        own, pair = now.table[now.row[here] + exit], now.row[there] + exit * exits
        worth = sum(self.value(path * own[bin], drawn) for path, bin in zip(self.paths, bins))
        price, debt, saved = 0.0, 0.0, inf
        for deeper in range(exit + 1, exits):
            one, better = self.segments[deeper][rows], now.table[pair + deeper]
            price += self.rate * (one + self.look[rows])
            debt += self.rate * (self.pass_ms(deeper, waiting[deeper]) - one)
            gain = (
                sum(self.value(path * better[bin], drawn) for path, bin in zip(self.paths, bins))
                - worth
            )
            if gain > price:
                self.earned[deeper] = min(self.earned[deeper] + gain - price, max(SAVINGS, debt))
                if self.earned[deeper] >= debt:
                    self.earned[deeper] -= debt
                    self.learn_what_looks_save(exit, 0.0)
                    return False
            saved = min(saved, price - gain if gain <= price else debt - self.earned[deeper])
        self.learn_what_looks_save(exit, saved)
        return True

    def learn_what_looks_save(self, exit, saved):
        """A look at an exit has ``saved`` time worth so many tokens: none where it did not suffice."""
        key = self.sampled, exit, self.before
        mean, weight = self.saved.get(key, (0.0, 0.0))
        weight = min(weight, MEMORY) + 1.0
        self.saved[key] = mean + (saved - mean) / weight, weight

    def width(self, sure):
        """How many candidates of a place, of whose first the draft is so ``sure``, may be worth looking at: one or several."""
        most = self.paths[0] * self.now.chance("other", self.visits[-1].exit, bin_of(1.0 - sure))
        return 1 if self.drawn or most <= self.another_row else WIDEST

    def worth(self, tokens=None, probs=None):
        """Whether a level has candidates ``tokens`` (R, C), likeliest first, by ``probs`` (R, C), that are worth a check.

        Without these there is but the likeliest of each place, of which ``enough`` was told. Where tokens are sampled, the first
        level decides whether this draft is ``drawn`` from q, one token a level, or takes the likeliest. What is drawn has no
        chance of its own yet, only its place has.
        """
        visit, price = self.visits[-1], self.another_row
        if tokens is None:
            tokens, bins = [[token] for token in visit.tokens], [[bin] for bin in visit.bins]
        else:
            bins = [[bin_of(prob) for prob in row] for row in probs]
        level = Level(self.visits, tokens, bins)
        self.levels.append(level)
        self.visits = []
        drawn = (
            self.value(
                self.paths[0] * self.now.chance("drawn", visit.exit, visit.bins[0]), drawn=True
            )
            - price
        )
        if not self.drawn:
            chances = self.path_chances(level)
            net = [chance - price for chance in chances if chance > price]
            if self.sampled and len(self.levels) == 1:
                self.drawn = self.prefers_drawn(
                    drawn, self.value(chances[0]) - chances[0] + sum(net)
                )
        if self.drawn:
            return drawn > 0
        if net:
            self.sent += len(net)
            self.every_path.append(chances)
        return len(net) > 0

    def path_chances(self, level):
        """Chances (R * C,) that the target comes to each of a level's candidates and takes it."""
        first, other = (
            self.now.table[self.now.row[kind] + level.exit] for kind in ("first", "other")
        )
        chances = []
        for path, bins in zip(self.paths, level.bins):
            left, table = 1.0, first
            for bin in bins:
                chance = min(left, table[bin])
                chances.append(path * chance)
                left, table = left - chance, other
        return chances

    def prefers_drawn(self, drawn, likeliest):
        """Which is worth more, in tokens net of their cost: one to be drawn from q, or the likeliest ones."""
        return drawn >= likeliest

    def draw(self, place, prob):
        """A token was drawn, ``place`` in the draft's vocabulary, which gave it ``prob``: from now on it has its own chance."""
        level = self.levels[-1]
        level.drawn, level.drawn_bin = place, bin_of(prob)
        self.drafting += self.costs.drawn
        self.steady += self.costs.drawn
        self.every_path.append(
            [self.paths[0] * self.now.chance("token", level.exit, level.drawn_bin)]
        )
        self.sent += 1

    def expand(self, most=WIDEST):
        """Which of a level's candidates (R * C,) to draft the next level from, best first; perhaps none."""
        level, chances = self.levels[-1], self.every_path[-1]
        bins = [level.drawn_bin] if self.drawn else sum(level.bins, [])
        order = (
            [0]
            if len(chances) == 1
            else sorted(range(len(chances)), key=lambda each: -chances[each])
        )
        order = order[:most]
        following = self.now.table[
            self.now.row["next_drawn" if self.drawn else "next"] + level.exit
        ]
        first, row, best, net, count = self.segments[0], self.another_row, 0.0, 0.0, 0
        for place, candidate in enumerate(order):
            added = first[place + 1] - first[place] if place else self.level_ms
            net += self.value(
                chances[candidate] * following[bins[candidate]],
                self.drawn,
                self.row_price if place else None,
            )
            net -= self.rate * added + row
            if net > best:
                best, count = net, place + 1
        order = order[:count]
        level.taken, self.paths = [bins[each] for each in order], [chances[each] for each in order]
        self.before = level.taken[0] if order else None
        return order

    def send(self):
        """The numbers of the candidates, level by level, that the target is to check, and what is expected of the step.

        That is a dict of tokens, milliseconds, those of a token that the target makes alone, the rate, tokens a millisecond, that
        it was decided by, and whether tokens were ``drawn``, in which case all are sent.
        """
        chances = sum(self.every_path, [])
        order = sorted(range(len(chances)), key=lambda each: -chances[each])[:LARGEST]
        best, tokens, most = 0, 1.0, 1.0 - self.rate * self.target[1]
        expected = tokens
        for count, candidate in enumerate(order, 1):
            tokens += chances[candidate]
            if self.drawn or tokens - self.rate * self.target[1 + count] > most:
                best, expected, most = count, tokens, tokens - self.rate * self.target[1 + count]
        self.spent = self.drafting + self.step + self.target[1 + best]
        plan = {
            "expected_tokens": expected,
            "expected_ms": self.spent,
            "alone_ms": self.target[1] + self.step,
            "rate": self.rate,
        }
        return sorted(order[:best]), plan | {"drawn": self.drawn}

    def learn(self, slots, tokens, p=None):
        """After a step that accepted nodes with these ``slots``, a list, and emitted ``tokens``, one more.

        ``slots`` number the nodes that were drafted from, level by level. Above T = 0 ``p`` (len(tokens), V) are the target's
        distributions of these tokens. Every place that the target came to is graded, at every exit it went through.
        """
        first, places = 0, [(0, 0)][: len(self.levels)]  # (level, row)
        for depth, slot in enumerate(slots[: max(0, len(self.levels) - 1)]):
            row, first = slot - first, first + len(self.levels[depth].taken)
            if not 0 <= row < len(self.levels[depth].taken):
                break
            places.append((depth + 1, row))
        if places and self.sampled:
            self.now.count_sampled(self.levels, places, p, self.sampling, self.vocabulary)
        elif places:
            self.now.count_greedy(self.levels, places, tokens)
        self.tokens, self.milliseconds = (
            PACE * self.tokens + len(tokens),
            PACE * self.milliseconds + self.spent - self.reading,
        )
        if self.levels:
            self.level_ms = PACE * self.level_ms + (1.0 - PACE) * self.steady / len(self.levels)
