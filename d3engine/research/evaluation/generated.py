"""Generated problems like tasks of BBH: their form, splits and generators. A question's
split follows from its text, whatever the seed."""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

from d3engine.research.evaluation.word_problems import NAMES, format_prompt

MARK = "####"


@dataclass(frozen=True)
class GeneratedProblem:
    """A question, its worked answer (ending in "#### <answer>") and the answer."""

    question: str
    solution: str
    answer: str

    @property
    def prompt(self) -> str:
        return format_prompt(self.question)

    @property
    def solved(self) -> str:
        """The question with its answer, as an example."""
        return f"{self.prompt} {self.solution}"

    def is_right(self, answer: str) -> bool:
        return final_answer(answer) == self.answer


def worked(question: str, steps: list[str], answer: str) -> GeneratedProblem:
    """The problem whose solution is the steps and then the answer behind the mark."""
    return GeneratedProblem(question, " ".join([*steps, f"{MARK} {answer}"]), answer)


def final_answer(text: str) -> str | None:
    """What stands behind the first mark, to the end of its line; None without a mark."""
    _, mark, rest = text.partition(MARK)
    return rest.partition("\n")[0].strip() if mark else None


# "not ( True and False ) or True is": rewritten from the inside out, one operator per step, each written down.


def boolean_expressions(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """A random expression with that number of operators; "not" binds tighter than "and", "and" tighter than "or"."""
    steps: list[str] = []
    text, value = _boolean_expression(rng, rng.randint(fewest, most), steps)
    return worked(f"What is {text}?", steps, str(value))


def _boolean_expression(rng: random.Random, operators: int, steps: list[str]) -> tuple[str, bool]:
    """The text of a random expression, fit to stand beside any operator, and its value; `steps` gets its working."""
    if operators == 0:
        value = rng.random() < 0.5
        return str(value), value
    word = rng.choice(("not", "and", "or"))
    if word == "not":
        inner, inner_value = _boolean_expression(rng, operators - 1, steps)
        value = not inner_value
        steps.append(f"not {inner_value} is {value}.")
        return f"not {inner}", value
    left_size = rng.randint(0, operators - 1)
    left, left_value = _boolean_expression(rng, left_size, steps)
    right, right_value = _boolean_expression(rng, operators - 1 - left_size, steps)
    value = (left_value and right_value) if word == "and" else (left_value or right_value)
    steps.append(f"{left_value} {word} {right_value} is {value}.")
    return f"( {left} {word} {right} )", value


# A list of words into alphabetical order: copying, and each next word is one of fewer. Depth decay assumes that later
# tokens are easier; here is a task to try that on.

WORDS = (
    "acorn", "anchor", "apple", "arrow", "badge", "basket", "beacon", "blanket", "bottle", "bridge",
    "button", "cabin", "candle", "canyon", "carpet", "castle", "cellar", "chalk", "cherry", "circle",
    "clover", "copper", "corner", "cotton", "cradle", "dagger", "dancer", "desert", "dinner", "dragon",
    "eagle", "echo", "ember", "engine", "fabric", "falcon", "feather", "fence", "flute", "forest",
    "garden", "ginger", "glacier", "granite", "hammer", "harbor", "hazel", "helmet", "island", "ivory",
    "jacket", "jungle", "kettle", "kitchen", "ladder", "lantern", "lemon", "linen", "magnet", "maple",
    "marble", "meadow", "mirror", "needle", "nickel", "oasis", "orchard", "otter", "paddle", "parrot",
    "pepper", "pillow", "planet", "quartz", "quilt", "rabbit", "ribbon", "river", "saddle", "sailor",
    "silver", "spider", "summer", "tablet", "temple", "thunder", "timber", "tunnel", "umbrella", "valley",
    "velvet", "violin", "walnut", "window", "winter", "wonder", "yarn", "yellow", "zebra", "zipper",
)  # fmt: skip


def word_sorting(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """Different words, as many as asked for."""
    words = rng.sample(WORDS, rng.randint(fewest, most))
    return worked(f"Sort these words: {' '.join(words)}.", [], " ".join(sorted(words)))


# Closing the brackets that a sequence has opened: the working names what is still open, outermost first, and the
# answer is its mirror image.

CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def dyck_languages(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """A beginning of a well-formed sequence, of that number of brackets or one more, that leaves at least one open."""
    sequence, still_open = _beginning(rng, rng.randint(fewest, most))
    closed = [CLOSING[bracket] for bracket in reversed(still_open)]
    steps = [f"Open: {' '.join(still_open)} ."]
    return worked(f"Close the brackets: {' '.join(sequence)}", steps, " ".join(closed))


def _beginning(rng: random.Random, length: int) -> tuple[list[str], list[str]]:
    sequence: list[str] = []
    still_open: list[str] = []
    while len(sequence) < length or not still_open:
        if still_open and rng.random() < 0.45:
            sequence.append(CLOSING[still_open.pop()])
        else:
            still_open.append(rng.choice(list(CLOSING)))
            sequence.append(still_open[-1])
    return sequence, still_open


# How many of one kind there are in a list of things: the working passes over the list in its order and keeps a running
# total, of the kind asked for alone.

THINGS = {
    "fruits": ("apple", "banana", "grape", "lemon", "melon", "peach", "pear", "plum"),
    "animals": ("bear", "cat", "dog", "duck", "frog", "goat", "horse", "mouse"),
    "instruments": ("cello", "drum", "flute", "guitar", "harp", "piano", "trumpet", "violin"),
    "tools": ("axe", "chisel", "drill", "hammer", "ladder", "rake", "saw", "shovel"),
}
PLURALS = {"peach": "peaches", "mouse": "mice"}
NUMBERS = ("a", "two", "three", "four", "five", "six")


def object_counting(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """A number of things, up to six of each, of two kinds, one of which is asked for."""
    asked, other = rng.sample(sorted(THINGS), 2)
    things = rng.sample([*THINGS[asked], *THINGS[other]], rng.randint(fewest, most))
    counts = [rng.randint(1, len(NUMBERS)) for _ in things]
    total, steps = 0, []
    for thing, count in zip(things, counts, strict=True):
        if thing in THINGS[asked]:
            steps.append(f"{total} + {count} = {total + count}.")
            total += count
    *first, last = [_counted(thing, count) for thing, count in zip(things, counts, strict=True)]
    return worked(f"I have {', '.join(first)} and {last}. How many {asked} do I have?", steps, str(total))


def _counted(thing: str, count: int) -> str:
    if count > 1:
        return f"{NUMBERS[count - 1]} {PLURALS.get(thing, thing + 's')}"
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


# Who holds what after some swaps: the working follows only the pair of each swap, so its length grows with the swaps
# alone.

OBJECTS = ("ball", "book", "card", "coin", "cup", "hat", "key", "kite", "pen", "shell")
MIN_PEOPLE, MAX_PEOPLE = 3, 5


def tracking_shuffled_objects(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """Three to five people with a thing each, and a number of swaps."""
    people = rng.sample(NAMES, rng.randint(MIN_PEOPLE, MAX_PEOPLE))
    holds = dict(zip(people, rng.sample(OBJECTS, len(people)), strict=True))
    sentences = [f"{person} has the {thing}." for person, thing in holds.items()]
    steps = []
    for _ in range(rng.randint(fewest, most)):
        first, second = rng.sample(people, 2)
        holds[first], holds[second] = holds[second], holds[first]
        sentences.append(f"{first} and {second} swap.")
        steps.append(f"{first} has the {holds[first]}, {second} the {holds[second]}.")
    asked = rng.choice(people)
    return worked(f"{' '.join(sentences)} What does {asked} have?", steps, holds[asked])


# Nested sums, differences and products of small whole numbers: one operation per step from the inside out, each in
# brackets, so that no rule of precedence is needed.

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LARGEST = 9


def multistep_arithmetic(rng: random.Random, fewest: int, most: int) -> GeneratedProblem:
    """A number of operations on numbers from -9 to 9."""
    steps: list[str] = []
    text, value = _arithmetic_expression(rng, rng.randint(fewest, most), steps)
    return worked(f"What is {text}?", steps, str(value))


def _arithmetic_expression(rng: random.Random, operations: int, steps: list[str]) -> tuple[str, int]:
    """The text of a random expression and its value; `steps` gets its working."""
    if operations == 0:
        value = rng.randint(-LARGEST, LARGEST)
        return str(value), value
    left_size = rng.randint(0, operations - 1)
    left, left_value = _arithmetic_expression(rng, left_size, steps)
    right, right_value = _arithmetic_expression(rng, operations - 1 - left_size, steps)
    sign = rng.choice(list(OPERATIONS))
    value = OPERATIONS[sign](left_value, right_value)
    steps.append(f"{left_value} {sign} {right_value} = {value}.")
    return f"({left} {sign} {right})", value
