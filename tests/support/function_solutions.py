"""A solution of each problem of the task `functions`, and a change by which it goes wrong."""

from __future__ import annotations

SOLUTIONS = r"""
def minutes_between(start, end):
    first, last = (int(time[:2]) * 60 + int(time[3:]) for time in (start, end))
    return last - first
* 60 => * 100

def seat_label(number, width):
    return str((number - 1) // width + 1) + chr(ord("A") + (number - 1) % width)
(number - 1) // => number //

def split_bill(total, people):
    share, more = divmod(total, people)
    return [share + 1] * more + [share] * (people - more)
[share + 1] * more + [share] * (people - more) => [share] * (people - more) + [share + 1] * more

def shorten(text, limit):
    return text if len(text) <= limit else text[: limit - 3] + "..."
<= limit => < limit

def longest_plateau(heights):
    best = run = 0
    for place, height in enumerate(heights):
        run = run + 1 if place and heights[place - 1] == height else 1
        best = max(best, run)
    return best
best = max(best, run) => best = run

def free_slots(busy, start, end):
    found, time = [], start
    for begin, stop in [*busy, [end, end]]:
        if begin > time:
            found.append([time, begin])
        time = stop
    return found
[*busy, [end, end]] => busy

def cheapest(prices):
    return min(sorted(prices), key=prices.get, default="")
sorted(prices) => prices

def staircase(steps):
    return "\n".join("#" * step for step in range(1, steps + 1))
range(1, => range(0,

def first_free_number(taken):
    number = 1
    while number in taken:
        number += 1
    return number
number = 1 => number = min(taken, default=1)

def dial_steps(start, target, size):
    way = abs(start - target)
    return min(way, size - way)
min(way, size - way) => way

def initials(name):
    return "".join(part[:1].upper() + "." for part in name.split())
.split() => .split(" ")

def seconds_in(text):
    return sum(int(part[:-1]) * {"h": 3600, "m": 60, "s": 1}[part[-1]] for part in text.split())
"m": 60 => "m": 100

def shared_hours(first, second):
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))
max(0, min(first[1], second[1]) - max(first[0], second[0])) => min(first[1], second[1]) - max(first[0], second[0])

def wave_case(text):
    found, count = "", 0
    for letter in text:
        found += letter.lower() if count % 2 else letter.upper()
        count += letter.isalpha()
    return found
count += letter.isalpha() => count += 1

def render_names(names):
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
if len(names) > 1 => if names

def places(scores):
    return [1 + sum(other > score for other in scores) for score in scores]
for other in scores) => for other in set(scores))

def tank_level(changes, capacity):
    level = 0
    for change in changes:
        level = max(0, min(capacity, level + change))
    return level
max(0, min(capacity, level + change)) => min(capacity, level + change)

def border_sum(grid):
    last, end = len(grid) - 1, len(grid[0]) - 1
    cells = [(row, column) for row in range(last + 1) for column in range(end + 1)]
    return sum(grid[row][column] for row, column in cells if row in (0, last) or column in (0, end))
row in (0, last) or => row == 0 or

def swap_ends(text):
    return text if len(text) < 2 else text[-1] + text[1:-1] + text[0]
if len(text) < 2 => if not text

def favourite_letter(text):
    letters = [letter for letter in text.lower() if "a" <= letter <= "z"]
    return max(sorted(set(letters)), key=letters.count, default="")
sorted(set(letters)) => sorted(set(letters), reverse=True)

def from_digits(digits, base):
    number = 0
    for digit in digits:
        number = number * base + digit
    return number
* base => * 10

def collapse_ranges(numbers):
    runs = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
len(run) > 2 => len(run) > 1

def heading(slug):
    return " ".join(word.capitalize() for word in slug.split("-"))
.capitalize() => .upper()

def lift_travel(floors):
    return sum(abs(end - start) for start, end in zip([0, *floors], floors))
[0, *floors], floors => floors, floors[1:]

def pay_with(amount, coins):
    paid = []
    for coin in sorted(coins, reverse=True):
        paid += [coin] * (amount // coin)
        amount %= coin
    return paid
sorted(coins, reverse=True) => coins

def walk(moves):
    return [moves.count("E") - moves.count("W"), moves.count("N") - moves.count("S")]
moves.count("N") - moves.count("S") => moves.count("S") - moves.count("N")

def table_lines(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
.ljust(width) => .rjust(width)

def bars(counts):
    return [f"{name}: " + "*" * count for name, count in counts.items()]
counts.items() => sorted(counts.items())

def peaks(heights):
    inner = range(1, len(heights) - 1)
    return [place for place in inner if heights[place - 1] < heights[place] > heights[place + 1]]
heights[place - 1] < => heights[place - 1] <=

def wrap_words(text, width):
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
+ 1 + len(word) => + len(word)

def blocks(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]
range(0, len(text), size) => range(0, len(text) - size + 1, size)

def leap_years(first, last):
    return sum(year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) for year in range(first, last + 1))
or year % 400 == 0 => or False

def weekday_after(day, days):
    names = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
    return names[(names.index(day) + days) % 7]
+ days) % 7 => + abs(days)) % 7

def twelve_hour(time):
    hour = int(time[:2])
    return f"{(hour - 1) % 12 + 1}:{time[3:]} {'pm' if hour >= 12 else 'am'}"
(hour - 1) % 12 + 1 => hour % 12

def till_balance(lines):
    return sum(int(line.split()[1]) * (1 if line.startswith("in") else -1) for line in lines)
else -1 => else 0

def day_reached(steps, goal):
    for day in range(1, len(steps) + 1):
        if sum(steps[:day]) >= goal:
            return day
    return 0
>= goal => > goal

def common_guests(first, second):
    return [name for name in dict.fromkeys(first) if name in second]
dict.fromkeys(first) => first

def by_topic(books):
    found = {}
    for title in sorted(books):
        for topic in books[title]:
            found.setdefault(topic, []).append(title)
    return found
sorted(books) => books

def nearest_shelf(shelves, place):
    return min(sorted(shelves), key=lambda shelf: abs(shelf - place))
sorted(shelves) => shelves

def mask_digits(text, shown):
    found, seen = "", 0
    for letter in reversed(text):
        seen += letter.isdigit()
        found = ("*" if letter.isdigit() and seen > shown else letter) + found
    return found
seen += letter.isdigit() => seen += 1

def expand_ranges(text):
    found = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
int(last or first) + 1 => int(last or int(first) + 1)

def knight_moves(column, row):
    steps = [(x, y) for x in range(-2, 3) for y in range(-2, 3) if abs(x) + abs(y) == 3]
    return sum(1 <= column + x <= 8 and 1 <= row + y <= 8 for x, y in steps)
1 <= row + y <= 8 => 0 <= row + y <= 8

def lamps_on(count, presses):
    return [lamp for lamp in range(1, count + 1) if presses.count(lamp) % 2]
presses.count(lamp) % 2 => lamp in presses

def is_older(first, second):
    one, other = ([int(part) for part in text.split(".")] for text in (first, second))
    longest = max(len(one), len(other))
    return one + [0] * (longest - len(one)) < other + [0] * (longest - len(other))
one + [0] * (longest - len(one)) < => one <

def is_magic(grid):
    places = range(len(grid))
    lines = [*grid, *zip(*grid), [grid[n][n] for n in places], [grid[n][-1 - n] for n in places]]
    return len({sum(line) for line in lines}) == 1
[grid[n][n] for n in places], [grid[n][-1 - n] for n in places] => [0][1:] or grid[0]

def word_lengths(text):
    lengths = [len(word) for word in text.split()]
    return {length: lengths.count(length) for length in lengths}
.split() => .split(" ")

def rounds_needed(players):
    rounds = 0
    while players > 1:
        players, rounds = (players + 1) // 2, rounds + 1
    return rounds
(players + 1) // 2 => players // 2

def round_to_step(value, step):
    return (2 * value + step) // (2 * step) * step
(2 * value + step) // (2 * step) * step => round(value / step) * step

def tiles_needed(length, width, tile):
    return -(-length // tile) * -(-width // tile)
-(-length // tile) * -(-width // tile) => -(-length * width // tile**2)

def jury_sum(scores):
    return sum(sorted(scores)[1:-1])
sum(sorted(scores)[1:-1]) => sum(score for score in scores if min(scores) < score < max(scores))

def folder_depth(steps):
    depth = 0
    for step in steps:
        depth = max(0, depth - 1) if step == ".." else depth + (step != ".")
    return depth
max(0, depth - 1) => depth - 1

def change_due(coins, price):
    return max(sum(coins) - price, -1)
max(sum(coins) - price, -1) => sum(coins) - price if sum(coins) > price else -1

def weave(first, second):
    found = "".join(a + b for a, b in zip(first, second))
    return found + first[len(second) :] + second[len(first) :]
+ second[len(first) :] => + ""

def mines_around(field, row, column):
    squares = [(y, x) for y in range(len(field)) for x in range(len(field[0]))]
    return sum(field[y][x] for y, x in squares if max(abs(y - row), abs(x - column)) == 1)
max(abs(y - row), abs(x - column)) == 1 => max(abs(y - row), abs(x - column)) <= 1

def fold_strip(values):
    half = len(values) // 2
    return [values[n] + values[-1 - n] for n in range(half)] + values[half : len(values) - half]
+ values[half : len(values) - half] => + []

def check_digit(code):
    total = sum(int(digit) * (1, 3)[place % 2] for place, digit in enumerate(code))
    return -total % 10
-total % 10 => 10 - total % 10

def is_chain(words):
    return all(one[-1] == other[0] for one, other in zip(words, words[1:]))
zip(words, words[1:]) => zip(words[:1], words[1:])

def closing_time(customers, desks):
    free = [0] * desks
    for minutes in customers:
        free = sorted([free[0] + minutes, *free[1:]])
    return free[-1]
free = sorted([free[0] + minutes, *free[1:]]) => free = [*free[1:], free[0] + minutes]

def stock_after(stock, sales):
    left = {item: count - sales.count(item) for item, count in stock.items()}
    return {item: count for item, count in left.items() if count > 0}
if count > 0 => if count != 0

def spell_digits(number):
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return " ".join(words[int(digit)] for digit in str(number))
"eight", "nine" => "nine", "eight"
"""


def solutions() -> dict[str, tuple[str, str]]:
    """A right and a wrong solution by the name of the function; both are functions that run."""
    found = {}
    for block in SOLUTIONS.strip().split("\n\n"):
        code, _, change = block.rpartition("\n")
        old, _, new = change.partition(" => ")
        assert code.count(old) == 1, change
        found[code.removeprefix("def ").partition("(")[0]] = (code, code.replace(old, new))
    return found
