"""Prompts that a student learns from, templates times words by kind, the same for the same
seed; one in `HELD_OUT_EVERY`, by its hash, is never trained on."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import product
from pathlib import Path
from sysconfig import get_path

from d3engine.errors import require
from d3engine.utils.files import read_bytes

HELD_OUT_EVERY = 8

INSTRUCTIONS = (
    "Explain {topic} to a curious ten-year-old.",
    "What are the three most important things to know about {topic}?",
    "Write a short paragraph about {topic} for a newsletter.",
    "Give me a list of five facts about {topic}.",
    "What is a common misunderstanding about {topic}, and what is true instead?",
    "Summarize the history of {topic} in four sentences.",
    "How would you teach {topic} in one lesson? Give an outline.",
    "Compare {topic} with {other}. What do they have in common?",
    "Write a polite email that invites a colleague to a talk about {topic}.",
    "What questions should a beginner ask about {topic}?",
    "Tell me a short story in which {topic} plays a role.",
    "What are the advantages and disadvantages of {topic}?",
    "Define {topic} in one sentence, then give an example.",
    "Which jobs have to do with {topic}? Name four and say what they do.",
    "Write a quiz with three questions about {topic} and give the answers.",
    "Why does {topic} matter for everyday life?",
    "Give step by step advice for a beginner who wants to learn about {topic}.",
    "Write a poem of eight lines about {topic}.",
    "What could go wrong with {topic}, and how can it be avoided?",
    "Translate into French: I have read a good book about {topic} last week.",
    "Rewrite this more formally: hey, can we chat about {topic} tomorrow?",
    "Write a dialogue between a teacher and a student about {topic}.",
)

TOPICS = (
    "photosynthesis", "the water cycle", "volcanoes", "the Roman Empire", "compound interest", "bicycles",
    "vaccines", "the solar system", "black holes", "bread baking", "electric cars", "the printing press",
    "chess", "coral reefs", "supply and demand", "earthquakes", "the French Revolution", "sleep", "honey bees",
    "recycling", "jazz music", "public libraries", "wind power", "the human heart", "time zones",
    "the Silk Road", "glaciers", "coffee", "encryption", "gardening in small spaces", "working from home",
    "the immune system", "maps", "budgeting", "tides", "dinosaurs", "operating systems", "relational databases",
    "machine learning", "HTTP",
)  # fmt: skip

CODE = (
    "Write a {language} function that {task}.",
    "Write a {language} function that {task}, with a docstring or comment and two examples.",
    "How do I write code in {language} that {task}? Explain the steps briefly.",
    "Write a {language} program that {task}. Handle empty input.",
    "Write unit tests in {language} for a function that {task}.",
    "Show two different ways in {language} to write a function that {task}.",
)

LANGUAGES = ("Python", "JavaScript", "C++", "Rust", "Java", "Go", "TypeScript")

TASKS = (
    "reverses the words of a sentence",
    "checks whether a text is a palindrome",
    "finds the two largest numbers of a list",
    "counts the vowels of a text",
    "merges two sorted lists into one",
    "removes duplicates from a list and keeps the order",
    "computes the n-th Fibonacci number without recursion",
    "tells whether a number is prime",
    "returns the greatest common divisor of two integers",
    "sorts a list of names by length and then by alphabet",
    "flattens a nested list",
    "rotates a list by k places",
    "converts a Roman numeral to an integer",
    "converts a number to its binary digits",
    "finds the longest common prefix of a list of words",
    "groups words that are anagrams of each other",
    "computes the factors of a number",
    "validates an email address with a simple rule",
    "parses a line of comma separated values with quotes",
    "implements a stack with push, pop and minimum",
    "does a binary search in a sorted list",
    "computes the median of a list of numbers",
    "counts how often each word occurs in a text",
    "computes a running average",
    "transposes a matrix",
    "multiplies two matrices",
    "checks whether brackets are balanced",
    "finds the first character that does not repeat",
    "encodes a text by run lengths",
    "computes the edit distance of two words",
    "walks a directory and sums the sizes of its files",
    "reads a JSON file and prints the keys",
    "implements a queue with two stacks",
    "finds all pairs of a list that sum to a target",
    "computes the power set of a small set",
    "shuffles a deck of cards",
    "converts degrees Celsius to Fahrenheit and back",
    "returns the number of days between two dates",
    "implements insertion sort",
    "caches the results of a slow function",
)

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leo")
THINGS = ("apples", "books", "marbles", "stamps", "tickets", "pencils", "cards", "shells", "coins", "cookies")


def _sum_of_shopping(rng: random.Random) -> str:
    name, thing, other = rng.choice(NAMES), *rng.sample(THINGS, 2)
    price, count, more = rng.randint(2, 19), rng.randint(3, 12), rng.randint(2, 9)
    return (
        f"{name} buys {count} {thing} for ${price} each and {more} {other} for ${rng.randint(1, 9)} each. "
        "How much does it cost together? Show your steps."
    )


def _parts(rng: random.Random) -> str:
    name, thing, part = rng.choice(NAMES), rng.choice(THINGS), rng.choice((2, 3, 4, 5))
    return (
        f"{name} has {part * rng.randint(4, 30)} {thing} and gives away one in {part} of them. Then {name} finds "
        f"{rng.randint(2, 25)} more. How many {thing} does {name} have now?"
    )


def _speed(rng: random.Random) -> str:
    speed, hours, rest = rng.randint(12, 90), rng.randint(2, 8), rng.randint(1, 3)
    return (
        f"A train runs {speed} km in an hour. It runs for {hours} hours, stops for {rest} hours and runs for {rest} "
        "hours more. How far does it get? Think step by step."
    )


def _plain(rng: random.Random) -> str:
    a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 19)
    return f"What is {a} + {b} * {c}? Work it out step by step."


def _percent(rng: random.Random) -> str:
    return (
        f"A coat costs ${rng.randint(4, 40) * 10}. Its price falls by {rng.choice((5, 10, 20, 25, 30, 40))} percent, "
        f"and then {rng.choice(NAMES)} has a coupon of ${rng.randint(2, 15)}. What is to be paid?"
    )


def _ages(rng: random.Random) -> str:
    one, other = rng.sample(NAMES, 2)
    return (
        f"{one} is {rng.randint(3, 20)} years older than {other}. In {rng.randint(2, 9)} years {other} will be "
        f"{rng.randint(12, 40)}. How old is {one} today?"
    )


SUMS = (_sum_of_shopping, _parts, _speed, _plain, _percent, _ages)


def _instructions(rng: random.Random) -> Iterator[str]:
    pairs = list(product(INSTRUCTIONS, TOPICS))
    rng.shuffle(pairs)
    for template, topic in pairs:
        yield template.format(topic=topic, other=rng.choice([one for one in TOPICS if one != topic]))


def _code(rng: random.Random) -> Iterator[str]:
    triples = list(product(CODE, LANGUAGES, TASKS))
    rng.shuffle(triples)
    for template, language, task in triples:
        yield template.format(language=language, task=task)


def _arithmetic(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(SUMS)(rng)


DOCUMENTED = range(40, 600)
"""Characters of a documentation that asks for a function and says what it does."""


def _library(rng: random.Random) -> Iterator[str]:
    """The functions that the modules of this Python's library document; their files are read, never run."""
    found = []
    for path in sorted(Path(get_path("stdlib")).glob("*.py")):
        for one in ast.parse(read_bytes(path)).body:
            if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                words = ast.get_docstring(one) or ""
                if len(words) in DOCUMENTED and ">>>" not in words:
                    found.append(f"Write a Python function `{one.name}({ast.unparse(one.args)})`:\n\n{words}")
    rng.shuffle(found)
    return iter(found)


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "instructions": _instructions,
    "code": _code,
    "arithmetic": _arithmetic,
    "library": _library,
}
"""Kinds of prompts that need no data set and no model."""


def written_prompts(kind: str, count: int, seed: int, *, held_out: bool) -> list[str]:
    """`count` different prompts of a kind, or as many as there are, of those held out or of the others."""
    require(kind in KINDS, "--kinds", kind, f"one of {', '.join(KINDS)}")
    found: dict[str, None] = {}
    for prompt in KINDS[kind](random.Random(f"distill-{kind}-{seed}")):
        if len(found) == count:
            break
        if is_held_out(prompt) is held_out:
            found[prompt] = None
    return list(found)


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out part, which its own text decides."""
    return sha256(prompt.encode()).digest()[0] % HELD_OUT_EVERY == 0
